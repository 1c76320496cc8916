"""Which kernels are measured?

Those that scenarios' ranks run, sharded as they are there; those of whole layers of published models at usual degrees;
or a general grid of each family, from which the fits learn and between whose points others are interpolated. The grid
takes what the device does in a part of the time that there is, by a first look at how fast it is. Of a format with
scales it has products, experts' too, and the casts of all recipes that are shipped for it.
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
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import LayerShard
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.overheads import Accumulation, Grouping, Overheads
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.quantization import quantize_kernels, transpose_kernel
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import LossImplementation, Optimizer, Training
from clustersim.model.transformer import Norm, TransformerModel
from clustersim.scenario import Scenario

MODELS: Final = ("llama3-8b", "llama3-70b", "llama3-405b")
DEGREES: Final = (1, 2, 4, 8)  # of tensor parallelism
MICROBATCHES: Final = (1, 2)
SEQUENCES: Final = (2048, 4096, 8192)

_CUBES: Final = (256, 384, 512, 1000, 1024, 1536, 2048, 3000, 4096, 6000, 8192, 12288, 16384)
_TOKENS: Final = (512, 2048, 8192, 16384)
_LAYERS: Final = (  # outputs, inputs: of linear layers from GPT-2 to Llama 3 405B, some of them sharded
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
_SCALED_TOKENS: Final = 8192  # of linear layers in formats with scales
_ONE: Final = 1024
_BATCHES: Final = ((32, 512, 64), (32, 2048, 128), (128, 1024, 64))  # of products, positions, head_dim
_HEADS: Final = ((1, 32, 8), (4, 12, 12), (1, 16, 2), (4, 32, 32))  # sequences, heads, key/value heads
_POSITIONS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_STREAMS: Final = ((512, 768), (1024, 4096), (4096, 2048), (4096, 8192), (16384, 8192), (8192, 28672))  # rows, width
_MIXTURES: Final = (  # and over how many ranks experts are spread
    ("mixtral-8x7b", 1),
    ("qwen3-30b-a3b", 1),
    ("qwen3-30b-a3b", 8),
    ("moonlight-16b-a3b", 8),
    ("deepseek-v3", 16),
)
_ROUTED: Final = (1024, 4096)  # tokens of a rank
_VOCABULARIES: Final = ((1024, 32000), (4096, 50257), (8192, 32064), (8192, 128256))  # tokens, logits
_PARAMETERS: Final = (2**20, 2**23, 2**26, 2**28, 2**30)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a device is, roughly."""

    flops: FlopPerSecond
    bandwidth: BytesPerSecond

    def seconds(self, kernel: Kernel) -> Seconds:
        """What a kernel takes, roughly."""
        return max(kernel.flops / self.flops, kernel.bytes / self.bandwidth)


ROUGHLY: Final = Pace(flops=1e11, bandwidth=1e10)  # a CPU's, to put kernels in an order


def of_scenarios(scenarios: Iterable[Scenario]) -> list[Kernel]:
    """All kernels of some scenarios' ranks.

    Products in formats with scales that are added to gradients are there as they are written, too: PyTorch has no
    others, and the fit learns from these.
    """
    found = dict.fromkeys(chain.from_iterable(map(distinct_kernels, scenarios)))
    return list(found | dict.fromkeys(filter(None, map(_written, found))))


def _written(kernel: Kernel) -> Kernel | None:
    """A product whose result is written in BF16 in place of added to what is there."""
    match kernel.shape:
        case MatmulShape(m, n, batch=batch, accumulated=DType() as added) as shape if (
            kernel.dtype in LOW_PRECISION_DTYPES
        ):
            moved = kernel.bytes - batch * m * n * (2 * added.bytes - DType.BF16.bytes)
            return replace(kernel, bytes=moved, shape=replace(shape, accumulated=None))
    return None


def of_presets(names: Iterable[str]) -> list[Kernel]:
    """Kernels of embedding, layer and head of models, at all degrees, microbatches and sequences, fused and not."""
    found: dict[Kernel, None] = {}
    for name, tp, batch, sequence in product(names, DEGREES, MICROBATCHES, SEQUENCES):
        model = load_preset(name)
        for split in {False, tp > 1}:
            shard = LayerShard(batch, sequence, sequence, tp=tp, sequence_parallel=split)
            found |= dict.fromkeys(_layers(model, shard))
    return list(found)


def _layers(model: TransformerModel, shard: LayerShard) -> Iterator[Kernel]:
    for fused in (True, False):
        loss = LossImplementation.VOCAB_PARALLEL if fused else LossImplementation.TORCH
        training = Training(shard.sequence, shard.batch, shard.batch, fused=fused, loss=loss)
        middle = (layers.transformer_layer(model, spec, training, shard) for spec in model.distinct_specs)
        for part in (
            layers.embedding_layer(model, training, shard),
            *middle,
            layers.head_layer(model, training, shard),
        ):
            for operator in part.operators:
                yield from (*operator.forward, *operator.input_gradient, *operator.weight_gradient)


def grid(formats: Sequence[DType], pace: Pace, limit: Seconds) -> list[Kernel]:
    """A general grid in some formats, the first of them the most used, of kernels that take no longer than a limit."""
    main, *others = formats
    found = chain(
        _matmuls(main),
        _attention(main),
        _streams(main),
        _losses(main),
        _updates(main),
        _experts(main),
        *(_cubes(other, _CUBES[::2]) for other in others),
        *(_scaled(other, main) for other in others if other in LOW_PRECISION_DTYPES),
    )
    return [kernel for kernel in dict.fromkeys(found) if pace.seconds(kernel) <= limit]


def in_format(kernel: Kernel) -> DType:
    """The format that a kernel of the grid is there for: of a cast what it makes."""
    match kernel.shape:
        case MemoryBoundShape(MemoryBoundOp.QUANTIZE, formats=(made, *_)):
            return made
    return kernel.dtype


def one_of(dtype: DType) -> Kernel:
    """A product in a format, whose row says where a device has none."""
    return _product(dtype, MatmulShape(_ONE, _ONE, _ONE))


def _scaled(dtype: DType, wide: DType) -> Iterator[Kernel]:
    """Products of linear layers and of experts in a format with scales, and the casts into it."""
    for outputs, inputs in _LAYERS:
        yield _product(dtype, MatmulShape(_SCALED_TOKENS, outputs, inputs))
    recipe = replace(mixed_precision(compute=wide, master=None), matmul_formats=MatmulFormats.uniform(dtype))
    yield from (
        kernel
        for kernel in _of_mixtures(recipe, _ROUTED[-1:], Accumulation.ADDED)
        if kernel.kind in GROUPED_MATMUL_KINDS
    )
    for cast, sizes in product(_casts(dtype), _STREAMS):
        yield from quantize_kernels("grid.quantize", cast, sizes, high_precision=wide, low_precision=dtype)
    yield from (transpose_kernel("grid.transpose", sizes, dtype) for sizes in _STREAMS)


def _casts(dtype: DType) -> list[OperandCast]:
    """All that shipped recipes of a format have, on accelerators of either kind."""
    recipes = (load_recipe(name) for name in list_names("recipes"))
    found: dict[OperandCast, None] = {}
    for casts in (
        recipe.casts for recipe in recipes if recipe.matmul_formats.low_precision is dtype and recipe.casts is not None
    ):
        for way in (casts, casts.rowwise_only):
            operands = (
                way.input,
                way.behind_norm,
                way.output_gradient,
                way.weight,
                way.input_backward,
                way.weight_backward,
            )
            found |= dict.fromkeys(operand for operand in operands if operand is not None and operand.launch_count)
    return list(found)


def _matmuls(dtype: DType) -> Iterator[Kernel]:
    yield from _cubes(dtype, _CUBES)
    for tokens, (outputs, inputs) in product(_TOKENS, _LAYERS):
        forward = MatmulShape(tokens, outputs, inputs)
        yield _product(dtype, forward)
        yield _product(dtype, MatmulShape(tokens, inputs, outputs, operands=MatmulLayout.NN))
        weight = MatmulShape(outputs, inputs, tokens, operands=MatmulLayout.TN)
        yield _product(dtype, weight)
        yield _product(dtype, replace(weight, accumulated=DType.FP32))
    for batch, positions, head in _BATCHES:
        yield _product(dtype, MatmulShape(positions, positions, head, batch=batch))
        yield _product(dtype, MatmulShape(positions, head, positions, batch=batch, operands=MatmulLayout.NN))
        yield _product(dtype, MatmulShape(positions, head, positions, batch=batch, operands=MatmulLayout.TN))


def _cubes(dtype: DType, sizes: Iterable[int]) -> Iterator[Kernel]:
    for size, operands in product(sizes, MatmulLayout):
        yield _product(dtype, MatmulShape(size, size, size, operands=operands))


def _product(dtype: DType, shape: MatmulShape) -> Kernel:
    written = DType.BF16.bytes if dtype in LOW_PRECISION_DTYPES else dtype.bytes
    result = written if shape.accumulated is None else 2 * shape.accumulated.bytes
    return linear.matmul_kernel(f"grid.matmul.{shape.operands.value}", dtype, shape, result_bytes=result)


def _attention(dtype: DType) -> Iterator[Kernel]:
    for (batch, heads, kv_heads), positions, head_dim, causal in product(_HEADS, _POSITIONS, (64, 128), (True, False)):
        shape = AttentionShape(batch, positions, positions, heads, kv_heads, head_dim, causal)
        for operator in attention.AttentionCore(shape, dtype, dropout=False, fused=True).flash_operators():
            yield from (*operator.forward, *operator.input_gradient)


def _streams(dtype: DType) -> Iterator[Kernel]:
    for stream, (rows, width) in product(_operators(), _STREAMS):
        shape = stream.shape_for(rows, width)
        yield stream.forward_kernel(f"grid.{stream.op.value}", dtype, shape)
        yield from stream.backward_kernels(f"grid.{stream.op.value}", dtype, shape)
    for rows, width in _STREAMS:
        sizes, how = (rows, width), Accumulation.ADDED
        yield from memory_bound.accumulate_kernels(
            "grid.accumulate", sizes, gradient_dtype=dtype, accumulator_dtype=DType.FP32, accumulation=how
        )
    for fused, rows in product((True, False), (4096, 65536, 524288)):
        over = memory_bound.rotary_spec(fused=fused)
        shape = over.shape_for(rows, 128, table=2048 if rows > 4096 else 512)
        yield over.forward_kernel("grid.rotary", dtype, shape)
        yield from over.backward_kernels("grid.rotary", dtype, shape)


def _operators() -> Iterator[MemoryBoundSpec]:
    """Each routine over [rows, width] that a layer may have."""
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


def _experts(dtype: DType) -> Iterator[Kernel]:
    """What published mixtures have in place of an MLP: products in one kernel and on streams, and their routing."""
    yield from _of_mixtures(mixed_precision(compute=dtype, master=None), _ROUTED, Accumulation.FUSED)


def _of_mixtures(recipe: PrecisionRecipe, routed: Sequence[int], how: Accumulation) -> Iterator[Kernel]:
    """routed: tokens of a rank."""
    for (name, ep), tokens, grouping in product(_MIXTURES, routed, (Grouping.KERNEL, Grouping.STREAMS)):
        overheads = Overheads(permute_unfused=True, router_unfused=True, grouping=grouping, accumulation=how)
        training = Training(tokens, 1, recipe=recipe, fused=False, overheads=overheads)
        model = load_preset(name)
        for spec in (distinct_spec for distinct_spec in model.distinct_specs if isinstance(distinct_spec.mlp, MoeMlp)):
            for operator in layers.transformer_layer(
                model, spec, training, LayerShard(1, tokens, tokens, ep=ep)
            ).operators:
                every = (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
                yield from (replace(kernel, name="grid.experts") for kernel in every if _of_mixture(kernel))


def _of_mixture(kernel: Kernel) -> bool:
    routines = (*TOKEN_ROUTING_OPS, MemoryBoundOp.WEIGHTING)
    return kernel.kind in GROUPED_MATMUL_KINDS or (
        isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.routine in routines
    )


def _losses(dtype: DType) -> Iterator[Kernel]:
    for form, (rows, width) in product(LossImplementation, _VOCABULARIES):
        over = memory_bound.loss_spec(form)
        yield over.forward_kernel("grid.loss", dtype, over.shape_for(rows, width))
        yield from over.backward_kernels("grid.loss", dtype, over.shape_for(rows, width))
    precision = mixed_precision(compute=dtype, master=None)
    for (tokens, vocab), hidden in product(_VOCABULARIES, (768, 4096)):
        model = replace(load_preset("llama3-8b"), vocab=vocab, hidden=hidden)
        table = layers.embedding_layer(model, Training(tokens, 1, 1, precision), LayerShard(1, tokens, tokens))
        for operator in table.operators:
            yield from (*operator.forward, *operator.weight_gradient)


def _updates(dtype: DType) -> Iterator[Kernel]:
    full = mixed_precision(compute=DType.FP32, gradients=DType.FP32, master=None)
    usual = mixed_precision(compute=dtype, gradients=DType.FP32, master=DType.FP32)
    for parameters, fused, optimizer in product(_PARAMETERS, (True, False), Optimizer):
        for precision in dict.fromkeys((full, usual if dtype is not DType.FP32 else full)):
            training = Training(1, 1, recipe=precision, fused=fused, optimizer=optimizer)
            yield from (*optimizer_step_kernels(training, parameters), *gradient_norm_kernels(training, parameters))
