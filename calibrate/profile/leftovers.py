"""Which matmuls of a step ran operators of another pass, or out of order?

A fused linear layer and loss computes gradients in forward, chunk by chunk. So a matmul that belongs to no operator of
its pass, by order, belongs to one of any pass that lacks as much, by its sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from calibrate.profile.anchors import Share, part_of
from calibrate.profile.plan_kernels import PlanKernel, PlanPass
from calibrate.profile.step_calls import Call, CallPass
from calibrate.profile.windows import UNMATCHED
from clustersim.model.kernels import KernelKind

COMPLETE: Final = 0.9
"""Part of a matmul from which on it lacks nothing: vocabularies are padded."""
_FULL: Final = 1.1  # part beyond which it has too much


@dataclass(frozen=True, slots=True)
class MatchedPass:
    """A pass of a step. shares: its calls and the plan's kernels; extra: calls of other passes that ran some."""

    plan: PlanPass
    calls: CallPass
    shares: list[Share]
    extra: list[tuple[Call, int]] = field(default_factory=list)


def match_leftovers(passes: Sequence[MatchedPass]) -> None:
    """Give matmuls without an operator to operators without matmuls whose sizes they add up to, in place."""
    for matched in passes:
        drop_incomplete(matched)
    for matched in passes:
        taken = {index for _, index, _ in matched.shares}
        for index, kernel in enumerate(matched.plan.kernels):
            if kernel.is_tensor_kernel and index not in taken:
                chosen = _adding_up(kernel, passes)
                for source, position in reversed(chosen):
                    call_index, _, _ = source.shares.pop(position)
                    matched.extra.append((source.calls.calls[call_index], index))


def drop_incomplete(matched: MatchedPass) -> None:
    """Take calls away from matmuls whose sizes they do not add up to, where all sizes are known, in place."""
    filled = [0.0] * len(matched.plan.kernels)
    for call_index, index, share in matched.shares:
        if index >= 0:
            call = matched.calls.calls[call_index]
            is_sized = call.matmul is not None and matched.plan.kernels[index].kernel.kind is KernelKind.MATMUL
            fraction = part_of(matched.plan.kernels[index], call) if is_sized else None
            filled[index] += share * (math.inf if fraction is None else fraction)
    for position, (call_index, index, share) in enumerate(matched.shares):
        if index >= 0 and math.isfinite(filled[index]) and not COMPLETE <= filled[index] <= _FULL:
            matched.shares[position] = call_index, UNMATCHED, share


def _adding_up(kernel: PlanKernel, passes: Sequence[MatchedPass]) -> list[tuple[MatchedPass, int]]:
    """Calls without an operator, as positions of shares of passes in order, that together are a kernel; else none."""
    chosen, filled = list[tuple[MatchedPass, int]](), 0.0
    for source in passes:
        for position, (call_index, taken, _) in enumerate(source.shares):
            call = source.calls.calls[call_index]
            fraction = part_of(kernel, call) if taken == UNMATCHED and call.is_anchor and call.matmul else None
            if fraction is not None and filled + fraction <= _FULL:
                chosen.append((source, position))
                filled += fraction
    return chosen if filled >= COMPLETE else []
