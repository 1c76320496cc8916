"""Which time does each kernel of the plan take in the profiled steps?

A kernel's sample is the mean over everywhere it ran: layers, microbatches, steps, ranks; so that the kernels of a step
sum to what was measured. Its percentiles are those over the same. A kernel that nothing ran is absent.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from calibrate.profile.anchors import Share
from calibrate.profile.leftovers import MatchedPass, match_leftovers
from calibrate.profile.matching import ForwardMap, match_pass
from calibrate.profile.plan_kernels import PassKind, PlanKernel, PlanPass
from calibrate.profile.step_calls import Call, CallPass, StepCalls
from calibrate.profile.windows import UNMATCHED
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    InterferenceSample,
    KernelSample,
    KernelSignature,
    TimeStatistics,
    signature_of,
)
from clustersim.cost.interference import KernelClass, kernel_class_of
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import Kernel

_SIMULATED_PREFIX = "::"
_ALONE = 0.01  # share of a kernel's time with a collective in flight up to which it counts as alone
_MOSTLY = 0.2  # share from which its slowdown is estimated


Pair = tuple[str, KernelClass]
"""A collective and a class of kernels."""


@dataclass(slots=True)
class Execution:
    """One execution of a kernel of the plan: seconds, those with a collective in flight, and which one."""

    seconds: Seconds = 0.0
    overlapped: Seconds = 0.0
    collective: str = ""

    def add(self, call: Call, fraction: float) -> None:
        """Add a part of a call."""
        self.seconds += call.seconds * fraction
        self.overlapped += min(call.overlapped, call.seconds) * fraction
        self.collective = call.collective or self.collective

    def divided(self, count: int) -> "Execution":
        """One of as many equal ones."""
        return Execution(self.seconds / count, self.overlapped / count, self.collective)

    def pair(self, kernel: Kernel) -> Pair:
        """What overlapped."""
        return self.collective, kernel_class_of(kernel.kind)

    def isolated(self, slowdown: float) -> Seconds:
        """Seconds without a collective in flight."""
        return self.seconds - self.overlapped * slowdown / (1.0 + slowdown)


@dataclass
class MatchedSteps:
    """Calls of profiled steps by the plan's kernel that they ran.

    executions: of each kernel of the plan (one repeat); kernels: by signature; unmatched: calls of none, with the kind
    of their pass; busy, matched: seconds of all calls, and of those that ran an operator; anchor_seconds,
    matched_anchor_seconds: the same of matmuls and attention; stall: seconds for which the GPU waited for the host,
    in the representative step of all ranks; steps, representative_steps: number of steps (on all ranks).
    """

    executions: dict[KernelSignature, list[Execution]] = field(default_factory=lambda: defaultdict(list))
    kernels: dict[KernelSignature, Kernel] = field(default_factory=dict)
    unmatched: list[tuple[PassKind, Call]] = field(default_factory=list)
    busy: Seconds = 0.0
    matched: Seconds = 0.0
    stall: dict[PassKind, Seconds] = field(default_factory=lambda: dict.fromkeys(PassKind, 0.0))
    anchor_seconds: Seconds = 0.0
    matched_anchor_seconds: Seconds = 0.0
    steps: int = 0
    representative_steps: int = 0
    _forward_shares: dict[object, list[Share]] = field(default_factory=dict, repr=False)

    def add_step(self, plan: tuple[PlanPass, ...], step: StepCalls, *, is_representative: bool) -> None:
        """Match one step of one rank. is_representative: the step whose time is reproduced."""
        forward = ForwardMap()
        passes = [self._match(*pair, forward) for pair in _pair_passes(plan, step)]
        match_leftovers(passes)
        for matched in passes:
            self._add_pass(matched)
            if is_representative:
                self.stall[matched.calls.kind] += sum(call.stall for call in matched.calls.calls)
        self.steps += 1
        self.representative_steps += is_representative

    def _match(self, plan: PlanPass, calls: CallPass, forward: ForwardMap) -> MatchedPass:
        """Match one pass; a forward, whose calls all microbatches repeat, once; it is added to the step's forwards."""
        exact = _exact_shares(plan.kernels, calls.calls)
        if exact is not None:
            return MatchedPass(plan, calls, exact)
        if plan.kind is not PassKind.FORWARD:
            return MatchedPass(plan, calls, match_pass(plan, calls, forward))
        key = tuple(kernel.kernel.name for kernel in plan.kernels), tuple(map(_identity, calls.calls))
        if key not in self._forward_shares:
            self._forward_shares[key] = match_pass(plan, calls, forward)
        shares = list(self._forward_shares[key])
        forward.add(plan, calls, shares)
        return MatchedPass(plan, calls, shares)

    def _add_pass(self, matched: MatchedPass) -> None:
        plan = matched.plan
        totals = {index: Execution() for index in range(len(plan.kernels))}
        ran = [(matched.calls.calls[index], kernel_index, fraction) for index, kernel_index, fraction in matched.shares]
        for call, kernel_index, fraction in (*ran, *((call, index, 1.0) for call, index in matched.extra)):
            self.busy += call.seconds * fraction
            self.anchor_seconds += call.seconds * fraction * call.is_anchor
            if kernel_index == UNMATCHED:
                self.unmatched.append((matched.calls.kind, call))
                continue
            self.matched += call.seconds * fraction
            self.matched_anchor_seconds += call.seconds * fraction * call.is_anchor
            totals[kernel_index].add(call, fraction)
        for kernel_index, execution in totals.items():
            planned = plan.kernels[kernel_index]
            signature = signature_of(planned.kernel)
            if signature is not None:
                self.kernels.setdefault(signature, planned.kernel)
                self.executions[signature].append(execution.divided(planned.repeats))

    def samples(self, source: str, assumed_slowdown: float) -> tuple[KernelSample, ...]:
        """A sample for each kernel of the plan, as it runs while no collective is in flight.

        assumed_slowdown: by collectives, of kernels that were never seen without.
        """
        slowdowns = self.slowdowns()

        def isolated(execution: Execution, kernel: Kernel) -> Seconds:
            return execution.isolated(slowdowns.get(execution.pair(kernel), assumed_slowdown))

        return tuple(
            _sample(kernel, [isolated(execution, kernel) for execution in self.executions[signature]], source)
            for signature, kernel in self.kernels.items()
        )

    def slowdowns(self) -> dict[Pair, float]:
        """Slowdown of kernels by collectives in flight, by collective and class, where both states were seen.

        While a collective is in flight for o of the kernel's seconds d, o / (1 + s) of its work is done, the rest in
        d - o.
        """
        in_flight: dict[Pair, list[Seconds]] = {}
        for signature, executions in self.executions.items():
            isolated_seconds = [
                execution.seconds
                for execution in executions
                if execution.overlapped <= _ALONE * execution.seconds and execution.seconds > 0.0
            ]
            if not isolated_seconds:
                continue
            isolated = float(np.mean(isolated_seconds))
            for execution in executions:
                if execution.overlapped > _MOSTLY * execution.seconds:
                    sums = in_flight.setdefault(execution.pair(self.kernels[signature]), [0.0, 0.0])
                    sums[0] += execution.overlapped
                    sums[1] += max(0.0, isolated - (execution.seconds - execution.overlapped))
        return {pair: max(0.0, seen / work - 1.0) for pair, (seen, work) in in_flight.items() if work > 0.0 and pair[0]}

    def interference(self, kernels: Iterable[KernelSample]) -> tuple[InterferenceSample, ...]:
        """The slowdowns as samples, each with the longest kernel of its class."""
        measured = [(sample, sample.time) for sample in kernels if sample.time is not None]
        samples = []
        for (collective, kernel_class), slowdown in self.slowdowns().items():
            candidates = [(sample, time) for sample, time in measured if kernel_class_of(sample.kind) is kernel_class]
            sample, time = max(candidates, key=lambda pair: pair[1].seconds)
            samples.append(InterferenceSample(sample, collective, time.scaled(1.0 + slowdown)))
        return tuple(samples)


def _identity(call: Call) -> tuple[object, ...]:
    """What matching sees of a call, but for its duration."""
    return call.name, call.kind, call.operator, str(call.dims), call.matmul, call.transfer


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
    outcome = MeasurementOutcome.MEASURED if is_there else MeasurementOutcome.ABSENT
    return KernelSample.of_kernel(kernel, time, outcome, source)


def _pair_passes(plan: tuple[PlanPass, ...], step: StepCalls) -> Iterable[tuple[PlanPass, CallPass]]:
    """Passes of the plan with those of the step; all as one where the step does not say what its passes are.

    Work outside passes is one pass, the last: a framework zeroes gradients where it likes.
    """
    passes = [one_pass for one_pass in plan if one_pass.kernels]
    everything = PlanPass(PassKind.OPTIMIZER, tuple(kernel for one_pass in passes for kernel in one_pass.kernels))
    calls = step.passes
    planned = [one_pass for one_pass in passes if one_pass.kind is not PassKind.OPTIMIZER]
    traced = [one_pass for one_pass in calls if one_pass.kind is not PassKind.OPTIMIZER]
    if not step.has_nodes or [one_pass.kind for one_pass in planned] != [one_pass.kind for one_pass in traced]:
        return [(everything, CallPass(PassKind.OPTIMIZER, step.calls))]
    rest = tuple(kernel for one_pass in passes if one_pass.kind is PassKind.OPTIMIZER for kernel in one_pass.kernels)
    rest_calls = tuple(call for one_pass in calls if one_pass.kind is PassKind.OPTIMIZER for call in one_pass.calls)
    pairs = list(zip(planned, traced, strict=True))
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
