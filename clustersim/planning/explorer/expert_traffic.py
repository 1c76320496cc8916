"""How many bytes of its tokens does a rank send to the expert ranks, and to which of them?

The communication is that of `TokenDispatch`. A rank sends everything but its own share in a (ring)
all-gather or reduce-scatter, and all tokens but those of its own experts in an all-to-all. Kernels that
send a token once to each NVLink domain and forward it there (`HierarchicalDispatch`) send as many bytes as
the number of distinct ranks a token reaches: a token reaches a rank if one of its experts is there
(`dispatch_fanout`). All ranks behave the same, so what one forwards for others equals what others forward
for it; tokens received only to be forwarded do not count.
"""

from collections.abc import Iterator
from typing import Any, Final

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.common.units import Bytes
from clustersim.parallel.plan import Plan
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.planning.explorer.settings import ExplorerSpace
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.validation_rules.moe import check_expert_sharding

ETP_OPS: Final = ("gather rows", "sum parts of experts")
"""Collectives between the ranks that hold shards of the same experts (ETP)."""
EP_OPS: Final = (
    "count rows", "dispatch tokens", "dispatch probabilities", "combine tokens", "gradients of probabilities",
    "gather routing", "gather probabilities",
)  # fmt: skip
"""Collectives between the ranks that hold different experts (EP)."""
_FUSED_DISPATCHERS: Final = tuple(dispatcher for dispatcher in TokenDispatcher if dispatcher.has_custom_kernels)
_DISPATCH_COLLECTIVES: Final = (CollectiveType.DISPATCH, CollectiveType.COMBINE)


def token_dispatch(plan: Plan) -> TokenDispatch:
    """The token dispatch of the model's MoE layers."""
    dispatches = (plan.layer_sharding(spec).dispatch for spec in plan.model.distinct_specs if spec.moe is not None)
    return next(dispatch for dispatch in dispatches if dispatch is not None)


def expert_bytes_sent(plan: Plan) -> Iterator[tuple[str, Bytes]]:
    """(name, bytes) that a rank sends in each expert collective of a microbatch and layer, forward and backward."""
    dispatch = token_dispatch(plan)
    op_lists = (
        dispatch.dispatch_ops(),
        dispatch.combine_ops(),
        dispatch.dispatch_ops(is_backward=True),
        dispatch.combine_ops(is_backward=True),
    )
    for comm_op in (op for ops in op_lists for op in ops):
        yield comm_op.name, comm_op.payload * sent_fraction(dispatch, comm_op)


def sent_fraction(dispatch: TokenDispatch, comm_op: CommOp) -> float:
    """Fraction of a collective's payload that leaves the rank."""
    ep, etp = dispatch.layout.ep, dispatch.layout.effective_etp
    if comm_op.collective in _DISPATCH_COLLECTIVES:
        fractions = _reached_fractions(dispatch.routing, ep, 1)
        return sum(fractions) / ep * (ep * etp - 1) / dispatch.moe.top_k
    if comm_op.collective is CollectiveType.ALL_TO_ALL:
        return 1 - 1 / ep
    return 1 - 1 / (etp if comm_op.name in ETP_OPS else ep * etp)


def _reached_fractions(routing: TokenRouting, ep: int, neighbors: int) -> list[float]:
    """Fraction of tokens with an expert on each of ep ranks (or on each block of this many neighbors along ep)."""
    return [reached_token_fraction(routing, first / ep, (first + neighbors) / ep) for first in range(0, ep, neighbors)]


def dispatch_bytes_table(space: ExplorerSpace) -> LookupTable | None:
    """Bytes of one dispatch per token of a rank; None where there is no expert parallelism.

    ranks: to each position along ep; all: whether all ETP ranks of an expert receive it, or only the one at the
    sender's position, which then shares it; nodes: by number of neighbors per node along ep, the bytes to each
    such block that cross the network once; None where tokens go to each rank directly.
    """

    def ask(precision: int, dispatcher: str, ep: int, etp: int) -> dict[str, Any] | None:
        scenario = space.scenario_with(model=0, precision=precision, dispatcher=dispatcher, ep=ep, etp=etp)
        if ep * etp == 1 or [*check_expert_sharding(scenario)]:
            return None
        dispatch = token_dispatch(Plan(scenario.model, scenario.training, scenario.layout, scenario.schedule.placement))
        routing, token_bytes, kind = dispatch.routing, dispatch.token_bytes, TokenDispatcher(dispatcher)
        if kind not in _FUSED_DISPATCHERS:
            rank_bytes = token_bytes if kind is TokenDispatcher.ALL_GATHER else token_bytes * dispatch.moe.top_k / ep
            return {"ranks": [rank_bytes] * ep, "all": kind is TokenDispatcher.ALL_GATHER, "nodes": None}
        by_neighbors = {
            neighbors: [token_bytes * fraction for fraction in _reached_fractions(routing, ep, neighbors)]
            for neighbors in divisors(ep)
        }
        return {"ranks": by_neighbors[1], "all": True, "nodes": by_neighbors}

    return space.build_table(ask, "precision", "dispatcher", "ep", "etp") if space.is_moe else None
