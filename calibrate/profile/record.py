"""How does a profiled step become a calibration record?

Kernels are matched with those of the plan (`calibrate.profile.matching`). What the step does besides, with the time
for which the GPU waited for a host that the host model does not have, is work of no operator, once for each forward
pass and once for each step. Where all ranks' traces are there, what ranks waited for each other beyond the simulation's
waiting is in the collectives at which they did (`collective_times`). A record of one rank's dry run has no collectives:
these stay modelled. So do those of a trace that this program wrote, in which a collective has the time that other
traffic left it, and the host is drawn.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.profile.collective_times import collective_times
from calibrate.profile.coverage import require_same_model
from calibrate.profile.host_times import compute_host_samples, host_samples
from calibrate.profile.plan_kernels import PassKind, PlanPass, plan_passes
from calibrate.profile.profiled_times import ProfiledTimes
from calibrate.profile.samples import MatchedSteps
from calibrate.profile.step_calls import StepCalls, read_step
from calibrate.profile.unattributed import excess_waiting
from calibrate.typed_command import typed_command
from clustersim.build import build_simulation
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    MeasurementConditions,
    MemoryAnchor,
    ProfileAnchor,
    UnmatchedCall,
)
from clustersim.interop.device_names import device_matches
from clustersim.interop.kineto import ProfilerTraces
from clustersim.results.profiled_step import ProfiledStep, median_step
from clustersim.scenario import Scenario

METHOD: Final = "PyTorch's profiler: kernels of training steps, means over layers, microbatches, steps and ranks"
OWN_PRODUCER: Final = "clustersim"
_COUNT_TOLERANCE: Final = 0.02  # of a step's number of calls: steps with others are of another kind
_NOTED: Final = 0.01  # share of a step
_TIME_TOLERANCE: Final = 0.05  # of a step's time: others were disturbed, or warmed up
_MILLISECOND: Final = 1e-3


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


def record_from_profile(traces: ProfilerTraces, scenario: Scenario, step_time: Seconds | None = None) -> ProfileRecord:
    """The record of traces of steps of a scenario.

    step_time: seconds of the same step without a profiler, which slows the host; None: as it was profiled.
    Raises InputError where they are of another model, device or number of ranks, or take longer on the GPU alone.
    """
    _require_same_job(traces, scenario)
    bare = replace(scenario, cost=replace(scenario.cost, record=None), steps=1)
    prepared, step = build_simulation(bare), median_step(traces.ranks)
    plans = [plan_passes(prepared, spans.rank) for spans in traces.ranks]
    matched, used, notes = _match_steps(traces, plans, step)
    require_same_model(matched, plans, scenario.cluster.accelerator, traces.source)
    anchor = ProfileAnchor(
        traces=traces.source,
        ranks=len(traces.ranks),
        steps=matched.steps // len(traces.ranks),
        step_time=step.step_time,
        busy=matched.busy / matched.steps,
        matched=matched.matched / matched.steps,
        attention=scenario.training.attention,
        unmatched=_unmatched_calls(matched),
    )
    times = ProfiledTimes(
        _record_of_kernels(traces, bare, matched, anchor), bare, matched, plans[0], dict.fromkeys(PassKind, 0.0)
    )
    if not _is_own(traces):
        times = _with_host(times, traces, step, used)
        if len(traces.ranks) == traces.world_size > 1:
            waiting = max(0.0, step.step_time - times.predicted()) / step.step_time
            times = times.with_waiting_of(step.step_time)
            if waiting > _NOTED:
                notes += (
                    f"{waiting:.1%} of the step is waiting of ranks for each other that the simulation does not have: "
                    "they differ, or the machine was disturbed",
                )
    record = times.record()
    if step_time is not None:
        anchor = replace(anchor, step_time=step_time)
        record = replace(times, base=replace(times.base, profile=anchor)).record_of(step_time)
    return ProfileRecord(record, record.profile or anchor, step, notes)


def _with_host(
    times: ProfiledTimes,
    traces: ProfilerTraces,
    step: ProfiledStep,
    used: Sequence[tuple[tuple[PlanPass, ...], StepCalls]],
) -> ProfiledTimes:
    """The same with the collectives, the host's times, and the waiting for it. used: plans and calls of the steps."""
    cluster, calls = times.scenario.cluster, [calls for _, calls in used]
    samples = (compute_host_samples if cluster.accelerator.is_cpu else host_samples)([plan for plan, _ in used], calls)
    on_all_ranks = [
        number
        for number, ranks in Counter(step_calls.number for step_calls in calls).items()
        if ranks == len(traces.ranks)
    ]
    hosted = replace(
        times,
        base=replace(times.base, host_launches=samples),
        collectives=collective_times(traces, cluster, on_all_ranks),
    )
    prepared = build_simulation(replace(times.scenario, cost=replace(times.scenario.cost, record=hosted.record())))
    return replace(hosted, waiting=excess_waiting(times.matched, prepared, step, calls))


def _match_steps(
    traces: ProfilerTraces, plans: Sequence[tuple[PlanPass, ...]], step: ProfiledStep
) -> tuple[MatchedSteps, list[tuple[tuple[PlanPass, ...], StepCalls]], tuple[str, ...]]:
    """All equivalent steps, matched; these with the plans of their ranks; and notes about those left out."""
    elsewhere = 0.0
    matched, used, left_out = MatchedSteps(), list[tuple[tuple[PlanPass, ...], StepCalls]](), dict[int, None]()
    for spans, launches, plan in zip(traces.ranks, traces.launches, plans, strict=True):
        if not np.isfinite(launches.launch_end).any():
            raise InputError(
                f"{traces.source}: has no correlation ids, by which kernels belong to launches, and these to steps and "
                "operators; profile with ProfilerActivity.CPU, too"
            )
        steps, others = _equivalent_steps(
            [read_step(spans, launches, index) for index in range(len(spans.step_numbers))], step.step_number
        )
        left_out |= dict.fromkeys(others)
        elsewhere += sum(calls.elsewhere for calls in steps)
        for calls in steps:
            matched.add_step(plan, calls, is_representative=calls.number == step.step_number)
            used.append((plan, calls))
    text = f"steps {', '.join(map(str, left_out))} run other kernels, or take another time (warm-up, cut off): left out"
    notes = (text,) * bool(left_out)
    if elsewhere > _NOTED * matched.busy:
        notes += (
            f"kernels on other streams than that of the matmuls take {elsewhere / matched.steps / _MILLISECOND:.3g} ms "
            "of a step (copies around collectives, mostly); they run concurrently, and the record has none of them",
        )
    return matched, used, notes


def _record_of_kernels(
    traces: ProfilerTraces, scenario: Scenario, matched: MatchedSteps, anchor: ProfileAnchor
) -> CalibrationRecord:
    """A record of the kernels, and how collectives in flight slow them."""
    accelerator, configured = scenario.cluster.accelerator, scenario.cost.interference
    kernels = matched.samples(
        f"profile of {Path(traces.source).name}", accelerator.interference if configured is None else configured
    )
    library = Path(scenario.cluster.library).stem
    return CalibrationRecord(
        DeviceInfo(
            accelerator.name,
            traces.device_name,
            collectives=library,
            threads=int(scenario.cluster.accelerator.is_cpu),
        ),
        MeasurementConditions(
            date=datetime.now(UTC).date().isoformat(),
            command=typed_command(sys.argv),
            method=METHOD,
        ),
        kernels=kernels,
        interference=matched.interference(kernels),
        profile=anchor,
    )


def _is_own(traces: ProfilerTraces) -> bool:
    """Whether this program wrote the traces."""
    return traces.producer.startswith(OWN_PRODUCER)


def _equivalent_steps(steps: Sequence[StepCalls], representative: int) -> tuple[list[StepCalls], list[int]]:
    """Steps with about as many calls in about as much time as the representative one, and the numbers of the others."""
    wanted = next(step for step in steps if step.number == representative)
    used = [
        step
        for step in steps
        if abs(len(step.calls) - len(wanted.calls)) <= _COUNT_TOLERANCE * len(wanted.calls)
        and abs(step.seconds - wanted.seconds) <= _TIME_TOLERANCE * wanted.seconds
    ]
    return used, [step.number for step in steps if step not in used]


def _unmatched_calls(matched: MatchedSteps) -> tuple[UnmatchedCall, ...]:
    """Calls that ran no operator, the longest first."""
    seconds: dict[tuple[str, str], list[Seconds]] = {}
    for kind, call in matched.unmatched:
        seconds.setdefault((call.operator or call.name, kind.value), []).append(call.seconds)
    calls = (
        UnmatchedCall(*key, count=len(times) / matched.steps, seconds=sum(times) / matched.steps)
        for key, times in seconds.items()
    )
    return tuple(sorted(calls, key=lambda call: -call.seconds))


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
