"""Kernels of scenarios and models, and a general grid of kernels, for measurement.

Kernels that scenarios' ranks run, sharded as they are there; those of full layers of published models at
usual degrees; or a general grid of each family, to which constants are fitted and between whose points other
kernels are interpolated. The grid contains what the device can run within a fraction of the time budget, by
approximate rates. Block-scaled formats have matmuls, also of experts, and the casts of all packaged recipes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final

from clustersim.build import distinct_kernels
from clustersim.common.data_files import list_names
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import BytesPerSecond, FlopPerSecond, Seconds
from clustersim.model import attention, layers, linear, memory_bound
from clustersim.model.kernels import (
    GROUPED_MATMUL_KINDS,
    TOKEN_ROUTING_OPS,
    AttentionShape,
    Kernel,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from clustersim.model.layer_stack import MlpType, MoeMlp
from clustersim.model.linear_loss import LOSSES_BY_PART
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import LayerShard
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.optimizers import Optimizer
from clustersim.model.overheads import Accumulation, Grouping, Overheads
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.quantization import quantize_kernels, transpose_kernel
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import ALL_FUSED, NONE_FUSED, LossImplementation, Training
from clustersim.model.transformer import Norm, TransformerModel
from clustersim.scenario import Scenario

PRESET_MODELS: Final = ("llama3-8b", "llama3-70b", "llama3-405b")
TP_DEGREES: Final = (1, 2, 4, 8)  # tensor-parallel degrees
MICROBATCHES: Final = (1, 2)
SEQUENCES: Final = (2048, 4096, 8192)

_CUBE_SIZES: Final = (256, 384, 512, 1000, 1024, 1536, 2048, 3000, 4096, 6000, 8192, 12288, 16384)
_TOKENS: Final = (512, 2048, 8192, 16384)
_LINEAR_SIZES: Final = (  # outputs, inputs: of linear layers from GPT-2 to Llama 3 405B, some of them sharded
    (768, 3072),
    (2304, 768),
    (1024, 4096),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (32000, 4096),
    (1280, 8192),
    (8192, 1024),
    (8192, 8192),
    (13312, 16384),
)
_SCALED_TOKENS: Final = 8192  # of linear layers in block-scaled formats
_PROBE_SIZE: Final = 1024
_BATCHED_SIZES: Final = ((32, 512, 64), (32, 2048, 128), (128, 1024, 64))  # batch, positions, head_dim
_HEAD_COUNTS: Final = ((1, 32, 8), (4, 12, 12), (1, 16, 2), (4, 32, 32))  # sequences, heads, key/value heads
_POSITIONS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_MEMORY_BOUND_SIZES: Final = (
    (512, 768),
    (1024, 4096),
    (4096, 2048),
    (4096, 8192),
    (16384, 8192),
    (8192, 28672),
)  # rows, width
_MOE_MODELS: Final = (  # and the expert-parallel degree
    ("mixtral-8x7b", 1),
    ("qwen3-30b-a3b", 1),
    ("qwen3-30b-a3b", 8),
    ("moonlight-16b-a3b", 8),
    ("deepseek-v3", 16),
)
_MOE_TOKENS: Final = (1024, 4096)  # tokens of a rank
_VOCABULARIES: Final = ((1024, 32000), (4096, 50257), (8192, 32064), (8192, 128256))  # tokens, logits
_OPTIMIZERS = (Optimizer.ADAM, Optimizer.SGD)
_PARAMETERS: Final = (2**20, 2**23, 2**26, 2**28, 2**30)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Approximate rates of a device."""

    flops: FlopPerSecond
    bandwidth: BytesPerSecond

    def kernel_seconds(self, kernel: Kernel) -> Seconds:
        """Approximate seconds of a kernel."""
        return max(kernel.flops / self.flops, kernel.bytes / self.bandwidth)


DEFAULT_RATES: Final = DeviceRates(flops=1e11, bandwidth=1e10)  # of a CPU, good enough to order kernels


def scenario_kernels(scenarios: Iterable[Scenario]) -> list[Kernel]:
    """All kernels of the ranks of some scenarios.

    Scaled-format matmuls that accumulate into gradients are added in their non-accumulating form too: PyTorch
    has no others, and the fit uses these.
    """
    kernels = dict.fromkeys(chain.from_iterable(map(distinct_kernels, scenarios)))
    return list(kernels | dict.fromkeys(filter(None, map(_without_accumulation, kernels))))


def _without_accumulation(kernel: Kernel) -> Kernel | None:
    """The matmul with its result written in BF16 instead of accumulated."""
    match kernel.shape:
        case MatmulShape(m, n, batch=batch, accumulated=DType() as accumulator) as shape if (
            kernel.dtype in LOW_PRECISION_DTYPES
        ):
            moved_bytes = kernel.bytes - batch * m * n * (2 * accumulator.bytes - DType.BF16.bytes)
            return replace(kernel, bytes=moved_bytes, shape=replace(shape, accumulated=None))
    return None


def preset_kernels(names: Iterable[str]) -> list[Kernel]:
    """Kernels of full models, at all degrees, microbatches and sequences, fused and unfused."""
    kernels: dict[Kernel, None] = {}
    for name, tp, batch, sequence in product(names, TP_DEGREES, MICROBATCHES, SEQUENCES):
        model = load_preset(name)
        for split in {False, tp > 1}:
            shard = LayerShard(batch, sequence, sequence, tp=tp, sequence_parallel=split)
            kernels |= dict.fromkeys(_layer_kernels(model, shard))
    return list(kernels)


def _layer_kernels(model: TransformerModel, shard: LayerShard) -> Iterator[Kernel]:
    for fused in (ALL_FUSED, NONE_FUSED):
        loss = LossImplementation.VOCAB_PARALLEL if fused else LossImplementation.TORCH
        training = Training(shard.sequence, shard.batch, shard.batch, fused=fused, loss=loss)
        transformer_layers = (layers.transformer_layer(model, spec, training, shard) for spec in model.distinct_specs)
        for layer in (
            layers.embedding_layer(model, training, shard),
            *transformer_layers,
            layers.head_layer(model, training, shard),
        ):
            for operator in layer.operators:
                yield from (*operator.forward, *operator.input_gradient, *operator.weight_gradient)


def grid_kernels(formats: Sequence[DType], rates: DeviceRates, limit: Seconds) -> list[Kernel]:
    """General grid in some formats, the most used one first, of kernels that take no longer than `limit` seconds."""
    main_format, *other_formats = formats
    kernels = chain(
        _matmul_kernels(main_format),
        _attention_kernels(main_format),
        _memory_bound_kernels(main_format),
        _loss_kernels(main_format),
        _optimizer_kernels(main_format),
        _expert_kernels(main_format),
        *(_cube_matmuls(other, _CUBE_SIZES[::2]) for other in other_formats),
        *(_scaled_format_kernels(other, main_format) for other in other_formats if other in LOW_PRECISION_DTYPES),
    )
    return [kernel for kernel in dict.fromkeys(kernels) if rates.kernel_seconds(kernel) <= limit]


def kernel_format(kernel: Kernel) -> DType:
    """The format that a grid kernel represents: of a cast, its output format."""
    match kernel.shape:
        case MemoryBoundShape(MemoryBoundOp.QUANTIZE, formats=(output_format, *_)):
            return output_format
    return kernel.dtype


def probe_matmul(dtype: DType) -> Kernel:
    """A matmul in a format, whose sample says so where a device does not support it."""
    return _linear_matmul(dtype, MatmulShape(_PROBE_SIZE, _PROBE_SIZE, _PROBE_SIZE))


def _scaled_format_kernels(dtype: DType, high_precision: DType) -> Iterator[Kernel]:
    """Matmuls of linear layers and of experts in a block-scaled format, and the casts to it."""
    for outputs, inputs in _LINEAR_SIZES:
        yield _linear_matmul(dtype, MatmulShape(_SCALED_TOKENS, outputs, inputs))
    recipe = replace(mixed_precision(compute=high_precision, master=None), matmul_formats=MatmulFormats.uniform(dtype))
    yield from (
        kernel
        for kernel in _moe_kernels(recipe, _MOE_TOKENS[-1:], Accumulation.ADDED)
        if kernel.kind in GROUPED_MATMUL_KINDS
    )
    for cast, sizes in product(_recipe_casts(dtype), _MEMORY_BOUND_SIZES):
        yield from quantize_kernels("grid.quantize", cast, sizes, high_precision=high_precision, low_precision=dtype)
    yield from (transpose_kernel("grid.transpose", sizes, dtype) for sizes in _MEMORY_BOUND_SIZES)


def _recipe_casts(dtype: DType) -> list[OperandCast]:
    """All casts that packaged recipes of a format have, on accelerators of either kind."""
    recipes = (load_recipe(name) for name in list_names("recipes"))
    casts_seen: dict[OperandCast, None] = {}
    for casts in (
        recipe.casts for recipe in recipes if recipe.matmul_formats.low_precision is dtype and recipe.casts is not None
    ):
        for variant in (casts, casts.rowwise_only):
            operands = (
                variant.input,
                variant.after_norm,
                variant.output_gradient,
                variant.weight,
                variant.input_backward,
                variant.weight_backward,
            )
            casts_seen |= dict.fromkeys(operand for operand in operands if operand is not None and operand.launch_count)
    return list(casts_seen)


def _matmul_kernels(dtype: DType) -> Iterator[Kernel]:
    yield from _cube_matmuls(dtype, _CUBE_SIZES)
    for tokens, (outputs, inputs) in product(_TOKENS, _LINEAR_SIZES):
        forward = MatmulShape(tokens, outputs, inputs)
        yield _linear_matmul(dtype, forward)
        yield _linear_matmul(dtype, MatmulShape(tokens, inputs, outputs, operands=MatmulLayout.NN))
        weight = MatmulShape(outputs, inputs, tokens, operands=MatmulLayout.TN)
        yield _linear_matmul(dtype, weight)
        yield _linear_matmul(dtype, replace(weight, accumulated=DType.FP32))
    for batch, positions, head in _BATCHED_SIZES:
        yield _linear_matmul(dtype, MatmulShape(positions, positions, head, batch=batch))
        yield _linear_matmul(dtype, MatmulShape(positions, head, positions, batch=batch, operands=MatmulLayout.NN))
        yield _linear_matmul(dtype, MatmulShape(positions, head, positions, batch=batch, operands=MatmulLayout.TN))


def _cube_matmuls(dtype: DType, sizes: Iterable[int]) -> Iterator[Kernel]:
    for size, operands in product(sizes, MatmulLayout):
        yield _linear_matmul(dtype, MatmulShape(size, size, size, operands=operands))


def _linear_matmul(dtype: DType, shape: MatmulShape) -> Kernel:
    output_bytes = DType.BF16.bytes if dtype in LOW_PRECISION_DTYPES else dtype.bytes
    result = output_bytes if shape.accumulated is None else 2 * shape.accumulated.bytes
    return linear.matmul_kernel(f"grid.matmul.{shape.operands.value}", dtype, shape, result_bytes=result)


def _attention_kernels(dtype: DType) -> Iterator[Kernel]:
    for (batch, heads, kv_heads), positions, head_dim, causal in product(
        _HEAD_COUNTS, _POSITIONS, (64, 128), (True, False)
    ):
        shape = AttentionShape(batch, positions, positions, heads, kv_heads, head_dim, causal)
        for operator in attention.AttentionCore(shape, dtype, dropout=False, fused=True).flash_operators():
            yield from (*operator.forward, *operator.input_gradient)


def _memory_bound_kernels(dtype: DType) -> Iterator[Kernel]:
    for operator, (row_count, width) in product(_memory_bound_operators(), _MEMORY_BOUND_SIZES):
        shape = operator.shape_for(row_count, width)
        yield operator.forward_kernel(f"grid.{operator.op.value}", dtype, shape)
        yield from operator.backward_kernels(f"grid.{operator.op.value}", dtype, shape)
    for row_count, width in _MEMORY_BOUND_SIZES:
        sizes, accumulation = (row_count, width), Accumulation.ADDED
        yield from memory_bound.accumulate_kernels(
            "grid.accumulate", sizes, gradient_dtype=dtype, accumulator_dtype=DType.FP32, accumulation=accumulation
        )
    for fused, row_count in product((True, False), (4096, 65536, 524288)):
        rotary_operator = memory_bound.rotary_spec(fused=fused)
        shape = rotary_operator.shape_for(row_count, 128, table=2048 if row_count > 4096 else 512)
        yield rotary_operator.forward_kernel("grid.rotary", dtype, shape)
        yield from rotary_operator.backward_kernels("grid.rotary", dtype, shape)


def _memory_bound_operators() -> Iterator[MemoryBoundSpec]:
    """Every memory-bound operator over [rows, width] that a layer may have."""
    for fused in (True, False):
        yield memory_bound.norm_spec(Norm.LAYERNORM, fused=fused)
        yield memory_bound.norm_spec(Norm.RMSNORM, fused=fused)
        yield memory_bound.activation_spec(MlpType.SWIGLU, fused=fused)
        yield memory_bound.residual_spec(dropout=True, fused=fused)
        yield memory_bound.softmax_spec(fused=fused)
        yield memory_bound.softcap_spec(fused=fused)
    yield memory_bound.activation_spec(MlpType.GELU, fused=True)
    yield memory_bound.residual_spec(dropout=False, fused=True)
    yield memory_bound.DROPOUT
    yield memory_bound.BIAS_GRADIENT


def _expert_kernels(dtype: DType) -> Iterator[Kernel]:
    """Kernels of published MoE layers: expert matmuls in one grouped kernel and on streams, and token routing."""
    yield from _moe_kernels(mixed_precision(compute=dtype, master=None), _MOE_TOKENS, Accumulation.FUSED)


def _moe_kernels(recipe: PrecisionRecipe, token_counts: Sequence[int], accumulation: Accumulation) -> Iterator[Kernel]:
    """token_counts: tokens of a rank."""
    for (name, ep), tokens, grouping in product(_MOE_MODELS, token_counts, (Grouping.KERNEL, Grouping.STREAMS)):
        overheads = Overheads(permute_unfused=True, router_unfused=True, grouping=grouping, accumulation=accumulation)
        training = Training(tokens, 1, recipe=recipe, fused=NONE_FUSED, overheads=overheads)
        model = load_preset(name)
        for spec in (distinct_spec for distinct_spec in model.distinct_specs if isinstance(distinct_spec.mlp, MoeMlp)):
            for operator in layers.transformer_layer(
                model, spec, training, LayerShard(1, tokens, tokens, ep=ep)
            ).operators:
                kernels = (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
                yield from (replace(kernel, name="grid.experts") for kernel in kernels if _is_moe_kernel(kernel))


def _is_moe_kernel(kernel: Kernel) -> bool:
    ops = (*TOKEN_ROUTING_OPS, MemoryBoundOp.WEIGHTING)
    return kernel.kind in GROUPED_MATMUL_KINDS or (
        isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.routine in ops
    )


def _loss_kernels(dtype: DType) -> Iterator[Kernel]:
    implementations = [loss for loss in LossImplementation if loss not in LOSSES_BY_PART]  # whose kernels are theirs
    for implementation, (row_count, width) in product(implementations, _VOCABULARIES):
        loss_operator = memory_bound.loss_spec(implementation)
        yield loss_operator.forward_kernel("grid.loss", dtype, loss_operator.shape_for(row_count, width))
        yield from loss_operator.backward_kernels("grid.loss", dtype, loss_operator.shape_for(row_count, width))
    precision = mixed_precision(compute=dtype, master=None)
    for (tokens, vocab), hidden in product(_VOCABULARIES, (768, 4096)):
        model = replace(load_preset("llama3-8b"), vocab=vocab, hidden=hidden)
        table = layers.embedding_layer(model, Training(tokens, 1, 1, precision), LayerShard(1, tokens, tokens))
        for operator in table.operators:
            yield from (*operator.forward, *operator.weight_gradient)


def _optimizer_kernels(dtype: DType) -> Iterator[Kernel]:
    full = mixed_precision(compute=DType.FP32, gradients=DType.FP32, master=None)
    mixed_recipe = mixed_precision(compute=dtype, gradients=DType.FP32, master=DType.FP32)
    for parameters, fused, optimizer in product(_PARAMETERS, (ALL_FUSED, NONE_FUSED), _OPTIMIZERS):
        for precision in dict.fromkeys((full, mixed_recipe if dtype is not DType.FP32 else full)):
            overheads = Overheads(scale_clipped_gradients=True)
            training = Training(1, 1, recipe=precision, fused=fused, optimizer=optimizer, overheads=overheads)
            yield from (*optimizer_step_kernels(training, parameters), *gradient_norm_kernels(training, parameters))
