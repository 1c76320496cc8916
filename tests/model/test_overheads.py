"""What passes over gradients, weights' products and batches beside the model moves what its code reads and writes."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.model import batch_transfer, gradient_kernels, memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, MatmulShape
from clustersim.model.layers import LayerShard, embedding_layer, transformer_layer
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, BatchTransfer, Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.training import Training
from tests.lowering.plans import SMALL

P = 1_000_000
BF16 = Training(64, 8, 2)
FP16 = replace(BF16, recipe=mixed_precision(DType.FP16, gradients=DType.FP16))


def _with(training: Training, **changes: object) -> Training:
    return replace(training, overheads=replace(NO_OVERHEADS, **changes))  # type: ignore[arg-type]


def _bytes(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.bytes for kernel in kernels)


@pytest.mark.parametrize(
    ("how", "per_parameter"),
    [
        (Accumulation.FUSED, 0),
        (Accumulation.ADDED, 2 + 4 + 4),  # the bf16 gradient, the sum, and the sum
        (Accumulation.CONVERTED, (2 + 4) + (4 + 4 + 4)),  # to(fp32), then add_
        (Accumulation.COPIED, 2 + 4),
    ],
)
def test_a_gradient_joins_the_others(how: Accumulation, per_parameter: int) -> None:
    kernels = memory_bound.accumulate_kernels(
        "w", (1000, 1000), gradient_dtype=DType.BF16, accumulator_dtype=DType.FP32, accumulation=how
    )
    assert _bytes(kernels) == per_parameter * P


def test_nothing_is_converted_that_has_the_format_of_the_sum() -> None:
    same = {"made": DType.FP16, "accumulated": DType.FP16}
    converted = memory_bound.accumulate_kernels("w", (8, 8), accumulation=Accumulation.CONVERTED, **same)
    assert converted == memory_bound.accumulate_kernels("w", (8, 8), accumulation=Accumulation.ADDED, **same)


@pytest.mark.parametrize("how", Accumulation)
def test_products_add_in_their_epilogue_only_where_they_are_fused(how: Accumulation) -> None:
    (spec,) = SMALL.distinct_specs
    made = transformer_layer(SMALL, spec, _with(BF16, accumulation=how), LayerShard(2, 64, 64))
    shapes = [kernel.shape for operator in made.operators for kernel in operator.weight_gradient]
    added = [shape.accumulated is not None for shape in shapes if isinstance(shape, MatmulShape)]
    assert added == [how is Accumulation.FUSED] * 4  # qkv, out, up, down


def test_an_embedding_s_gradient_is_made_by_no_product_and_added_anyway() -> None:
    fused, added = (
        embedding_layer(SMALL, _with(BF16, accumulation=how), LayerShard(2, 64, 64))
        for how in (Accumulation.FUSED, Accumulation.ADDED)
    )
    assert fused == added


def test_gradients_are_zeroed_checked_and_averaged_by_a_pass_each() -> None:
    every = _with(BF16, zeroing=True, checking=True, averaging=True)
    assert _bytes(gradient_kernels.zero_gradient_kernels(every, P)) == 4 * P
    assert [kernel.bytes for kernel in gradient_kernels.pre_reduction_kernels(every, P)] == [4 * P, 8 * P]
    assert gradient_kernels.zero_gradient_kernels(BF16, P) == gradient_kernels.pre_reduction_kernels(BF16, P) == ()


def test_only_narrow_gradients_are_widened_and_the_optimizer_then_reads_the_copy() -> None:
    narrow = _with(FP16, widening=True)
    assert _bytes(gradient_kernels.upcast_kernels(narrow, P)) == (2 + 4) * P
    assert gradient_kernels.with_upcast_gradients(narrow).recipe.weight_formats.gradients is DType.FP32
    wide = _with(BF16, widening=True)
    assert gradient_kernels.upcast_kernels(wide, P) == ()
    assert gradient_kernels.with_upcast_gradients(wide) is wide


def test_only_fp16_scales_its_loss() -> None:
    assert _bytes(gradient_kernels.unscale_kernels(_with(FP16, unscaling=True), P)) == (2 + 2) * P
    assert gradient_kernels.unscale_kernels(_with(BF16, unscaling=True), P) == ()


def test_a_batch_is_its_tokens_and_one_more_of_each_sequence_or_four_tensors() -> None:
    assert batch_transfer.broadcast_sizes(_with(BF16, batches=BatchTransfer.PACKED)) == (5 * 8, 2 * 65 * 8)
    assert sum(batch_transfer.broadcast_sizes(_with(BF16, batches=BatchTransfer.SEPARATE))) == 2 * 64 * (8 + 8 + 8 + 4)
    assert batch_transfer.broadcast_sizes(BF16) == batch_transfer.batch_kernels(BF16) == ()


SHAPE = AttentionShape(2, 64, 64, 4, 4, 16, causal=True)
ELEMENTS = 2 * 64 * 4 * 16  # of queries, of keys, of values


def _core(overheads: Overheads, shape: AttentionShape = SHAPE) -> AttentionCore:
    return AttentionCore(shape, DType.BF16, dropout=False, fused=True, overheads=overheads)


def test_standard_attention_reorders_its_result_and_scales_and_joins_gradients() -> None:
    forward, backward = (
        sum(_bytes(getattr(with_, name)) - _bytes(getattr(without, name)) for with_, without in _pairs())
        for name in ("forward", "input_gradient")
    )
    assert forward == ELEMENTS * 2 * 2
    assert backward == (2 + 3) * ELEMENTS * 2 * 2  # queries and keys scaled; those and values joined


def _pairs():  # type: ignore[no-untyped-def]
    return zip(
        _core(replace(NO_OVERHEADS, attention_copies=True)).standard_operators(),
        _core(NO_OVERHEADS).standard_operators(),
        strict=True,
    )


@pytest.mark.parametrize(
    ("keys", "heads", "fused"), [(64, 4, True), (65, 4, False), (64, 2, True), (64, 1, False), (64, 3, False)]
)
def test_the_fused_softmax_takes_so_many_keys_and_heads_in_fours(keys: int, heads: int, fused: bool) -> None:
    shape = AttentionShape(2, keys, keys, heads, heads, 16, causal=True)
    softmax = next(
        standard_operator
        for standard_operator in _core(replace(NO_OVERHEADS, softmax_keys=64), shape).standard_operators()
        if "softmax" in standard_operator.name
    )
    (forward,) = softmax.forward
    scores = 2 * heads * keys * keys
    assert (forward.launches == 1) is fused
    assert forward.bytes == scores * (2 * 2 if fused else 2 * 2 + 8 * 4 + 1)
    assert softmax.saved_bytes == scores * (2 if fused else 4)


@pytest.mark.parametrize(("switch", "passes"), [("bias_adds", 2), ("norm_twice", 2 * 2)])
def test_biases_and_norms_pass_activations_again(switch: str, passes: int) -> None:
    """Of queries, keys and values forward; of the inputs of two norms backward."""
    (spec,) = SMALL.distinct_specs
    switched, plain = (
        transformer_layer(SMALL, spec, training, LayerShard(2, 64, 64))
        for training in (_with(BF16, **{switch: True}), BF16)
    )
    width = 3 * 64 if switch == "bias_adds" else 64
    moved = [sum(_bytes(op.forward) + _bytes(op.input_gradient) for op in made.operators) for made in (switched, plain)]
    assert moved[0] - moved[1] == passes * 2 * 64 * width * 2
