"""Adapters beside frozen weights: parameters, FLOP and bytes kept of one layer by hand."""

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
from clustersim.model.training import AttentionBackend, SelectiveOpRecompute, Training
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
from tests.uniform_models import layer

H, Q, KV, F, R, T = 64, 96, 32, 160, 8, 128
"""hidden, width of all query heads, of all key heads, of the MLP; rank; tokens"""
MODEL = uniform_model(
    name="small", layers=3, hidden=H, ffn=F, heads=6, kv_heads=2, head_dim=16, vocab=256, max_positions=T,
    mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY, tied_embeddings=False, linear_bias=False,
)  # fmt: skip
EACH = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O, LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)
MATRICES = H * Q + 2 * H * KV + Q * H + 3 * H * F
LORA = Training(sequence=T, global_batch=1, lora=Lora(R, EACH, alpha=16.0))
PLAIN = replace(LORA, lora=None)
WHOLE = LayerShard(batch=1, sequence=T, keys=T)


def beside(*targets: LoraTarget, **changes: float) -> Training:
    return replace(LORA, lora=Lora(R, targets, alpha=16.0, **changes))  # type: ignore[arg-type]


def count(of: LayerOperators, group: str) -> int:
    return of.parameters_by_group.get(group, 0)


def flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)


def named(of: LayerOperators, name: str) -> Operator:
    return next(operator for operator in of.operators if operator.name == name)


def test_parameters_are_those_of_a_and_b_beside_each_matrix() -> None:
    """A has rank x inputs, B outputs x rank."""
    made = layer(MODEL, LORA, WHOLE)
    by_hand = R * ((H + Q) + 2 * (H + KV) + (Q + H) + 2 * (H + F) + (F + H))
    assert count(made, ADAPTERS) == by_hand == adapter_parameter_count(MODEL, LORA.lora or Lora(1, (), 1.0)) / 3
    assert count(made, DENSE) == MATRICES + 2 * H


def test_one_adapter_of_a_fused_layer_has_one_a() -> None:
    """As Megatron's linear_qkv and linear_fc1: A has the layer's inputs once, B all outputs."""
    made = layer(MODEL, beside(LoraTarget.QKV, LoraTarget.GATE_UP), WHOLE)
    assert count(made, ADAPTERS) == R * (H + Q + 2 * KV) + R * (H + 2 * F)


def test_a_layers_flop() -> None:
    """Two of each parameter and token for each product: frozen two products, adapters three."""
    made, adapters = layer(MODEL, LORA, WHOLE), R * (2 * H + 2 * Q + 2 * H + 2 * KV + 3 * (H + F))
    forward, inputs, weights = (
        sum(flops(getattr(operator, name)) for operator in made.operators)
        for name in ("forward", "input_gradient", "weight_gradient")
    )
    assert forward == inputs == 2 * T * (MATRICES + adapters)
    assert weights == 2 * T * adapters


def test_model_flop_count_frozen_matrices_four_times_and_adapters_six_times() -> None:
    lora = beside(*EACH).lora
    assert lora is not None
    queries = 3 * Q
    expected = 4.0 * matrix_parameter_count(MODEL) + 6.0 * adapter_parameter_count(MODEL, lora) + 12.0 * queries * T
    assert token_flops(MODEL, T, lora) == expected
    assert token_flops(MODEL, T) - expected == 2.0 * (
        matrix_parameter_count(MODEL) - 3 * adapter_parameter_count(MODEL, lora)
    )


def test_what_a_layer_keeps() -> None:
    """Norms' inputs, queries, keys, values, flash attention's logarithms and result, gate and up, A's and B's inputs.

    Beside nothing of the MLP its inputs are not kept; the attention's result is kept for its own backward.
    """
    gradients = 2 * (2 * T * H) + 2 * T * (Q + 2 * KV) + 4 * T * 6 + 2 * T * Q + 2 * (2 * T * F)
    whole = gradients + 2 * T * (H + H + F) + 7 * 2 * T * R
    assert layer(MODEL, LORA, WHOLE).saved_bytes == whole
    assert layer(MODEL, beside(LoraTarget.Q, LoraTarget.V), WHOLE).saved_bytes == gradients + 2 * T * H + 2 * 2 * T * R
    assert layer(MODEL, beside(LoraTarget.O), WHOLE).saved_bytes == gradients + 2 * T * R  # its input is the result


def test_both_branches_of_a_parallel_block_keep_what_they_read_once() -> None:
    """Adapters beside the queries and beside the MLP's first matrix read the same norm's result."""
    parallel = resize_model(MODEL, block=BlockForm.PARALLEL)
    none = layer(parallel, beside(LoraTarget.DOWN), WHOLE).saved_bytes - 2 * T * F - 2 * T * R
    queries, up, both = (
        layer(parallel, beside(*item), WHOLE).saved_bytes - none
        for item in ((LoraTarget.Q,), (LoraTarget.UP,), (LoraTarget.Q, LoraTarget.UP))
    )
    assert queries == up == 2 * T * H + 2 * T * R
    assert both == 2 * T * H + 2 * 2 * T * R


@pytest.mark.parametrize("block", BlockForm)
def test_adapters_stand_beside_the_matrices_of_every_kind_of_block(block: BlockForm) -> None:
    made = layer(resize_model(MODEL, block=block), LORA, WHOLE)
    assert count(made, ADAPTERS) * 3 == adapter_parameter_count(MODEL, LORA.lora or Lora(1, (), 1.0))
    assert not any(operator.weight_gradient for operator in made.operators if operator.parameter_group != ADAPTERS)
    assert all(item.saved_bytes >= 0 for item in made.operators)


def test_standard_attention_does_not_read_its_result_again() -> None:
    standard = replace(beside(LoraTarget.DOWN), attention=AttentionBackend.STANDARD)
    assert named(layer(MODEL, standard, WHOLE), "attention.out").saved_bytes == 0.0


def test_what_waits_for_the_weights_half() -> None:
    """Inputs of A and of B, and the gradients of both's results; nothing waits of frozen layers."""
    made = layer(MODEL, beside(LoraTarget.Q, LoraTarget.DOWN), WHOLE)
    of_queries = 2 * T * (H + R) + 2 * T * (R + Q)
    of_down = 2 * T * (F + R) + 2 * T * (R + H)
    assert made.deferred_wgrad_bytes == of_queries + of_down


def test_dropout_keeps_an_input_and_a_mask_for_each_adapter() -> None:
    without, dropped = (layer(MODEL, beside(LoraTarget.Q, LoraTarget.V, dropout=rate), WHOLE) for rate in (0.0, 0.1))
    assert dropped.saved_bytes - without.saved_bytes == 2 * (2 + 1) * T * H - 2 * T * H
    kinds = [kernel.kind for kernel in named(dropped, "attention.qkv.lora_a").forward]
    assert kinds == 2 * [KernelKind.DROPOUT] + 2 * [KernelKind.MATMUL]
    backward = [kernel.kind for kernel in named(dropped, "attention.qkv.lora_a").input_gradient]
    assert backward.count(KernelKind.DROPOUT) == 2


def test_results_are_scaled_and_added_in_one_kernel_or_two() -> None:
    """Two reads and a write; unfused a read and a write more. Backward scales what comes, and adds two gradients."""
    for training, passes, launches in (
        (beside(LoraTarget.DOWN), 3, 1),
        (replace(beside(LoraTarget.DOWN), fused=False), 5, 2),
    ):
        half = named(layer(MODEL, training, WHOLE), "mlp.down.lora_b")
        (added,) = (kernel for kernel in half.forward if kernel.kind is not KernelKind.MATMUL)
        assert (added.bytes, added.launches) == (passes * 2 * T * H, launches)
        assert half.input_gradient[0].bytes == 2 * 2 * T * H
    summed = named(layer(MODEL, LORA, WHOLE), "mlp.down.lora_a").input_gradient[-1]
    assert (summed.name, summed.bytes) == ("mlp.down.lora_a.gradient_sum", 3 * 2 * T * F)


@pytest.mark.parametrize("training", [LORA, replace(LORA, recompute=SelectiveOpRecompute())])
def test_quantized_weights_are_unpacked_before_each_product(training: Training) -> None:
    """4 bits, 8 for 64 of them, 32 for 64 x 256 are read, 16 written, of every matrix and for every product."""
    lora = replace(training.lora or Lora(1, (), 1.0), base=DType.NF4)
    made = layer(MODEL, replace(training, lora=lora), WHOLE)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert DType.NF4.bits == bits == pytest.approx(4.127, abs=5e-4)
    assert count(made, QUANTIZED) == MATRICES and count(made, DENSE) == 2 * H
    for operator in (item for item in made.operators if item.parameter_group == QUANTIZED):
        for kernels in (
            operator.forward,
            operator.input_gradient,
            *((operator.recompute_override,) if operator.recompute_override else ()),
        ):
            unpacked, product = kernels
            assert unpacked.bytes == pytest.approx(operator.parameter_count * (bits + 16) / 8)
            assert isinstance(unpacked.shape, MemoryBoundShape) and unpacked.shape.routine is MemoryBoundOp.DEQUANTIZE
            assert product.kind is KernelKind.MATMUL
    sizes = {element.name: element.dequantized_bytes for element in made.operators if element.dequantized_bytes}
    assert sizes == {
        "attention.qkv": 2 * H * Q,
        "attention.out": 2 * Q * H,
        "mlp.up": 2 * H * F,
        "mlp.down": 2 * F * H,
    }


def test_nothing_flows_back_through_a_frozen_embedding_and_no_input_is_kept_for_frozen_logits() -> None:
    first, last = embedding_layer(MODEL, LORA, WHOLE), head_layer(MODEL, LORA, WHOLE)
    assert first.saved_bytes == 0.0 and not any(
        operator.input_gradient or operator.weight_gradient for operator in first.operators
    )
    logits = named(last, "head.logits")
    assert logits.saved_bytes == 0.0 and logits.input_gradient and not logits.weight_gradient
    assert head_layer(MODEL, PLAIN, WHOLE).saved_bytes - last.saved_bytes == 2 * T * H


@examples(60)
@given(
    rank=st.sampled_from([4, 8, 24]),
    tp=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["llama3-8b", "llama-tiny", "gpt3-1.3b", "llama3-70b"]),
    targets=st.sets(st.sampled_from(EACH), min_size=1).map(lambda chosen: tuple(sorted(chosen, key=EACH.index))),
)
def test_ranks_of_a_tensor_parallel_group_hold_every_adapter_once(
    rank: int, tp: int, name: str, targets: tuple[LoraTarget, ...]
) -> None:
    """Both halves are split: A by columns of the rank or rows of the inputs, B by columns of the outputs."""
    model, lora = load_preset(name), Lora(rank, targets, 16.0)
    training = Training(sequence=64, global_batch=1, lora=lora)
    made = layer(model, training, LayerShard(batch=1, sequence=64, keys=64, tp=tp))
    assert count(made, ADAPTERS) * tp * model.layer_count == adapter_parameter_count(model, lora)


def test_a_model_without_a_gate_has_no_adapter_beside_one() -> None:
    model = load_preset("gpt3-1.3b")
    assert Projection.GATE not in LoraTarget.UP.projections
    both = (
        adapter_parameter_count(model, Lora(4, targets, 1.0)) for targets in ((LoraTarget.UP,), (LoraTarget.GATE_UP,))
    )
    assert len(set(both)) == 1


def test_without_adapters_nothing_is_frozen() -> None:
    made = layer(MODEL, PLAIN, WHOLE)
    assert all(operator.trainable and operator.parameter_group == DENSE for operator in made.operators)
    assert made.parameter_count * 3 + 2 * 256 * H + H == parameter_count(MODEL)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (EACH, 2),
        ((LoraTarget.Q,), 1),
        ((LoraTarget.UP, LoraTarget.GATE), 1),
        ((LoraTarget.O, LoraTarget.DOWN), 1),
        ((LoraTarget.Q, LoraTarget.UP), 2),
    ],
)
def test_a_parallel_block_keeps_its_input_once_for_all_adapters(targets: tuple[LoraTarget, ...], more: int) -> None:
    """In BF16 a serial block keeps the input of one norm more, and where both branches have adapters one of these."""
    serial, parallel = (
        layer(resize_model(MODEL, block=form), beside(*targets), WHOLE).saved_bytes for form in SERIAL_AND_PARALLEL
    )
    assert serial - parallel == more * 2 * T * H


SERIAL_AND_PARALLEL = BlockForm.PRE_NORM, BlockForm.PARALLEL


@pytest.mark.parametrize("form", BlockForm)
def test_the_form_of_a_block_changes_no_product_of_frozen_layers_and_adapters(form: BlockForm) -> None:
    made, plain = (layer(model, LORA, WHOLE) for model in (resize_model(MODEL, block=form), MODEL))
    for item in ("forward", "input_gradient", "weight_gradient"):
        there, usual = (sum(flops(getattr(operator, item)) for operator in of.operators) for of in (made, plain))
        assert there == usual
    assert count(made, ADAPTERS) == count(plain, ADAPTERS)
    assert all(operator.saved_bytes >= 0 and operator.deferred_wgrad_bytes >= 0 for operator in made.operators)
