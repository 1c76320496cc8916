"""What each dispatcher sends around the experts of a layer."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.layer_stack import MlpType, MoeMlp
from clustersim.parallel.layout import Layout
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.program.task import CollectiveType, TokenDispatcher

TOKENS, ROW, EXPERTS, TOP_K = 100, 64.0, 8, 2
MIXTURE = MoeMlp(EXPERTS, TOP_K, 128, MlpType.SWIGLU)
Sent = list[tuple[str, CollectiveType, str, float]]


def dispatch(dispatcher: TokenDispatcher, ep: int = 4, etp: int = 1) -> TokenDispatch:
    return TokenDispatch(Layout(dp=8, ep=ep, etp=etp, dispatcher=dispatcher), MIXTURE, TOKENS, ROW, DType.BF16)


def sent(exchanges) -> Sent:
    return [(exchange.name, exchange.collective, exchange.group, exchange.payload) for exchange in exchanges]


def test_all_to_all_counts_rows_waits_and_sends_one_for_each_expert_with_its_probability() -> None:
    made = dispatch(TokenDispatcher.ALL_TO_ALL)
    assert sent(made.dispatch_ops()) == [
        ("count rows", CollectiveType.ALL_GATHER, "etp_ep", 4 * EXPERTS * 8),
        ("dispatch tokens", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * ROW),
        ("dispatch probabilities", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * 4),
    ]
    assert [dispatch_op.host_sync for dispatch_op in made.dispatch_ops()] == [False, True, False]
    assert sent(made.combine_ops()) == [("combine tokens", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * ROW)]


def test_backward_knows_where_rows_went_and_returns_the_gradients_of_probabilities() -> None:
    made = dispatch(TokenDispatcher.ALL_TO_ALL)
    assert [dispatch_op.name for dispatch_op in made.dispatch_ops(is_backward=True)] == ["dispatch tokens"]
    assert [combine_op.name for combine_op in made.combine_ops(is_backward=True)] == [
        "combine tokens",
        "gradients of probabilities",
    ]
    assert not any(
        comm_op.host_sync for way in TokenDispatcher for comm_op in dispatch(way).dispatch_ops(is_backward=True)
    )


def test_ranks_that_have_parts_of_one_expert_gather_its_rows_and_scatter_sums() -> None:
    made = dispatch(TokenDispatcher.ALL_TO_ALL, etp=2)
    gathered, summed = made.dispatch_ops()[-1], made.combine_ops()[0]
    assert sent([gathered, summed]) == [
        ("gather rows", CollectiveType.ALL_GATHER, "etp", 2 * TOKENS * TOP_K * ROW),
        ("sum parts of experts", CollectiveType.REDUCE_SCATTER, "etp", 2 * TOKENS * TOP_K * ROW),
    ]
    assert summed.reduce_dtype is DType.BF16


def test_experts_with_a_capacity_need_no_counts_and_nobody_waits() -> None:
    """A quarter more than their even share of 25 of the 100 tokens: 32 rows for each of 8."""
    made = replace(dispatch(TokenDispatcher.ALL_TO_ALL), moe=replace(MIXTURE, capacity=1.25))
    assert sent(made.dispatch_ops()) == [
        ("dispatch tokens", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * ROW),
        ("dispatch probabilities", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * 4),
    ]
    assert not any(dispatch_op.host_sync for dispatch_op in made.dispatch_ops())
    assert sent(made.combine_ops()) == [("combine tokens", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * ROW)]


@pytest.mark.parametrize("etp", [1, 2])
def test_all_gather_moves_every_token_to_every_rank(etp: int) -> None:
    made, ranks = dispatch(TokenDispatcher.ALL_GATHER, etp=etp), 4 * etp
    assert sent(made.dispatch_ops()) == [
        ("gather routing", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * EXPERTS),
        ("gather probabilities", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * EXPERTS * 4),
        ("dispatch tokens", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * ROW),
    ]
    assert sent(made.combine_ops()) == [
        ("combine tokens", CollectiveType.REDUCE_SCATTER, "etp_ep", ranks * TOKENS * ROW)
    ]


@pytest.mark.parametrize("dispatcher", [TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_V2, TokenDispatcher.HYBRIDEP])
def test_kernels_of_their_own_know_the_routing(dispatcher: TokenDispatcher) -> None:
    made = dispatch(dispatcher, etp=2)
    (there,), (back,) = made.dispatch_ops(), made.combine_ops()
    assert sent([there, back]) == [
        ("dispatch tokens", CollectiveType.DISPATCH, "etp_ep", TOKENS * TOP_K * ROW),
        ("combine tokens", CollectiveType.COMBINE, "etp_ep", TOKENS * TOP_K * ROW),
    ]
    assert there.routing == back.routing == made.routing
    assert (made.routing.token_bytes, made.routing.expert_shard_size, made.routing.expert_count) == (ROW, 2, EXPERTS)
    assert there.host_sync and not back.host_sync


@pytest.mark.parametrize("dispatcher", TokenDispatcher)
def test_experts_that_every_rank_has_move_nothing(dispatcher: TokenDispatcher) -> None:
    made = replace(dispatch(dispatcher), layout=Layout(dp=8, dispatcher=dispatcher))
    assert made.dispatch_ops() == made.combine_ops() == ()
