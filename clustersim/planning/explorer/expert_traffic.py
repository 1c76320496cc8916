"""What does a rank send of its tokens to the ranks of experts, and to which of them how much?

The exchanges are those that `parallel.token_dispatch` lists. Of an all-gather or a scattered sum a rank sends all but its own
part round a ring, of an all-to-all all rows but those of its own experts. Kernels that send a token once to each domain
and on from there (`collectives.hierarchical_dispatch`) send as many bytes as different ranks get a token, since each of these gets
it once, whoever passes it on: a rank's tokens reach another if one of their experts is there (`collectives.dispatch_fanout`).
All ranks do the same, so what one sends on for others is what others send on for it. What a rank gets only to pass it
on is not counted.
"""

from collections.abc import Iterator
from typing import Any, Final

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.common.units import Bytes
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.plan import Plan
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.planning.explorer.settings import Space
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting
from clustersim.results.explorer_tables import Table
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.validation_rules.moe import check_expert_sharding

CUT: Final = ("gather rows", "sum parts of experts")
"""Exchanges between the ranks that have parts of the same experts."""
SPREAD: Final = (
    "count rows", "dispatch tokens", "dispatch probabilities", "combine tokens", "gradients of probabilities",
    "gather routing", "gather probabilities",
)  # fmt: skip
"""Exchanges between the ranks that have each other's experts."""
_KERNELS: Final = (TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_V2, TokenDispatcher.HYBRIDEP)
_FORWARDED: Final = (CollectiveType.DISPATCH, CollectiveType.COMBINE)


def dispatch_of(plan: Plan) -> TokenDispatch:
    """How tokens travel in the model's mixture."""
    found = (plan.layer_sharding(spec).dispatch for spec in plan.model.distinct_specs if isinstance(spec.mlp, MoeMlp))
    return next(item for item in found if item is not None)


def sent_of_experts(plan: Plan) -> Iterator[tuple[str, Bytes]]:
    """Bytes that a rank sends of each exchange around experts, by its name."""
    dispatch = dispatch_of(plan)
    ways = (
        dispatch.dispatch_ops(),
        dispatch.combine_ops(),
        dispatch.dispatch_ops(is_backward=True),
        dispatch.combine_ops(is_backward=True),
    )
    for exchange in (comm_op for way in ways for comm_op in way):
        yield exchange.name, exchange.payload * sent(dispatch, exchange)


def sent(dispatch: TokenDispatch, exchange: CommOp) -> float:
    """Part of an exchange's payload that leaves a rank."""
    ep, cut = dispatch.layout.ep, dispatch.layout.effective_etp
    if exchange.collective in _FORWARDED:
        ranks = _reached(dispatch.routing, ep, 1)
        return sum(ranks) / ep * (ep * cut - 1) / dispatch.moe.top_k
    if exchange.collective is CollectiveType.ALL_TO_ALL:
        return 1 - 1 / ep
    return 1 - 1 / (cut if exchange.name in CUT else ep * cut)


def _reached(routing: TokenRouting, ep: int, width: int) -> list[float]:
    """Parts of the tokens that have an expert on each of `ep` ranks, or on so many neighbours of them."""
    return [reached_token_fraction(routing, place / ep, (place + width) / ep) for place in range(0, ep, width)]


def sends(space: Space) -> Table | None:
    """Bytes of one dispatch, for each token of a rank; None where there are no experts.

    ranks: to each place along ep; all: whether all ranks that have a part of an expert get it, or only the one at the
    sender's place, which shares it with them; nodes: by how many neighbours along ep a node has, bytes to each such
    block that cross the network once; None where each rank's go straight to it.
    """

    def ask(precision: int, dispatcher: str, ep: int, etp: int) -> dict[str, Any] | None:
        there = space.at(model=0, precision=precision, dispatcher=dispatcher, ep=ep, etp=etp)
        if ep * etp == 1 or [*check_expert_sharding(there)]:
            return None
        dispatch = dispatch_of(Plan(there.model, there.training, there.layout, there.schedule.placement))
        routing, row, width = dispatch.routing, dispatch.token_bytes, TokenDispatcher(dispatcher)
        if width not in _KERNELS:
            each = row if width is TokenDispatcher.ALL_GATHER else row * dispatch.moe.top_k / ep
            return {"ranks": [each] * ep, "all": width is TokenDispatcher.ALL_GATHER, "nodes": None}
        blocks = {many: [row * part for part in _reached(routing, ep, many)] for many in divisors(ep)}
        return {"ranks": blocks[1], "all": True, "nodes": blocks}

    return space.table(ask, "precision", "dispatcher", "ep", "etp") if space.mixture else None
