"""The simulated step in the terms in which a real one is measured.

Forward and backward last while their passes run, including collectives inside; without pipeline stages to
wait for, also the time that the rank waits before a pass, and before the optimizer for its gradients, as
`backward()` returns when all gradients are complete. The optimizer phase begins with the gradient norm and
ends with the step. All are means over the ranks. Memory is what torch's allocator holds: the ledger without
driver, communicators and fragmentation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrate.check.module_activations import ModuleActivations
from calibrate.check.phase_timer import TIMED_PHASES, StepPhase
from clustersim.build import build_plan
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import ledger_from_order, pass_order
from clustersim.model.framework import Framework
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.program.action import ActionKind
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.expected_error import ExpectedError


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """One step: seconds, phases and kernel time by kind (means over ranks), peak memory of the peak-memory rank.

    provenance: share of predicted time by source; expectation: the expected accuracy of these sources;
    kernel_seconds: by kernel, means over ranks.
    """

    seconds: Seconds
    phases: Mapping[StepPhase, Seconds]
    kernel_kinds: Mapping[KernelKind, Seconds]
    peak_bytes: Bytes
    provenance: Mapping[str, float]
    expectation: ExpectedError
    kernel_seconds: Mapping[Kernel, Seconds]


def predict_step(scenario: Scenario, record: CalibrationRecord | None) -> StepPrediction:
    """Simulate one step with a record of measurements; None: with the scenario's own costs."""
    cost = scenario.cost if record is None else replace(scenario.cost, record=record)
    result = simulate(replace(scenario, cost=cost, steps=1))
    ranks = range(result.rank_count)
    rank_phases = [_phase_seconds(result, rank) for rank in ranks]
    kernel_seconds = _kernel_seconds(result)
    kernel_kinds: dict[KernelKind, Seconds] = {}
    for kernel, seconds in kernel_seconds.items():
        kernel_kinds[kernel.kind] = kernel_kinds.get(kernel.kind, 0.0) + seconds
    return StepPrediction(
        seconds=result.step_time,
        phases={phase: float(np.mean([phases[phase] for phases in rank_phases])) for phase in StepPhase},
        kernel_kinds=kernel_kinds,
        peak_bytes=peak_allocated(scenario),
        provenance=dict(result.provenance_shares),
        expectation=result.kernel_time_uncertainty,
        kernel_seconds=kernel_seconds,
    )


def adapt_scenario(scenario: Scenario, *, on_cpu: bool) -> Scenario:
    """The scenario as it is trained here: gradients are zeroed in place; on a CPU, FSDP2 waits for each reduction."""
    overheads = replace(scenario.training.overheads, zero_grad=True)
    changed = replace(scenario, training=replace(scenario.training, overheads=overheads))
    match scenario.layout.data:
        case FullyShard() as strategy if on_cpu:
            return replace(changed, layout=replace(scenario.layout, data=replace(strategy, waits_for_reduction=True)))
    return changed


def peak_allocated(scenario: Scenario) -> Bytes:
    """Bytes of tensors on the peak-memory rank."""
    plan = build_plan(scenario)
    footprint = Footprint(plan, Framework(fragmentation=1.0, communicator_bytes=0.0), context_bytes=0.0)
    order = scenario.effective_schedule.order(plan.layout.pp, plan.microbatches)
    activations = ModuleActivations(plan)
    return max(
        ledger_from_order(footprint, activations, rank, pass_order(rank_order)).peak
        for rank, rank_order in enumerate(order)
    )


@dataclass(frozen=True, slots=True)
class _ComputeSpan:
    """A compute task of a rank, with its start and end."""

    task: ComputeTask
    start: Seconds
    end: Seconds


def _compute_spans(result: SimulationResult, rank: int) -> Iterator[_ComputeSpan]:
    trace = result.trace
    tasks = result.program.programs[int(result.program.program_index[rank])].tasks
    for span_index in trace.rank_events(int(trace.representative[rank]), Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[span_index])]
        if isinstance(task, ComputeTask):
            yield _ComputeSpan(task, float(trace.start[span_index]), float(trace.end[span_index]))


def _phase_seconds(result: SimulationResult, rank: int) -> dict[StepPhase, Seconds]:
    """Seconds of each phase; before the first pass (zeroing gradients) `OTHER`, after the last the optimizer's."""
    seconds, spans = dict.fromkeys(TIMED_PHASES, 0.0), list(_compute_spans(result, rank))
    is_pipelined = result.scenario.layout.pp > 1
    first_pass = next(index for index, span in enumerate(spans) if span.task.action is not None)
    previous_end, optimizer_start = spans[first_pass - 1].end if first_pass else 0.0, None
    for span in spans[first_pass:]:
        if span.task.action is None:
            optimizer_start = span.start if optimizer_start is None else optimizer_start
            continue
        phase = StepPhase.FORWARD if span.task.action.kind is ActionKind.FORWARD else StepPhase.BACKWARD
        seconds[phase] += span.end - (span.start if is_pipelined else previous_end)
        previous_end = span.end
    optimizer_start = previous_end if optimizer_start is None else optimizer_start
    seconds[StepPhase.BACKWARD] += 0.0 if is_pipelined else optimizer_start - previous_end
    seconds[StepPhase.OPTIMIZER] = result.step_time - optimizer_start
    return {**seconds, StepPhase.OTHER: result.step_time - sum(seconds.values())}


def _kernel_seconds(result: SimulationResult) -> dict[Kernel, Seconds]:
    """Seconds of each kernel in a step, means over ranks."""
    seconds: dict[Kernel, Seconds] = {}
    for rank in range(result.rank_count):
        for span in _compute_spans(result, rank):
            timing = result.cost.time_segment(int(result.trace.representative[rank]), span.task.segment)
            durations = (timing.kernel_seconds - timing.launch_stalls).tolist()
            for operation, duration in zip(span.task.segment.operations, durations, strict=True):
                if operation.kernel is not None:
                    mean_share = duration / result.rank_count
                    seconds[operation.kernel] = seconds.get(operation.kernel, 0.0) + mean_share
    return seconds
