"""What passes over gradients, weights' products and batches beside the model moves what its code reads and writes."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.model import batch_transfer, gradient_kernels, memory_bound
from clustersim.model.attention import Core
from clustersim.model.kernels import AttentionShape, Kernel, MatmulShape
from clustersim.model.layers import Shard, embedding, layer
from clustersim.model.overheads import NONE, Accumulation, Batches, Overheads
from clustersim.model.precision_recipe import mixed
from clustersim.model.training import Training
from tests.lowering.plans import SMALL

P = 1_000_000
BF16 = Training(64, 8, 2)
FP16 = replace(BF16, recipe=mixed(DType.FP16, gradients=DType.FP16))


def _with(training: Training, **changes: object) -> Training:
    return replace(training, overheads=replace(NONE, **changes))  # type: ignore[arg-type]


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
    kernels = memory_bound.accumulate("w", (1000, 1000), made=DType.BF16, accumulated=DType.FP32, how=how)
    assert _bytes(kernels) == per_parameter * P


def test_nothing_is_converted_that_has_the_format_of_the_sum() -> None:
    same = {"made": DType.FP16, "accumulated": DType.FP16}
    converted = memory_bound.accumulate("w", (8, 8), how=Accumulation.CONVERTED, **same)
    assert converted == memory_bound.accumulate("w", (8, 8), how=Accumulation.ADDED, **same)


@pytest.mark.parametrize("how", Accumulation)
def test_products_add_in_their_epilogue_only_where_they_are_fused(how: Accumulation) -> None:
    (spec,) = SMALL.specs
    made = layer(SMALL, spec, _with(BF16, accumulation=how), Shard(2, 64, 64))
    shapes = [kernel.shape for operator in made.operators for kernel in operator.weight_gradient]
    added = [shape.accumulated is not None for shape in shapes if isinstance(shape, MatmulShape)]
    assert added == [how is Accumulation.FUSED] * 4  # qkv, out, up, down


def test_an_embedding_s_gradient_is_made_by_no_product_and_added_anyway() -> None:
    fused, added = (
        embedding(SMALL, _with(BF16, accumulation=how), Shard(2, 64, 64))
        for how in (Accumulation.FUSED, Accumulation.ADDED)
    )
    assert fused == added


def test_gradients_are_zeroed_checked_and_averaged_by_a_pass_each() -> None:
    every = _with(BF16, zeroing=True, checking=True, averaging=True)
    assert _bytes(gradient_kernels.zeroed(every, P)) == 4 * P
    assert [kernel.bytes for kernel in gradient_kernels.before_reduction(every, P)] == [4 * P, 8 * P]
    assert gradient_kernels.zeroed(BF16, P) == gradient_kernels.before_reduction(BF16, P) == ()


def test_only_narrow_gradients_are_widened_and_the_optimizer_then_reads_the_copy() -> None:
    narrow = _with(FP16, widening=True)
    assert _bytes(gradient_kernels.widened(narrow, P)) == (2 + 4) * P
    assert gradient_kernels.as_read(narrow).recipe.weights.gradients is DType.FP32
    wide = _with(BF16, widening=True)
    assert gradient_kernels.widened(wide, P) == ()
    assert gradient_kernels.as_read(wide) is wide


def test_only_fp16_scales_its_loss() -> None:
    assert _bytes(gradient_kernels.unscaled(_with(FP16, unscaling=True), P)) == (2 + 2) * P
    assert gradient_kernels.unscaled(_with(BF16, unscaling=True), P) == ()


def test_a_batch_is_its_tokens_and_one_more_of_each_sequence_or_four_tensors() -> None:
    assert batch_transfer.sent(_with(BF16, batches=Batches.PACKED)) == (5 * 8, 2 * 65 * 8)
    assert sum(batch_transfer.sent(_with(BF16, batches=Batches.SEPARATE))) == 2 * 64 * (8 + 8 + 8 + 4)
    assert batch_transfer.sent(BF16) == batch_transfer.made(BF16) == ()


SHAPE = AttentionShape(2, 64, 64, 4, 4, 16, causal=True)
ELEMENTS = 2 * 64 * 4 * 16  # of queries, of keys, of values


def _core(overheads: Overheads, shape: AttentionShape = SHAPE) -> Core:
    return Core(shape, DType.BF16, dropout=False, fused=True, overheads=overheads)


def test_standard_attention_reorders_its_result_and_scales_and_joins_gradients() -> None:
    forward, backward = (
        sum(_bytes(getattr(with_, name)) - _bytes(getattr(without, name)) for with_, without in _pairs())
        for name in ("forward", "input_gradient")
    )
    assert forward == ELEMENTS * 2 * 2
    assert backward == (2 + 3) * ELEMENTS * 2 * 2  # queries and keys scaled; those and values joined


def _pairs():  # type: ignore[no-untyped-def]
    return zip(_core(replace(NONE, attention_copies=True)).standard(), _core(NONE).standard(), strict=True)


@pytest.mark.parametrize(
    ("keys", "heads", "fused"), [(64, 4, True), (65, 4, False), (64, 2, True), (64, 1, False), (64, 3, False)]
)
def test_the_fused_softmax_takes_so_many_keys_and_heads_in_fours(keys: int, heads: int, fused: bool) -> None:
    shape = AttentionShape(2, keys, keys, heads, heads, 16, causal=True)
    softmax = next(
        operator for operator in _core(replace(NONE, softmax_keys=64), shape).standard() if "softmax" in operator.name
    )
    (forward,) = softmax.forward
    scores = 2 * heads * keys * keys
    assert (forward.launches == 1) is fused
    assert forward.bytes == scores * (2 * 2 if fused else 2 * 2 + 8 * 4 + 1)
    assert softmax.kept == scores * (2 if fused else 4)


@pytest.mark.parametrize(("switch", "passes"), [("bias_adds", 2), ("norm_twice", 2 * 2)])
def test_biases_and_norms_pass_activations_again(switch: str, passes: int) -> None:
    """Of queries, keys and values forward; of the inputs of two norms backward."""
    (spec,) = SMALL.specs
    switched, plain = (
        layer(SMALL, spec, training, Shard(2, 64, 64)) for training in (_with(BF16, **{switch: True}), BF16)
    )
    width = 3 * 64 if switch == "bias_adds" else 64
    moved = [sum(_bytes(op.forward) + _bytes(op.input_gradient) for op in made.operators) for made in (switched, plain)]
    assert moved[0] - moved[1] == passes * 2 * 64 * width * 2
