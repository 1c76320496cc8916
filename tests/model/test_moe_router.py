"""What routing moves and keeps, by hand."""

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

T, H, E, K, EP, BF16, FP32 = 64, 256, 16, 4, 4, 2, 4
ROUTED = MoeMlp(E, K, 128, MlpType.SWIGLU)


def made(routed: MoeMlp = ROUTED, *, there: bool = False, **overheads: bool) -> dict[str, Operator]:
    """The operators of a mixture on one rank of EP."""
    training = Training(T, 1, overheads=Overheads(**overheads))
    rank = RankContext(
        replace(load_preset("llama3-8b"), hidden=H), training, LayerShard(1, T, T, ep=EP, permute_after_dispatch=there)
    )
    return {moe_operator.name: moe_operator for moe_operator in moe_operators(rank, routed)}


def bytes_of(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.bytes for kernel in kernels)


def test_a_fused_permutation_reads_tokens_once_and_keeps_its_map() -> None:
    """Forward makes the map (written and read) and the copies; backward reads K rows of each token and writes one."""
    entries = FP32 * T * (2 * E + 1)
    permuted, summed = made()["mlp.permute"], made()["mlp.unpermute"]
    assert bytes_of(permuted.forward) == 2 * entries + BF16 * T * H * (1 + K)
    assert bytes_of(permuted.input_gradient) == BF16 * T * H * (1 + K)
    assert (permuted.saved_bytes, summed.saved_bytes) == (entries, 0.0)
    assert bytes_of(summed.forward) == bytes_of(summed.input_gradient) == BF16 * T * H * (1 + K)


def test_an_unfused_permutation_reads_each_copy_and_sums_into_zeros() -> None:
    """Rows that are added are read, and their sum is read and written; the sum's zeros are written first."""
    operators = made(permute_unfused=True)
    permuted, summed = operators["mlp.permute"], operators["mlp.unpermute"]
    assert bytes_of(permuted.input_gradient) == bytes_of(summed.forward) == BF16 * T * H * (1 + 3 * K)
    assert bytes_of(summed.input_gradient) == BF16 * T * H * 2 * K
    assert permuted.saved_bytes == 8 * T * K
    assert permuted.forward[0].launches > made()["mlp.permute"].forward[0].launches


def test_a_fused_choice_passes_logits_once_and_keeps_scores_and_the_map() -> None:
    choice = made()["mlp.top_k"]
    assert bytes_of(choice.forward) == T * E * (3 * FP32 + 1)
    assert choice.saved_bytes == T * E * (FP32 + 1)


def test_operations_of_a_choice_grow_with_what_the_router_does() -> None:
    routers = [
        Router(),
        Router(ScoreFunction.SIGMOID),
        Router(ScoreFunction.SIGMOID, bias=True),
        Router(ScoreFunction.SIGMOID, 4, 2, True),
    ]
    found = [made(replace(ROUTED, router=router), router_unfused=True)["mlp.top_k"].forward[0] for router in routers]
    assert [kernel.launches for kernel in found] == [7, 9, 10, 15]
    assert [item.bytes for item in found] == [2 * FP32 * T * E * passes for passes in (5, 7, 8, 13)]


def test_the_loss_of_the_load_passes_scores_once_more() -> None:
    """Fused: logits are read, scores and the map written, both read for sums; 7 passes of the gradients of scores.

    That is each one's own (1), that of the logits (2 read, 1 written), and its sum with the other (2 read, 1 written).
    """
    assert "mlp.balance" not in made()
    balance = made(router_loss=True)["mlp.balance"]
    assert bytes_of(balance.forward) == T * E * (3 * FP32 + 2)
    assert bytes_of(balance.input_gradient) == T * E * 7 * FP32
    assert (balance.saved_bytes, balance.tp_collectives.after_forward) == (T * E * FP32, ())
    assert balance.forward[0].name != made()["mlp.top_k"].forward[0].name


def test_without_fusion_the_loss_is_made_by_an_operation_for_each_pass() -> None:
    softmax, sigmoid = (
        made(replace(ROUTED, router=Router(item)), router_loss=True, router_unfused=True)["mlp.balance"]
        for item in (ScoreFunction.SOFTMAX, ScoreFunction.SIGMOID)
    )
    for found, ahead, back in ((softmax, 7, 3), (sigmoid, 9, 5)):
        (forward,), (backward,) = found.forward, found.input_gradient
        assert (forward.bytes, backward.bytes) == (2 * FP32 * T * E * ahead, 2 * FP32 * T * E * back)
        assert (forward.launches, backward.launches) == (ahead + 2 + 3 + 2, back + 2)


def test_tensor_parallel_ranks_sum_the_load_of_experts() -> None:
    training = Training(T, 1, overheads=Overheads(router_loss=True))
    rank = RankContext(
        replace(load_preset("llama3-8b"), hidden=H), training, LayerShard(1, T, T, tp=2, sequence_parallel=True)
    )
    (balance,) = (moe_operator for moe_operator in moe_operators(rank, ROUTED) if moe_operator.name == "mlp.balance")
    (joint,) = balance.tp_collectives.after_forward
    assert (joint.combine, joint.full_bytes) == (TpCombine.SUM, 8 * E)


def test_a_router_in_fp32_multiplies_copies() -> None:
    plain, copied = made()["mlp.router"], made(router_fp32=True)["mlp.router"]
    assert bytes_of(copied.forward[:1]) == T * H * (BF16 + FP32)
    assert copied.forward[1].dtype.bytes == FP32
    assert copied.saved_bytes == plain.saved_bytes


def test_tokens_that_travel_once_are_copied_where_their_experts_are() -> None:
    """Of T tokens of each of EP ranks those come that have one of E / EP experts among K of E chosen evenly."""
    operators = made(there=True)
    assert "mlp.permute" not in operators and "mlp.unpermute" not in operators
    come = round(T * EP * (1 - comb(E - E // EP, K) / comb(E, K)))
    entries = FP32 * come * (2 * E // EP + 1)
    assert bytes_of(operators["experts.sort"].forward) == 2 * entries + BF16 * H * (come + T * K)
    assert bytes_of(operators["experts.unsort"].forward) == BF16 * H * (come + T * K)


@pytest.mark.parametrize("there", [False, True])
def test_the_probability_of_each_row_is_kept_for_the_activation(there: bool) -> None:
    gated = 2 * 128 * BF16
    assert made(there=there)["experts.activation"].saved_bytes == T * K * (gated + FP32)
