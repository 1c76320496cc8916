"""Bytes that the MoE router and token permutation move and keep, by hand."""

from dataclasses import replace
from math import comb

import pytest

from clustersim.model.kernels import Kernel
from clustersim.model.layer_stack import MlpType, MoeMlp, Router, ScoreFunction
from clustersim.model.moe_layer import moe_operators
from clustersim.model.operators import LayerShard, Operator, TpCombine
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import Training

T, H, E, K, EP, BF16_BYTES, FP32_BYTES = 64, 256, 16, 4, 4, 2, 4
MOE_MLP = MoeMlp(E, K, 128, MlpType.SWIGLU)


def operators_by_name(
    moe: MoeMlp = MOE_MLP, *, permute_after_dispatch: bool = False, receives_indices: bool = False, **overheads: bool
) -> dict[str, Operator]:
    """The operators of a MoE layer on one rank of EP."""
    training = Training(T, 1, overheads=Overheads(**overheads))
    rank = RankContext(
        replace(load_preset("llama3-8b"), hidden=H),
        training,
        LayerShard(1, T, T, ep=EP, permute_after_dispatch=permute_after_dispatch, receives_indices=receives_indices),
    )
    return {moe_operator.name: moe_operator for moe_operator in moe_operators(rank, moe)}


def moved_bytes(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.bytes for kernel in kernels)


def test_a_fused_permutation_reads_tokens_once_and_keeps_its_map() -> None:
    """Forward builds the map (written and read) and the copies; backward reads K copies per token and writes one."""
    map_bytes = FP32_BYTES * T * (2 * E + 1)
    permuted, unpermuted = operators_by_name()["mlp.permute"], operators_by_name()["mlp.unpermute"]
    assert moved_bytes(permuted.forward) == 2 * map_bytes + BF16_BYTES * T * H * (1 + K)
    assert moved_bytes(permuted.input_gradient) == BF16_BYTES * T * H * (1 + K)
    assert (permuted.saved_bytes, unpermuted.saved_bytes) == (map_bytes, 0.0)
    assert moved_bytes(unpermuted.forward) == moved_bytes(unpermuted.input_gradient) == BF16_BYTES * T * H * (1 + K)


def test_an_unfused_permutation_reads_each_copy_and_sums_into_zeros() -> None:
    """Added copies are read, and their sum is read and written; the sum's zeros are written first."""
    operators = operators_by_name(permute_unfused=True)
    permuted, unpermuted = operators["mlp.permute"], operators["mlp.unpermute"]
    assert moved_bytes(permuted.input_gradient) == moved_bytes(unpermuted.forward) == BF16_BYTES * T * H * (1 + 3 * K)
    assert moved_bytes(unpermuted.input_gradient) == BF16_BYTES * T * H * 2 * K
    assert permuted.saved_bytes == 8 * T * K
    assert permuted.forward[0].launches > operators_by_name()["mlp.permute"].forward[0].launches


def test_a_fused_top_k_reads_logits_once_and_keeps_scores_and_map() -> None:
    top_k = operators_by_name()["mlp.top_k"]
    assert moved_bytes(top_k.forward) == T * E * (3 * FP32_BYTES + 1)
    assert top_k.saved_bytes == T * E * (FP32_BYTES + 1)


def test_unfused_top_k_launches_by_router_features() -> None:
    routers = [
        Router(),
        Router(ScoreFunction.SIGMOID),
        Router(ScoreFunction.SIGMOID, bias=True),
        Router(ScoreFunction.SIGMOID, 4, 2, True),
    ]
    top_k_kernels = [
        operators_by_name(replace(MOE_MLP, router=router), router_unfused=True)["mlp.top_k"].forward[0]
        for router in routers
    ]
    assert [top_k_kernel.launches for top_k_kernel in top_k_kernels] == [7, 9, 10, 15]
    assert [kernel.bytes for kernel in top_k_kernels] == [2 * FP32_BYTES * T * E * passes for passes in (5, 7, 8, 13)]


def test_load_balancing_loss_bytes() -> None:
    """Fused: logits are read, scores and the map written, both read for sums; 7 passes over the gradients of scores.

    These are the loss's own (1), that of the logits (2 read, 1 written), and its sum with the other (2 read, 1
    written).
    """
    assert "mlp.balance" not in operators_by_name()
    balance = operators_by_name(router_loss=True)["mlp.balance"]
    assert moved_bytes(balance.forward) == T * E * (3 * FP32_BYTES + 2)
    assert moved_bytes(balance.input_gradient) == T * E * 7 * FP32_BYTES
    assert (balance.saved_bytes, balance.tp_collectives.after_forward) == (T * E * FP32_BYTES, ())
    assert balance.forward[0].name != operators_by_name()["mlp.top_k"].forward[0].name


def test_unfused_load_balancing_loss_launches() -> None:
    softmax, sigmoid = (
        operators_by_name(replace(MOE_MLP, router=Router(scores)), router_loss=True, router_unfused=True)["mlp.balance"]
        for scores in (ScoreFunction.SOFTMAX, ScoreFunction.SIGMOID)
    )
    for operator, forward_passes, backward_passes in ((softmax, 7, 3), (sigmoid, 9, 5)):
        (forward,), (backward,) = operator.forward, operator.input_gradient
        assert (forward.bytes, backward.bytes) == (
            2 * FP32_BYTES * T * E * forward_passes,
            2 * FP32_BYTES * T * E * backward_passes,
        )
        assert (forward.launches, backward.launches) == (forward_passes + 2 + 3 + 2, backward_passes + 2)


def test_tensor_parallel_ranks_all_reduce_expert_loads() -> None:
    training = Training(T, 1, overheads=Overheads(router_loss=True))
    rank = RankContext(
        replace(load_preset("llama3-8b"), hidden=H), training, LayerShard(1, T, T, tp=2, sequence_parallel=True)
    )
    (balance,) = (moe_operator for moe_operator in moe_operators(rank, MOE_MLP) if moe_operator.name == "mlp.balance")
    (all_reduce,) = balance.tp_collectives.after_forward
    assert (all_reduce.combine, all_reduce.full_bytes) == (TpCombine.SUM, 8 * E)


def test_a_router_in_fp32_upcasts_its_input() -> None:
    plain, copied = operators_by_name()["mlp.router"], operators_by_name(router_fp32=True)["mlp.router"]
    assert moved_bytes(copied.forward[:1]) == T * H * (BF16_BYTES + FP32_BYTES)
    assert copied.forward[1].dtype.bytes == FP32_BYTES
    assert copied.saved_bytes == plain.saved_bytes


def test_deduplicated_dispatch_permutes_on_the_receiving_rank() -> None:
    """Of T tokens of each of EP ranks those with one of E / EP experts among K of E uniform choices are received."""
    operators = operators_by_name(permute_after_dispatch=True)
    assert "mlp.permute" not in operators and "mlp.unpermute" not in operators
    received_tokens = round(T * EP * (1 - comb(E - E // EP, K) / comb(E, K)))
    map_bytes = FP32_BYTES * received_tokens * (2 * E // EP + 1)
    assert moved_bytes(operators["experts.sort"].forward) == 2 * map_bytes + BF16_BYTES * H * (received_tokens + T * K)
    assert moved_bytes(operators["experts.unsort"].forward) == BF16_BYTES * H * (received_tokens + T * K)


@pytest.mark.parametrize(
    ("receives_indices", "indices_unfused", "has_mask"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_mask_is_made_of_received_indices_unless_one_kernel_does(
    receives_indices: bool, indices_unfused: bool, has_mask: bool
) -> None:
    """It comes before the sort by expert, and the host waits for it: its sizes are those of what follows."""
    operators = operators_by_name(
        permute_after_dispatch=True, receives_indices=receives_indices, indices_unfused=indices_unfused
    )
    names = [*operators]
    assert ("experts.mask" in operators) is has_mask
    if has_mask:
        assert names.index("experts.mask") + 1 == names.index("experts.sort")
        assert [kernel.host_sync for kernel in operators["experts.mask"].forward] == [True]
        assert not any(kernel.host_sync for kernel in operators["experts.mask"].input_gradient)


@pytest.mark.parametrize("is_saved", [False, True])
def test_token_probabilities_are_kept_for_the_activation(is_saved: bool) -> None:
    gated = 2 * 128 * BF16_BYTES
    assert operators_by_name(permute_after_dispatch=is_saved)["experts.activation"].saved_bytes == T * K * (
        gated + FP32_BYTES
    )
