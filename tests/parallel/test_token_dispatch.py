"""Communication of each token dispatcher around the experts of a layer."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.layer_stack import MlpType, MoeMlp
from clustersim.parallel.layout import Layout
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.program.task import CollectiveType, TokenDispatcher

TOKENS, TOKEN_BYTES, EXPERTS, TOP_K = 100, 64.0, 8, 2
MOE = MoeMlp(EXPERTS, TOP_K, 128, MlpType.SWIGLU)
CommOpTuples = list[tuple[str, CollectiveType, str, float]]


def token_dispatch(dispatcher: TokenDispatcher, ep: int = 4, etp: int = 1) -> TokenDispatch:
    return TokenDispatch(Layout(dp=8, ep=ep, etp=etp, dispatcher=dispatcher), MOE, TOKENS, TOKEN_BYTES, DType.BF16)


def comm_op_tuples(comm_ops) -> CommOpTuples:
    return [(comm_op.name, comm_op.collective, comm_op.comm_group, comm_op.payload) for comm_op in comm_ops]


def test_alltoall_synchronizes_counts_and_sends_tokens_and_probabilities() -> None:
    dispatch = token_dispatch(TokenDispatcher.ALL_TO_ALL)
    assert comm_op_tuples(dispatch.dispatch_ops()) == [
        ("count rows", CollectiveType.ALL_GATHER, "etp_ep", 4 * EXPERTS * 8),
        ("dispatch tokens", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * TOKEN_BYTES),
        ("dispatch probabilities", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * 4),
    ]
    assert [dispatch_op.host_sync for dispatch_op in dispatch.dispatch_ops()] == [False, True, False]
    assert comm_op_tuples(dispatch.combine_ops()) == [
        ("combine tokens", CollectiveType.ALL_TO_ALL, "ep", TOKENS * TOP_K * TOKEN_BYTES)
    ]


def test_backward_reuses_the_routing_and_returns_probability_gradients() -> None:
    dispatch = token_dispatch(TokenDispatcher.ALL_TO_ALL)
    assert [dispatch_op.name for dispatch_op in dispatch.dispatch_ops(is_backward=True)] == ["dispatch tokens"]
    assert [combine_op.name for combine_op in dispatch.combine_ops(is_backward=True)] == [
        "combine tokens",
        "gradients of probabilities",
    ]
    assert not any(
        comm_op.host_sync
        for dispatcher in TokenDispatcher
        for comm_op in token_dispatch(dispatcher).dispatch_ops(is_backward=True)
    )


def test_shards_of_an_expert_all_gather_tokens_and_reduce_scatter_outputs() -> None:
    dispatch = token_dispatch(TokenDispatcher.ALL_TO_ALL, etp=2)
    gathered, summed = dispatch.dispatch_ops()[-1], dispatch.combine_ops()[0]
    assert comm_op_tuples([gathered, summed]) == [
        ("gather rows", CollectiveType.ALL_GATHER, "etp", 2 * TOKENS * TOP_K * TOKEN_BYTES),
        ("sum parts of experts", CollectiveType.REDUCE_SCATTER, "etp", 2 * TOKENS * TOP_K * TOKEN_BYTES),
    ]
    assert summed.reduce_dtype is DType.BF16


def test_experts_with_a_capacity_need_no_count_exchange_and_no_host_sync() -> None:
    """25 % above the even share of 25 of the 100 tokens: 32 tokens for each of 8 experts."""
    dispatch = replace(token_dispatch(TokenDispatcher.ALL_TO_ALL), moe=replace(MOE, capacity_factor=1.25))
    assert comm_op_tuples(dispatch.dispatch_ops()) == [
        ("dispatch tokens", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * TOKEN_BYTES),
        ("dispatch probabilities", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * 4),
    ]
    assert not any(dispatch_op.host_sync for dispatch_op in dispatch.dispatch_ops())
    assert comm_op_tuples(dispatch.combine_ops()) == [
        ("combine tokens", CollectiveType.ALL_TO_ALL, "ep", 8 * 32 * TOKEN_BYTES)
    ]


@pytest.mark.parametrize("etp", [1, 2])
def test_allgather_sends_every_token_to_every_rank(etp: int) -> None:
    dispatch, ranks = token_dispatch(TokenDispatcher.ALL_GATHER, etp=etp), 4 * etp
    assert comm_op_tuples(dispatch.dispatch_ops()) == [
        ("gather routing", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * EXPERTS),
        ("gather probabilities", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * EXPERTS * 4),
        ("dispatch tokens", CollectiveType.ALL_GATHER, "etp_ep", ranks * TOKENS * TOKEN_BYTES),
    ]
    assert comm_op_tuples(dispatch.combine_ops()) == [
        ("combine tokens", CollectiveType.REDUCE_SCATTER, "etp_ep", ranks * TOKENS * TOKEN_BYTES)
    ]


@pytest.mark.parametrize("dispatcher", [dispatcher for dispatcher in TokenDispatcher if dispatcher.has_custom_kernels])
def test_dispatch_kernels_use_the_token_routing(dispatcher: TokenDispatcher) -> None:
    dispatch = token_dispatch(dispatcher, etp=2)
    (dispatch_op,), (combine_op,) = dispatch.dispatch_ops(), dispatch.combine_ops()
    assert comm_op_tuples([dispatch_op, combine_op]) == [
        ("dispatch tokens", CollectiveType.DISPATCH, "etp_ep", TOKENS * TOP_K * TOKEN_BYTES),
        ("combine tokens", CollectiveType.COMBINE, "etp_ep", TOKENS * TOP_K * TOKEN_BYTES),
    ]
    assert dispatch_op.routing == combine_op.routing == dispatch.routing
    assert (dispatch.routing.token_bytes, dispatch.routing.expert_shard_size, dispatch.routing.expert_count) == (
        TOKEN_BYTES,
        2,
        EXPERTS,
    )
    assert dispatch_op.host_sync and not combine_op.host_sync


@pytest.mark.parametrize("dispatcher", TokenDispatcher)
def test_replicated_experts_need_no_communication(dispatcher: TokenDispatcher) -> None:
    dispatch = replace(token_dispatch(dispatcher), layout=Layout(dp=8, dispatcher=dispatcher))
    assert dispatch.dispatch_ops() == dispatch.combine_ops() == ()
