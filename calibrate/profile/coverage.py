"""Is a profiled step one of the plan?

Kernels are matched in order, so that a step of fewer layers or microbatches, without recomputation, or of inference
finds a place for each of its kernels: only the plan's matmuls and attention tell that some of them never ran, or ran
less often. Those of another kind of step are compared by how often each runs, weighted by its modelled time; those
that the step runs besides the plan by whether they have sizes of the plan.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.profile.anchors import part_of
from calibrate.profile.leftovers import COMPLETE
from calibrate.profile.plan_kernels import PlanKernel, PlanPass
from calibrate.profile.samples import MatchedSteps
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import signature_of
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel, MatmulShape

_MIN_MATCHED: Final = 0.5  # of the seconds of matmuls and attention: below that the trace is of another model
_MAX_MISSING: Final = 0.02  # of the modelled seconds of the plan's matmuls and attention that run nowhere
_MAX_INCOMPLETE: Final = 0.5  # of the same: operators that run less often than in the plan, by however little
_MAX_REPEATED: Final = 0.005  # of the traced seconds: those of no operator that have sizes of the plan
_LISTED: Final = 4
_NANOSECOND: Final = 1e-9
_ADVICE: Final = "--for is the scenario of the profiled step itself"
_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Operator:
    """A matmul or attention of the plan. sizes: of a matmul; modelled: seconds of one; planned, ran: how often."""

    name: str
    sizes: _Sizes
    modelled: Seconds
    planned: int
    ran: int

    @property
    def text(self) -> str:
        """Name and sizes."""
        return f"{self.name} ({_format(self.sizes)})" if self.sizes else self.name

    @property
    def missing(self) -> Seconds:
        """Modelled seconds that ran nowhere."""
        return self.modelled * (self.planned - self.ran)


def require_same_model(
    matched: MatchedSteps, plans: Sequence[tuple[PlanPass, ...]], accelerator: Accelerator, source: str
) -> None:
    """Raise InputError where the matmuls and attention of the steps are not those of the plans of their ranks."""
    kernels = [kernel for plan in plans for each_pass in plan for kernel in each_pass.kernels]
    _require_known_sizes(matched, kernels, source)
    _require_no_repetition(matched, kernels, source)
    _require_all_operators(matched, kernels, source)
    if not accelerator.is_cpu:  # CPUs differ by more than their names say
        _require_possible_rate(matched, accelerator, source)


def _require_known_sizes(matched: MatchedSteps, kernels: Sequence[PlanKernel], source: str) -> None:
    share = matched.matched_anchor_seconds / matched.anchor_seconds if matched.anchor_seconds else 0.0
    if share >= _MIN_MATCHED:
        return
    planned = Counter[_Sizes]()
    for kernel in kernels:
        if sizes := _sizes(kernel.kernel):
            planned[sizes] += round(kernel.seconds / _NANOSECOND)
    raise InputError(
        f"{source}: is of another model or layout: {1.0 - share:.0%} of the time of its matmuls and attention "
        f"is in none of the plan's; it has {_unmatched_sizes(matched) or 'none'}, the plan {_format_sizes(planned)} "
        f"(m, n, k); {_ADVICE}"
    )


def _unmatched_sizes(matched: MatchedSteps) -> str:
    """Sizes of the matmuls of no operator that take most of the time."""
    seconds = Counter[_Sizes]()
    for _, call in matched.unmatched:
        if call.matmul is not None:
            seconds[call.matmul[:3]] += round(call.seconds / _NANOSECOND)
    least = _MAX_REPEATED * matched.anchor_seconds / _NANOSECOND
    return _format_sizes(Counter({sizes: total for sizes, total in seconds.items() if total >= least}))


def _require_all_operators(matched: MatchedSteps, kernels: Sequence[PlanKernel], source: str) -> None:
    operators = tuple(_operators(matched, kernels))
    total = sum(operator.modelled * operator.planned for operator in operators)
    missing = sum(operator.missing for operator in operators)
    incomplete = [operator for operator in operators if operator.missing > 0.0]
    in_incomplete = sum(operator.modelled * operator.planned for operator in incomplete)
    if missing <= _MAX_MISSING * total and in_incomplete <= _MAX_INCOMPLETE * total:
        return
    examples = ", ".join(
        f"{operator.text} {operator.planned / matched.steps:g} times and not {operator.ran / matched.steps:g}"
        for operator in sorted(incomplete, key=lambda operator: -operator.missing)[:_LISTED]
    )
    others = _unmatched_sizes(matched)
    raise InputError(
        f"{source}: is of another model or layout: {missing / total:.1%} of the plan's matmuls and attention run "
        f"nowhere in a step of it: the plan has {examples}{f'; it has {others} (m, n, k) besides' if others else ''}; "
        f"compare layers, microbatches and recomputation, and whether it is a step of training; {_ADVICE}"
    )


def _operators(matched: MatchedSteps, kernels: Sequence[PlanKernel]) -> Iterator[_Operator]:
    modelled = {signature_of(kernel.kernel): kernel.seconds for kernel in kernels if kernel.is_tensor_kernel}
    for signature, executions in matched.executions.items():
        if signature in modelled:
            ran = sum(execution.seconds > 0.0 for execution in executions)
            kernel = matched.kernels[signature]
            yield _Operator(kernel.name, _sizes(kernel), modelled[signature], len(executions), ran)


def _sizes(kernel: Kernel) -> _Sizes:
    """(m, n, k) of a matmul, m >= n, as traces have them; empty for others."""
    shape = kernel.shape
    return (max(shape.m, shape.n), min(shape.m, shape.n), shape.k) if isinstance(shape, MatmulShape) else ()


def _require_no_repetition(matched: MatchedSteps, kernels: Sequence[PlanKernel], source: str) -> None:
    operators = {signature_of(kernel.kernel): kernel for kernel in kernels if kernel.is_tensor_kernel}
    repeated = [
        call
        for _, call in matched.unmatched
        if call.is_anchor and any((part_of(kernel, call) or 0.0) >= COMPLETE for kernel in operators.values())
    ]
    seconds = sum(call.seconds for call in repeated)
    if seconds <= _MAX_REPEATED * matched.anchor_seconds:
        return
    counts = Counter(call.matmul[:3] for call in repeated if call.matmul is not None)
    examples = ", ".join(
        f"{count / matched.steps:g} of {_format(sizes)}" for sizes, count in counts.most_common(_LISTED)
    )
    raise InputError(
        f"{source}: is of another model or layout: {seconds / matched.anchor_seconds:.1%} of the time of its matmuls "
        f"and attention is in {len(repeated) / matched.steps:g} of a step that are like the plan's, and more than it "
        f"has{f' ({examples})' if examples else ''}; compare layers, microbatches and recomputation; {_ADVICE}"
    )


def _require_possible_rate(matched: MatchedSteps, accelerator: Accelerator, source: str) -> None:
    """Compared with the accelerator's highest peak, of whatever number format."""
    flops = seconds = 0.0
    for signature, executions in matched.executions.items():
        kernel = matched.kernels[signature]
        if kernel.kind in TENSOR_CORE_KINDS:
            ran = [execution.seconds for execution in executions if execution.seconds > 0.0]
            flops, seconds = flops + kernel.flops * len(ran), seconds + sum(ran)
    peak = max(accelerator.peak.values())
    if flops > peak * seconds:
        raise InputError(
            f"{source}: is of another model or layout: the plan's matmuls and attention would compute "
            f"{flops / seconds / peak:.1f} times as fast as {accelerator.name} can at its peak; the trace has no sizes "
            f"(profile with record_shapes=True); {_ADVICE}"
        )


def _format_sizes(seconds: Counter[_Sizes]) -> str:
    """The sizes that take most of the time."""
    return ", ".join(_format(sizes) for sizes, _ in seconds.most_common(_LISTED))


def _format(sizes: _Sizes) -> str:
    return " x ".join(map(str, sizes))
