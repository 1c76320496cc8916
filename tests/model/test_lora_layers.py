"""LoRA adapters on frozen weights: parameters, FLOP and kept bytes of one layer by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.model.flops import token_flops
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import BlockForm, MlpType
from clustersim.model.layers import embedding_layer, head_layer
from clustersim.model.lora import Lora, LoraTarget, Projection
from clustersim.model.operators import ADAPTERS, DENSE, QUANTIZED, LayerOperators, LayerShard, Operator
from clustersim.model.presets import load_preset
from clustersim.model.training import NONE_FUSED, AttentionBackend, SelectiveOpRecompute, Training
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    adapter_parameter_count,
    matrix_parameter_count,
    parameter_count,
    resize_model,
    uniform_model,
)
from tests.conftest import examples
from tests.uniform_models import uniform_layer

H, Q, KV, F, R, T = 64, 96, 32, 160, 8, 128
"""hidden, width of all query heads, of all key heads, of the MLP; rank; tokens"""
MODEL = uniform_model(
    name="small", layers=3, hidden=H, ffn=F, heads=6, kv_heads=2, head_dim=16, vocab=256, max_positions=T,
    mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY, tied_embeddings=False, linear_bias=False,
)  # fmt: skip
ALL_TARGETS = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O, LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)
MATRICES = H * Q + 2 * H * KV + Q * H + 3 * H * F
LORA = Training(sequence=T, global_batch=1, lora=Lora(R, ALL_TARGETS, alpha=16.0))
FULL_TRAINING = replace(LORA, lora=None)
UNSHARDED = LayerShard(batch=1, sequence=T, keys=T)


def training_with_lora(*targets: LoraTarget, **changes: float) -> Training:
    return replace(LORA, lora=Lora(R, targets, alpha=16.0, **changes))  # type: ignore[arg-type]


def group_parameter_count(sharded_layer: LayerOperators, group: str) -> int:
    return sharded_layer.parameters_by_group.get(group, 0)


def matmul_flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


def find_operator(sharded_layer: LayerOperators, name: str) -> Operator:
    return next(operator for operator in sharded_layer.operators if operator.name == name)


def test_adapter_parameters_are_those_of_a_and_b_of_each_matrix() -> None:
    """A has rank x inputs, B outputs x rank."""
    lora_layer = uniform_layer(MODEL, LORA, UNSHARDED)
    by_hand = R * ((H + Q) + 2 * (H + KV) + (Q + H) + 2 * (H + F) + (F + H))
    assert (
        group_parameter_count(lora_layer, ADAPTERS)
        == by_hand
        == adapter_parameter_count(MODEL, LORA.lora or Lora(1, (), 1.0)) / 3
    )
    assert group_parameter_count(lora_layer, DENSE) == MATRICES + 2 * H


def test_one_adapter_of_a_fused_layer_has_one_a() -> None:
    """As Megatron's linear_qkv and linear_fc1: A has the layer's inputs once, B all outputs."""
    lora_layer = uniform_layer(MODEL, training_with_lora(LoraTarget.QKV, LoraTarget.GATE_UP), UNSHARDED)
    assert group_parameter_count(lora_layer, ADAPTERS) == R * (H + Q + 2 * KV) + R * (H + 2 * F)


def test_a_layers_flop() -> None:
    """Two per parameter and token for each matmul: frozen weights have two matmuls, adapters three."""
    lora_layer, adapters = uniform_layer(MODEL, LORA, UNSHARDED), R * (2 * H + 2 * Q + 2 * H + 2 * KV + 3 * (H + F))
    forward, inputs, weights = (
        sum(matmul_flops(getattr(operator, name)) for operator in lora_layer.operators)
        for name in ("forward", "input_gradient", "weight_gradient")
    )
    assert forward == inputs == 2 * T * (MATRICES + adapters)
    assert weights == 2 * T * adapters


def test_model_flop_count_frozen_matrices_four_times_and_adapters_six_times() -> None:
    lora = training_with_lora(*ALL_TARGETS).lora
    assert lora is not None
    queries = 3 * Q
    expected = 4.0 * matrix_parameter_count(MODEL) + 6.0 * adapter_parameter_count(MODEL, lora) + 12.0 * queries * T
    assert token_flops(MODEL, T, lora) == expected
    assert token_flops(MODEL, T) - expected == 2.0 * (
        matrix_parameter_count(MODEL) - 3 * adapter_parameter_count(MODEL, lora)
    )


def test_kept_activations_by_hand() -> None:
    """Norms' inputs, q, k, v, flash attention's logarithms and result, gate and up, A's and B's inputs.

    With adapters on attention only the MLP's inputs are not kept; attention's result is kept for its own
    backward.
    """
    frozen_bytes = 2 * (2 * T * H) + 2 * T * (Q + 2 * KV) + 4 * T * 6 + 2 * T * Q + 2 * (2 * T * F)
    all_bytes = frozen_bytes + 2 * T * (H + H + F) + 7 * 2 * T * R
    assert uniform_layer(MODEL, LORA, UNSHARDED).saved_bytes == all_bytes
    assert (
        uniform_layer(MODEL, training_with_lora(LoraTarget.Q, LoraTarget.V), UNSHARDED).saved_bytes
        == frozen_bytes + 2 * T * H + 2 * 2 * T * R
    )
    assert (
        uniform_layer(MODEL, training_with_lora(LoraTarget.O), UNSHARDED).saved_bytes == frozen_bytes + 2 * T * R
    )  # its input is the result


def test_branches_of_a_parallel_block_share_their_kept_input() -> None:
    """Adapters on the queries and on the MLP's first matrix read the same norm's result."""
    parallel = resize_model(MODEL, block=BlockForm.PARALLEL)
    without_input = (
        uniform_layer(parallel, training_with_lora(LoraTarget.DOWN), UNSHARDED).saved_bytes - 2 * T * F - 2 * T * R
    )
    queries, up, queries_and_up = (
        uniform_layer(parallel, training_with_lora(*targets), UNSHARDED).saved_bytes - without_input
        for targets in ((LoraTarget.Q,), (LoraTarget.UP,), (LoraTarget.Q, LoraTarget.UP))
    )
    assert queries == up == 2 * T * H + 2 * T * R
    assert queries_and_up == 2 * T * H + 2 * 2 * T * R


@pytest.mark.parametrize("block", BlockForm)
def test_every_block_form_has_all_adapters(block: BlockForm) -> None:
    lora_layer = uniform_layer(resize_model(MODEL, block=block), LORA, UNSHARDED)
    assert group_parameter_count(lora_layer, ADAPTERS) * 3 == adapter_parameter_count(
        MODEL, LORA.lora or Lora(1, (), 1.0)
    )
    assert not any(
        operator.weight_gradient for operator in lora_layer.operators if operator.parameter_group != ADAPTERS
    )
    assert all(item.saved_bytes >= 0 for item in lora_layer.operators)


def test_standard_attention_does_not_read_its_result_again() -> None:
    standard = replace(training_with_lora(LoraTarget.DOWN), attention=AttentionBackend.STANDARD)
    assert find_operator(uniform_layer(MODEL, standard, UNSHARDED), "attention.out").saved_bytes == 0.0


def test_deferred_weight_gradient_bytes_by_hand() -> None:
    """Inputs of A and of B, and the gradients of both's results; frozen layers defer nothing."""
    lora_layer = uniform_layer(MODEL, training_with_lora(LoraTarget.Q, LoraTarget.DOWN), UNSHARDED)
    query_bytes = 2 * T * (H + R) + 2 * T * (R + Q)
    down_bytes = 2 * T * (F + R) + 2 * T * (R + H)
    assert lora_layer.deferred_wgrad_bytes == query_bytes + down_bytes


def test_dropout_keeps_an_input_and_a_mask_for_each_adapter() -> None:
    without_dropout, dropped = (
        uniform_layer(MODEL, training_with_lora(LoraTarget.Q, LoraTarget.V, dropout=rate), UNSHARDED)
        for rate in (0.0, 0.1)
    )
    assert dropped.saved_bytes - without_dropout.saved_bytes == 2 * (2 + 1) * T * H - 2 * T * H
    kinds = [kernel.kind for kernel in find_operator(dropped, "attention.qkv.lora_a").forward]
    assert kinds == 2 * [KernelKind.DROPOUT] + 2 * [KernelKind.MATMUL]
    backward = [kernel.kind for kernel in find_operator(dropped, "attention.qkv.lora_a").input_gradient]
    assert backward.count(KernelKind.DROPOUT) == 2


def test_results_are_scaled_and_added_in_one_kernel_or_two() -> None:
    """Two reads and a write; unfused one read and one write more. Backward scales the gradient and adds two of them."""
    for training, passes, launches in (
        (training_with_lora(LoraTarget.DOWN), 3, 1),
        (replace(training_with_lora(LoraTarget.DOWN), fused=NONE_FUSED), 5, 2),
    ):
        lora_b = find_operator(uniform_layer(MODEL, training, UNSHARDED), "mlp.down.lora_b")
        (added,) = (kernel for kernel in lora_b.forward if kernel.kind is not KernelKind.MATMUL)
        assert (added.bytes, added.launches) == (passes * 2 * T * H, launches)
        assert lora_b.input_gradient[0].bytes == 2 * 2 * T * H
    summed = find_operator(uniform_layer(MODEL, LORA, UNSHARDED), "mlp.down.lora_a").input_gradient[-1]
    assert (summed.name, summed.bytes) == ("mlp.down.lora_a.gradient_sum", 3 * 2 * T * F)


@pytest.mark.parametrize("training", [LORA, replace(LORA, recompute=SelectiveOpRecompute())])
def test_quantized_weights_are_dequantized_before_each_matmul(training: Training) -> None:
    """4 bits, 8 for 64 of them, 32 for 64 x 256 are read, 16 written, of every matrix and for every matmul."""
    lora = replace(training.lora or Lora(1, (), 1.0), base=DType.NF4)
    quantized_layer = uniform_layer(MODEL, replace(training, lora=lora), UNSHARDED)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert DType.NF4.bits == bits == pytest.approx(4.127, abs=5e-4)
    assert (
        group_parameter_count(quantized_layer, QUANTIZED) == MATRICES
        and group_parameter_count(quantized_layer, DENSE) == 2 * H
    )
    for operator in (item for item in quantized_layer.operators if item.parameter_group == QUANTIZED):
        for kernels in (
            operator.forward,
            operator.input_gradient,
            *((operator.recompute_override,) if operator.recompute_override else ()),
        ):
            unpacked, matmul = kernels
            assert unpacked.bytes == pytest.approx(operator.parameter_count * (bits + 16) / 8)
            assert isinstance(unpacked.shape, MemoryBoundShape) and unpacked.shape.routine is MemoryBoundOp.DEQUANTIZE
            assert matmul.kind is KernelKind.MATMUL
    sizes = {
        element.name: element.dequantized_bytes for element in quantized_layer.operators if element.dequantized_bytes
    }
    assert sizes == {
        "attention.qkv": 2 * H * Q,
        "attention.out": 2 * Q * H,
        "mlp.up": 2 * H * F,
        "mlp.down": 2 * F * H,
    }


def test_frozen_embedding_and_logits_keep_no_inputs() -> None:
    frozen_embedding, frozen_head = embedding_layer(MODEL, LORA, UNSHARDED), head_layer(MODEL, LORA, UNSHARDED)
    assert frozen_embedding.saved_bytes == 0.0 and not any(
        operator.input_gradient or operator.weight_gradient for operator in frozen_embedding.operators
    )
    logits = find_operator(frozen_head, "head.logits")
    assert logits.saved_bytes == 0.0 and logits.input_gradient and not logits.weight_gradient
    assert head_layer(MODEL, FULL_TRAINING, UNSHARDED).saved_bytes - frozen_head.saved_bytes == 2 * T * H


@examples(60)
@given(
    rank=st.sampled_from([4, 8, 24]),
    tp=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["llama3-8b", "llama-tiny", "gpt3-1.3b", "llama3-70b"]),
    targets=st.sets(st.sampled_from(ALL_TARGETS), min_size=1).map(
        lambda chosen: tuple(sorted(chosen, key=ALL_TARGETS.index))
    ),
)
def test_ranks_of_a_tensor_parallel_group_hold_every_adapter_once(
    rank: int, tp: int, name: str, targets: tuple[LoraTarget, ...]
) -> None:
    """Both halves are split: A by columns of the rank or rows of the inputs, B by columns of the outputs."""
    model, lora = load_preset(name), Lora(rank, targets, 16.0)
    training = Training(sequence=64, global_batch=1, lora=lora)
    lora_layer = uniform_layer(model, training, LayerShard(batch=1, sequence=64, keys=64, tp=tp))
    assert group_parameter_count(lora_layer, ADAPTERS) * tp * model.layer_count == adapter_parameter_count(model, lora)


def test_a_model_without_a_gate_has_no_gate_adapter() -> None:
    model = load_preset("gpt3-1.3b")
    assert Projection.GATE not in LoraTarget.UP.projections
    counts = (
        adapter_parameter_count(model, Lora(4, targets, 1.0)) for targets in ((LoraTarget.UP,), (LoraTarget.GATE_UP,))
    )
    assert len(set(counts)) == 1


def test_without_adapters_nothing_is_frozen() -> None:
    full_layer = uniform_layer(MODEL, FULL_TRAINING, UNSHARDED)
    assert all(operator.trainable and operator.parameter_group == DENSE for operator in full_layer.operators)
    assert full_layer.parameter_count * 3 + 2 * 256 * H + H == parameter_count(MODEL)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (ALL_TARGETS, 2),
        ((LoraTarget.Q,), 1),
        ((LoraTarget.UP, LoraTarget.GATE), 1),
        ((LoraTarget.O, LoraTarget.DOWN), 1),
        ((LoraTarget.Q, LoraTarget.UP), 2),
    ],
)
def test_a_parallel_block_keeps_its_input_once_for_all_adapters(targets: tuple[LoraTarget, ...], more: int) -> None:
    """In BF16 a serial block keeps one more norm input, and where both branches have adapters one more of these."""
    serial, parallel = (
        uniform_layer(resize_model(MODEL, block=form), training_with_lora(*targets), UNSHARDED).saved_bytes
        for form in SERIAL_AND_PARALLEL
    )
    assert serial - parallel == more * 2 * T * H


SERIAL_AND_PARALLEL = BlockForm.PRE_NORM, BlockForm.PARALLEL


@pytest.mark.parametrize("form", BlockForm)
def test_the_block_form_changes_no_matmul_flops(form: BlockForm) -> None:
    block_layer, pre_norm_layer = (
        uniform_layer(model, LORA, UNSHARDED) for model in (resize_model(MODEL, block=form), MODEL)
    )
    for pass_name in ("forward", "input_gradient", "weight_gradient"):
        block_flops, pre_norm_flops = (
            sum(matmul_flops(getattr(operator, pass_name)) for operator in sharded_layer.operators)
            for sharded_layer in (block_layer, pre_norm_layer)
        )
        assert block_flops == pre_norm_flops
    assert group_parameter_count(block_layer, ADAPTERS) == group_parameter_count(pre_norm_layer, ADAPTERS)
    assert all(operator.saved_bytes >= 0 and operator.deferred_wgrad_bytes >= 0 for operator in block_layer.operators)
