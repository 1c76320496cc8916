"""Which time does each kernel of the plan take in the profiled steps?

A kernel's sample is the mean over everywhere it ran: layers, microbatches, steps, ranks; so that the kernels of a step
sum to what was measured. Its percentiles are those over the same. A kernel that nothing ran is absent.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from calibrate.profile.matching import UNMATCHED, ForwardMap, Share, match_in_order, match_pass
from calibrate.profile.plan_kernels import PassKind, PlanKernel, PlanPass
from calibrate.profile.step_calls import Call, CallPass, StepCalls
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    KernelSample,
    KernelSignature,
    MeasurementOutcome,
    TimeStatistics,
    signature_of,
)
from clustersim.model.kernels import Kernel

_SIMULATED_PREFIX = "::"


@dataclass
class MatchedSteps:
    """Calls of profiled steps by the plan's kernel that they ran.

    seconds: of each execution of a kernel (one repeat); counts: executions in the plan; unmatched: calls of none, with
    the kind of their pass; busy, stall, matched: seconds of all steps; launches: of the host, by kind of pass: host
    seconds and the plan's launches; steps: number of steps (on all ranks).
    """

    seconds: dict[KernelSignature, list[Seconds]] = field(default_factory=lambda: defaultdict(list))
    kernels: dict[KernelSignature, Kernel] = field(default_factory=dict)
    unmatched: list[tuple[PassKind, Call]] = field(default_factory=list)
    busy: Seconds = 0.0
    matched: Seconds = 0.0
    stall: dict[PassKind, Seconds] = field(default_factory=lambda: dict.fromkeys(PassKind, 0.0))
    anchor_seconds: Seconds = 0.0
    matched_anchor_seconds: Seconds = 0.0
    tail: Seconds = 0.0
    steps: int = 0

    def add_step(self, plan: tuple[PlanPass, ...], step: StepCalls) -> None:
        """Match one step of one rank."""
        pairs = list(_pair_passes(plan, step))
        forward = ForwardMap()
        for plan_pass, call_pass in pairs:
            self._add_pass(plan_pass, call_pass, forward)
        self.steps += 1

    def _add_pass(self, plan: PlanPass, calls: CallPass, forward: ForwardMap) -> None:
        exact = _exact_shares(plan.kernels, calls.calls)
        shares = match_pass(plan, calls, forward or None) if exact is None else exact
        if plan.kind is PassKind.FORWARD:
            forward.add(plan, calls, shares)
        totals = dict.fromkeys(range(len(plan.kernels)), 0.0)
        for call_index, kernel_index, part in shares:
            call = calls.calls[call_index]
            self.busy += call.seconds * part
            self.anchor_seconds += call.seconds * part * call.is_anchor
            if kernel_index == UNMATCHED:
                self.unmatched.append((calls.kind, call))
                continue
            self.matched += call.seconds * part
            self.matched_anchor_seconds += call.seconds * part * call.is_anchor
            totals[kernel_index] += call.seconds * part
        for kernel_index, seconds in totals.items():
            planned = plan.kernels[kernel_index]
            signature = signature_of(planned.kernel)
            if signature is not None:
                self.kernels.setdefault(signature, planned.kernel)
                self.seconds[signature].append(seconds / planned.repeats)
        self.stall[calls.kind] += sum(call.stall for call in calls.calls)

    def samples(self, source: str) -> tuple[KernelSample, ...]:
        """A sample for each kernel of the plan."""
        return tuple(_sample(self.kernels[signature], seconds, source) for signature, seconds in self.seconds.items())


def statistics(seconds: Iterable[Seconds]) -> TimeStatistics:
    """Mean and percentiles of executions; the mean lies between the percentiles."""
    values = np.array(list(seconds))
    mean = float(values.mean())
    p5, p95 = (float(value) for value in np.percentile(values, (5, 95)))
    return TimeStatistics(mean, min(p5, mean), max(p95, mean), len(values))


def _sample(kernel: Kernel, seconds: list[Seconds], source: str) -> KernelSample:
    is_there = any(value > 0.0 for value in seconds)
    time = statistics(seconds) if is_there else None
    if time is not None and time.p5 <= 0.0:
        time = TimeStatistics(time.seconds, min(time.seconds, 1e-9), time.p95, time.repetitions)
    assert kernel.shape is not None
    return KernelSample(
        kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches, time,
        MeasurementOutcome.MEASURED if is_there else MeasurementOutcome.ABSENT, source,
    )  # fmt: skip


def _pair_passes(plan: tuple[PlanPass, ...], step: StepCalls) -> Iterable[tuple[PlanPass, CallPass]]:
    """Passes of the plan with those of the step; all as one where the step does not say what its passes are.

    Work outside passes is one pass, the last: a framework zeroes gradients where it likes.
    """
    passes = [each for each in plan if each.kernels]
    everything = PlanPass(PassKind.OPTIMIZER, tuple(kernel for each in passes for kernel in each.kernels))
    calls = step.passes
    own = [each for each in passes if each.kind is not PassKind.OPTIMIZER]
    traced = [each for each in calls if each.kind is not PassKind.OPTIMIZER]
    if not step.has_nodes or [each.kind for each in own] != [each.kind for each in traced]:
        return [(everything, CallPass(PassKind.OPTIMIZER, step.calls))]
    rest = tuple(kernel for each in passes if each.kind is PassKind.OPTIMIZER for kernel in each.kernels)
    rest_calls = tuple(call for each in calls if each.kind is PassKind.OPTIMIZER for call in each.calls)
    pairs = list(zip(own, traced, strict=True))
    return [*pairs, (PlanPass(PassKind.OPTIMIZER, rest), CallPass(PassKind.OPTIMIZER, rest_calls))]


def _exact_shares(kernels: tuple[PlanKernel, ...], calls: tuple[Call, ...]) -> list[Share] | None:
    """Each call with its kernel, where the calls have this program's own names in the plan's order; else None."""
    names = [call.name.partition(_SIMULATED_PREFIX)[2] for call in calls]
    if len(names) != len(kernels) or any(
        name != kernel.kernel.name.partition("/")[0] and not kernel.kernel.name.startswith(name)
        for name, kernel in zip(names, kernels, strict=True)
    ):
        return None
    return [(index, index, 1.0) for index in range(len(calls))]


__all__ = ["MatchedSteps", "match_in_order", "statistics"]
_Matched = Mapping[KernelSignature, list[Seconds]]
