"""How does a profiled step become a calibration record?

Kernels are matched with those of the plan (`calibrate.profile.matching`). What the step does besides, with the time
for which the GPU waited for a host that the host model does not have, is work of no operator, once for each forward
pass and once for each step. Collectives are those of `calibrate.import_kineto`: a collective's time is that of the
member that arrived last, the rest is waiting, which a simulation finds by itself. A record of one rank's dry run has
no collectives: these stay modelled. So do those of a trace that this program wrote, in which a collective has the time
that other traffic left it, and the host is drawn.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from calibrate.import_kineto import collective_samples
from calibrate.profile.host_times import host_samples
from calibrate.profile.plan_kernels import PassKind, PlanPass, plan_passes
from calibrate.profile.samples import MatchedSteps
from calibrate.profile.step_calls import StepCalls, read_step
from clustersim.build import PreparedSimulation, build_simulation
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    MemoryAnchor,
    ProfileAnchor,
    TimeStatistics,
    UnmatchedCall,
)
from clustersim.interop.device_names import device_matches
from clustersim.interop.kineto import ProfilerTraces
from clustersim.model.unattributed import PASS_OVERHEAD, STEP_OVERHEAD
from clustersim.program.action import ActionKind
from clustersim.program.task import ComputeTask
from clustersim.results.profiled_step import ProfiledStep, median_step
from clustersim.scenario import Scenario

METHOD: Final = "PyTorch's profiler: kernels of training steps, means over layers, microbatches, steps and ranks"
OWN_PRODUCER: Final = "clustersim"
_COUNT_TOLERANCE: Final = 0.02  # of a step's number of calls: steps with others are of another kind
_LEAST_OVERHEAD: Final = 1e-9  # seconds: traces have no finer times
_MIN_MATCHED: Final = 0.5  # of the seconds of matmuls and attention: below that the trace is of another model


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """A record with what there is to say about how it was made.

    notes: caveats; left_out: steps in the traces that were not used.
    """

    record: CalibrationRecord
    anchor: ProfileAnchor
    step: ProfiledStep
    notes: tuple[str, ...]

    def with_memory(self, memory: MemoryAnchor) -> "ProfileRecord":
        """The same with the memory of the step."""
        anchor = replace(self.anchor, memory=memory)
        return replace(self, anchor=anchor, record=replace(self.record, profile=anchor))


def record_from_profile(traces: ProfilerTraces, scenario: Scenario) -> ProfileRecord:
    """The record of traces of steps of a scenario.

    Raises InputError where they are of another model, device or number of ranks.
    """
    _require_same_job(traces, scenario)
    bare = replace(scenario, cost=replace(scenario.cost, record=None), steps=1)
    prepared = build_simulation(bare)
    step = median_step(traces.ranks)
    matched, notes = MatchedSteps(), list[str]()
    all_steps: list[StepCalls] = []
    plans: list[tuple[PlanPass, ...]] = []
    for spans, launches in zip(traces.ranks, traces.launches, strict=True):
        plan = plan_passes(prepared, spans.rank)
        steps = [read_step(spans, launches, index) for index in range(len(spans.step_numbers))]
        used, left_out = _alike(steps, step.step_number)
        if left_out and spans is traces.ranks[0]:
            notes.append(f"steps {', '.join(map(str, left_out))} run other kernels (warm-up, or cut off): left out")
        for profiled in used:
            matched.add_step(plan, profiled, is_representative=profiled.number == step.step_number)
            all_steps.append(profiled)
            plans.append(plan)
    _require_same_model(matched, plans[0], traces)
    slowdown = (
        scenario.cluster.accelerator.interference
        if scenario.cost.interference is None
        else (scenario.cost.interference)
    )
    kernels = matched.samples(f"profile of {Path(traces.source).name}", slowdown)
    own = traces.producer.startswith(OWN_PRODUCER)
    hosts = () if own else host_samples(plans, all_steps)
    device = DeviceInfo(
        scenario.cluster.accelerator.name, traces.device_name, collectives=Path(scenario.cluster.library).stem
    )
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command=shlex.join(["clustersim", "calibrate", *sys.argv[1:]]),
        method=METHOD,
    )
    steps_used = matched.steps
    anchor = ProfileAnchor(
        traces.source, len(traces.ranks), steps_used // len(traces.ranks), step.step_time,
        matched.busy / steps_used, matched.matched / steps_used, scenario.training.attention,
        _unmatched_calls(matched),
    )  # fmt: skip
    record = CalibrationRecord(
        device,
        conditions,
        kernels=kernels,
        host_launches=hosts,
        interference=matched.interference(kernels),
        profile=anchor,
        collectives=() if own else collective_samples(traces, scenario.cluster),
    )
    record = replace(record, kernels=(*kernels, *_unattributed(record, matched, step, bare, all_steps)))
    return ProfileRecord(record, anchor, step, tuple(notes))


def _unattributed(
    record: CalibrationRecord, matched: MatchedSteps, step: ProfiledStep, scenario: Scenario, steps: Sequence[StepCalls]
) -> list[KernelSample]:
    """Samples of the work of no operator, for each forward pass and each step."""
    prepared = build_simulation(replace(scenario, cost=replace(scenario.cost, record=record)))
    modelled = _modelled_stalls(prepared, step.ranks[0].rank)
    count = matched.steps
    passes = sum(
        1 for each in plan_passes(prepared, step.ranks[0].rank) if each.kind is PassKind.FORWARD and each.kernels
    )
    busy = dict.fromkeys(PassKind, 0.0)
    for kind, call in matched.unmatched:
        busy[kind] += call.seconds / count
    stall = {kind: seconds / max(1, matched.representative_steps) for kind, seconds in matched.stall.items()}
    in_passes = (PassKind.FORWARD, PassKind.BACKWARD)
    pass_stall = max(0.0, sum(stall[kind] for kind in in_passes) - sum(modelled[kind] for kind in in_passes))
    step_stall = max(0.0, stall[PassKind.OPTIMIZER] - modelled[PassKind.OPTIMIZER]) + _gap_between_steps(step, steps)
    seconds = {
        PASS_OVERHEAD: (sum(busy[kind] for kind in in_passes) + pass_stall) / max(1, passes),
        STEP_OVERHEAD: busy[PassKind.OPTIMIZER] + step_stall,
    }
    return [
        KernelSample.of_kernel(kernel, TimeStatistics(value, value, value, 1))
        for kernel, value in seconds.items()
        if value > _LEAST_OVERHEAD
    ]


def _gap_between_steps(step: ProfiledStep, steps: Sequence[StepCalls]) -> Seconds:
    """Seconds from the last call of a step to the first of the next, as far as other streams are idle, too."""
    used = next((each for each in steps if each.number == step.step_number), None)
    if used is None or len(step.ranks) > 1 or not used.calls:
        return 0.0
    return max(0.0, step.step_time - (used.calls[-1].end - used.calls[0].start))


def _modelled_stalls(prepared: PreparedSimulation, rank: int) -> dict[PassKind, Seconds]:
    """Seconds for which the modelled GPU waits for its host, by the kind of pass."""
    program = prepared.program
    seconds = dict.fromkeys(PassKind, 0.0)
    for task in program.programs[int(program.program_index[rank])].tasks:
        if isinstance(task, ComputeTask):
            timing = prepared.cost.time_segment(rank, task.segment)
            kind = PassKind.OPTIMIZER
            if task.action is not None:
                kind = PassKind.FORWARD if task.action.kind is ActionKind.FORWARD else PassKind.BACKWARD
            seconds[kind] += float(timing.launch_stalls.sum())
    return seconds


def _alike(steps: Sequence[StepCalls], representative: int) -> tuple[list[StepCalls], list[int]]:
    """Steps with about as many calls as the representative one, and the numbers of the others."""
    wanted = next(len(step.calls) for step in steps if step.number == representative)
    used = [step for step in steps if abs(len(step.calls) - wanted) <= _COUNT_TOLERANCE * wanted]
    return used, [step.number for step in steps if step not in used]


def _unmatched_calls(matched: MatchedSteps) -> tuple[UnmatchedCall, ...]:
    """Calls that ran no operator, the longest first."""
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    for kind, call in matched.unmatched:
        key = call.operator or call.name, kind.value
        counts[key] += 1
        seconds[key] += call.seconds  # type: ignore[assignment]
    return tuple(
        UnmatchedCall(*key, count=counts[key] / matched.steps, seconds=float(total) / matched.steps)
        for key, total in seconds.most_common()
    )


def _require_same_job(traces: ProfilerTraces, scenario: Scenario) -> None:
    accelerator = scenario.cluster.accelerator
    if traces.device_name and not device_matches(traces.device_name, accelerator.name):
        raise InputError(
            f"{traces.source}: ran on {traces.device_name}, but {scenario.cluster.name} has {accelerator.name}; "
            "name the cluster that it ran on: --set cluster.name=..."
        )
    world = scenario.layout.world_size
    highest = max(spans.rank for spans in traces.ranks)
    if highest >= world or (len(traces.ranks) > 1 and traces.world_size != world):
        raise InputError(
            f"{traces.source}: is of {traces.world_size:,} ranks, and {scenario.name} has {world:,} GPUs; "
            "--for is the scenario of the profiled step itself"
        )


def _require_same_model(matched: MatchedSteps, plan: tuple[PlanPass, ...], traces: ProfilerTraces) -> None:
    """Raise InputError where most matmuls of the trace are none of the plan."""
    share = matched.matched_anchor_seconds / matched.anchor_seconds if matched.anchor_seconds else 0.0
    if share >= _MIN_MATCHED:
        return
    traced = Counter(call.matmul for _, call in matched.unmatched if call.matmul is not None)
    planned = Counter(
        (max(shape.m, shape.n), min(shape.m, shape.n), shape.k)
        for each in plan
        for kernel in each.kernels
        if (shape := kernel.kernel.shape) is not None and hasattr(shape, "k")
    )
    raise InputError(
        f"{traces.source}: is of another model or layout: {1.0 - share:.0%} of the time of its matmuls and attention "
        f"is in none of the plan's; it has {_format_sizes(key[:3] for key, _ in traced.most_common(4)) or 'none'}, the "
        f"plan {_format_sizes(key for key, _ in planned.most_common(4))} (m, n, k); --for is the scenario of the "
        "profiled step itself"
    )


def _format_sizes(sizes) -> str:  # type: ignore[no-untyped-def]
    return ", ".join(" x ".join(map(str, size)) for size in sizes)


__all__ = ["ProfileRecord", "record_from_profile"]
