"""Framework overheads on gradients, weight matmuls and batches move what the framework's code reads and writes."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.model import batch_transfer, gradient_kernels, memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, MatmulShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.layers import LayerShard, embedding_layer, transformer_layer
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, BatchTransfer, Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.training import Training
from clustersim.model.transformer import resize_model
from tests.lowering.plans import SMALL

P = 1_000_000
BF16 = Training(64, 8, 2)
FP16 = replace(BF16, recipe=mixed_precision(DType.FP16, gradients=DType.FP16))


def _with_overheads(training: Training, **changes: object) -> Training:
    return replace(training, overheads=replace(NO_OVERHEADS, **changes))  # type: ignore[arg-type]


def _moved_bytes(kernels: tuple[Kernel, ...]) -> float:
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
def test_gradient_accumulation_bytes(how: Accumulation, per_parameter: int) -> None:
    kernels = memory_bound.accumulate_kernels(
        "w", (1000, 1000), gradient_dtype=DType.BF16, accumulator_dtype=DType.FP32, accumulation=how
    )
    assert _moved_bytes(kernels) == per_parameter * P


def test_no_conversion_where_the_dtypes_agree() -> None:
    dtypes = {"gradient_dtype": DType.FP16, "accumulator_dtype": DType.FP16}
    converted = memory_bound.accumulate_kernels("w", (8, 8), accumulation=Accumulation.CONVERTED, **dtypes)
    assert converted == memory_bound.accumulate_kernels("w", (8, 8), accumulation=Accumulation.ADDED, **dtypes)


@pytest.mark.parametrize("how", Accumulation)
def test_only_fused_accumulation_is_in_the_matmul_epilogue(how: Accumulation) -> None:
    (spec,) = SMALL.distinct_specs
    first_layer = transformer_layer(SMALL, spec, _with_overheads(BF16, accumulation=how), LayerShard(2, 64, 64))
    shapes = [kernel.shape for operator in first_layer.operators for kernel in operator.weight_gradient]
    accumulates = [shape.accumulated is not None for shape in shapes if isinstance(shape, MatmulShape)]
    assert accumulates == [how is Accumulation.FUSED] * 4  # qkv, out, up, down


def test_an_embedding_gradient_is_accumulated_separately() -> None:
    fused, added = (
        embedding_layer(SMALL, _with_overheads(BF16, accumulation=how), LayerShard(2, 64, 64))
        for how in (Accumulation.FUSED, Accumulation.ADDED)
    )
    assert fused == added


def test_one_hot_lookup_is_a_matmul_each_way() -> None:
    """[tokens, vocabulary] by [vocabulary, hidden] in forward, its transpose by gradients for the table: no input."""
    shard = LayerShard(2, 64, 64)
    looked_up = embedding_layer(SMALL, BF16, shard).operators[0]
    multiplied = embedding_layer(SMALL, _with_overheads(BF16, embedding_matmul=True), shard).operators[0]
    flops = 2 * shard.tokens * SMALL.vocab * SMALL.hidden
    assert sum(kernel.flops for kernel in looked_up.forward) == 0
    assert sum(kernel.flops for kernel in multiplied.forward) == flops
    assert sum(kernel.flops for kernel in multiplied.weight_gradient) == flops
    assert multiplied.input_gradient == ()
    one_hot, _ = multiplied.forward
    assert one_hot.bytes >= shard.tokens * SMALL.vocab * 2
    assert multiplied.parameter_count == looked_up.parameter_count
    assert multiplied.saved_bytes == looked_up.saved_bytes


def test_gradients_are_zeroed_checked_and_averaged_by_a_pass_each() -> None:
    all_passes = _with_overheads(BF16, zero_grad=True, check_for_nan_in_grad=True, prescale_gradients=True)
    assert _moved_bytes(gradient_kernels.zero_gradient_kernels(all_passes, P)) == 4 * P
    assert [kernel.bytes for kernel in gradient_kernels.pre_reduction_kernels(all_passes, P)] == [4 * P, 8 * P]
    assert gradient_kernels.zero_gradient_kernels(BF16, P) == gradient_kernels.pre_reduction_kernels(BF16, P) == ()


def test_only_low_precision_gradients_are_copied_to_fp32() -> None:
    fp16 = _with_overheads(FP16, upcast_gradients=True)
    assert _moved_bytes(gradient_kernels.upcast_kernels(fp16, P)) == (2 + 4) * P
    assert gradient_kernels.with_upcast_gradients(fp16).recipe.weight_formats.gradients is DType.FP32
    bf16 = _with_overheads(BF16, upcast_gradients=True)
    assert gradient_kernels.upcast_kernels(bf16, P) == ()
    assert gradient_kernels.with_upcast_gradients(bf16) is bf16


def test_only_fp16_scales_its_loss() -> None:
    assert (
        _moved_bytes(gradient_kernels.unscale_kernels(_with_overheads(FP16, unscale_gradients=True), P)) == (2 + 2) * P
    )
    assert gradient_kernels.unscale_kernels(_with_overheads(BF16, unscale_gradients=True), P) == ()


def test_batch_bytes_packed_and_separate() -> None:
    assert batch_transfer.broadcast_sizes(_with_overheads(BF16, batch_transfer=BatchTransfer.PACKED)) == (
        5 * 8,
        2 * 65 * 8,
    )
    assert sum(
        batch_transfer.broadcast_sizes(_with_overheads(BF16, batch_transfer=BatchTransfer.SEPARATE))
    ) == 2 * 64 * (8 + 8 + 8 + 4)
    assert batch_transfer.broadcast_sizes(BF16) == batch_transfer.batch_kernels(BF16) == ()


SHAPE = AttentionShape(2, 64, 64, 4, 4, 16, causal=True)
ELEMENTS = 2 * 64 * 4 * 16  # of queries, of keys, of values


def _attention_core(overheads: Overheads, shape: AttentionShape = SHAPE) -> AttentionCore:
    return AttentionCore(shape, DType.BF16, dropout=False, fused=True, overheads=overheads)


def test_standard_attention_reorders_its_result_and_scales_and_joins_gradients() -> None:
    forward, backward = (
        sum(
            _moved_bytes(getattr(with_copies, name)) - _moved_bytes(getattr(without_copies, name))
            for with_copies, without_copies in _operators_with_and_without_copies()
        )
        for name in ("forward", "input_gradient")
    )
    assert forward == ELEMENTS * 2 * 2
    assert backward == (2 + 3) * ELEMENTS * 2 * 2  # queries and keys scaled; these and values concatenated


def _operators_with_and_without_copies():  # type: ignore[no-untyped-def]
    return zip(
        _attention_core(replace(NO_OVERHEADS, attention_copies=True)).standard_operators(),
        _attention_core(NO_OVERHEADS).standard_operators(),
        strict=True,
    )


@pytest.mark.parametrize(
    ("keys", "heads", "fused"), [(64, 4, True), (65, 4, False), (64, 2, True), (64, 1, False), (64, 3, False)]
)
def test_the_fused_softmax_limits_on_keys_and_heads(keys: int, heads: int, fused: bool) -> None:
    shape = AttentionShape(2, keys, keys, heads, heads, 16, causal=True)
    softmax = next(
        standard_operator
        for standard_operator in _attention_core(replace(NO_OVERHEADS, softmax_keys=64), shape).standard_operators()
        if "softmax" in standard_operator.name
    )
    (forward,) = softmax.forward
    scores = 2 * heads * keys * keys
    assert (forward.launches == 1) is fused
    assert forward.bytes == scores * (2 * 2 if fused else 2 * 2 + 8 * 4 + 1)
    assert softmax.saved_bytes == scores * (2 if fused else 4)


@pytest.mark.parametrize(
    ("switch", "passes"), [("bias_adds", 2), ("norm_weight_grad_kernel", 2 * 2), ("norm_fp32_copy", 2 * 9)]
)
def test_bias_adds_and_double_norms_pass_over_activations_again(switch: str, passes: int) -> None:
    """Queries, keys and values forward; the inputs of two norms backward.

    A copy in FP32: 2 + 4 and 4 + 2 bytes forward, against 2 + 2, and 2 + 4 + 4 and 4 + 2 backward, against 6.
    """
    (spec,) = SMALL.distinct_specs
    switched, plain = (
        transformer_layer(SMALL, spec, training_config, LayerShard(2, 64, 64))
        for training_config in (_with_overheads(BF16, **{switch: True}), BF16)
    )
    width = 3 * 64 if switch == "bias_adds" else 64
    moved_bytes = [
        sum(
            _moved_bytes(operator.forward) + _moved_bytes(operator.input_gradient)
            for operator in sharded_layer.operators
        )
        for sharded_layer in (switched, plain)
    ]
    assert moved_bytes[0] - moved_bytes[1] == passes * 2 * 64 * width * 2


@pytest.mark.parametrize(("adds_bias", "passes"), [(True, 2), (False, 0)])
def test_the_bias_in_front_of_an_activation_is_one_more_pass(adds_bias: bool, passes: int) -> None:
    """Over 64 x 128 elements of two bytes for each of two sequences, where there is a bias."""
    model = resize_model(SMALL, mlp=MlpType.GELU, linear_bias=True)
    (spec,) = model.distinct_specs
    layer = transformer_layer(model, spec, _with_overheads(BF16, activation_bias_adds=adds_bias), LayerShard(2, 64, 64))
    bytes_of_biases = sum(
        kernel.bytes for operator in layer.operators for kernel in operator.forward if kernel.name == "mlp.up.bias"
    )
    assert bytes_of_biases == passes * 2 * 64 * 128 * 2


def test_batches_with_padding_are_gathered_and_scattered() -> None:
    """Queries, keys and values read and written, the output zeroed, read and written; the reverse in backward."""
    training = _with_overheads(BF16, unpads_batches=True)
    (spec,) = SMALL.distinct_specs
    plain, padded = (
        transformer_layer(SMALL, spec, one, LayerShard(2, 64, 64))
        for one in (replace(training, overheads=NO_OVERHEADS), training)
    )
    (extra,) = [operator for operator in padded.operators if operator.name == "attention.unpadding"]
    attention = spec.attention
    assert attention is not None
    queries, keys = (2 * 64 * attention.head_dim * heads for heads in (attention.heads, attention.kv_heads))
    operands = queries + 2 * keys
    assert _moved_bytes(extra.forward) == 2 * (2 * operands + 3 * queries)
    assert _moved_bytes(extra.input_gradient) == 2 * (2 * queries + 3 * operands)
    assert padded.saved_bytes == plain.saved_bytes
