"""Do the cluster's accelerators and the model's matrices support the formats of the precision recipe?

And do the accelerators have the library of flash attention?

Libraries require matrix sizes in multiples of a block: 16 elements (Transformer Engine,
`assert_dim_for_fp8_exec`; cuBLAS requires rows of a multiple of 16 bytes), with MXFP8 32 (its blocks).
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.model.framework import Framework
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.model.training import AttentionBackend
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy

_BLOCK_SIZES: Final = {DType.MXFP8: 32}
_DEFAULT_BLOCK_SIZE: Final = 16
_SIZE_KEYS: Final = ("hidden", "ffn", "experts.ffn")  # sizes that are keys of the model


def effective_recipe(
    recipe: PrecisionRecipe, accelerator: Accelerator, data: DataParallelStrategy, framework: Framework
) -> PrecisionRecipe:
    """A recipe as it runs: how the accelerator reads operands, weights are stored, and casts are compiled."""
    is_rowwise, is_fsdp = accelerator.efficiency.matmul.tn_only, data.shards_parameters
    run_recipe = recipe.uncompiled() if framework.is_eager else recipe
    return run_recipe.for_hardware(tn_only=is_rowwise, weights_sharded=is_fsdp)


def check_matmul_formats(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that every accelerator supports every format of the matmuls."""
    matmul_formats = scenario.training.recipe.matmul_formats
    formats = dict.fromkeys((matmul_formats.forward, matmul_formats.input_gradient, matmul_formats.weight_gradient))
    for accelerator, dtype in product(scenario.cluster.accelerator_kinds()[0], formats):
        try:
            accelerator.peak_flops(dtype)
        except InputError as error:
            yield f"training.precision: {error}; {_accelerators_supporting(dtype)}"


def check_attention_format(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the recipe's attention format is used with flash attention and supported by every accelerator."""
    dtype, attention = scenario.training.recipe.attention, scenario.training.attention
    if dtype is None:
        return
    key = f"training.precision.attention: {dtype.value}"
    if attention is not AttentionBackend.FLASH:
        yield f"{key} is of the fastest flash attention (flash), but training.attention is {attention.value}"
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        if not _supports_attention_format(accelerator, dtype):
            supporting = [
                name
                for name in data_files.list_names("accelerators")
                if _supports_attention_format(load_accelerator(name), dtype)
            ]
            yield f"{key}, but nothing is known of it on {accelerator.name}; {', '.join(supporting)} have it"


def check_attention_library(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that rates of the library of flash attention are known for every accelerator."""
    attention = scenario.training.attention
    if attention is AttentionBackend.STANDARD:
        return
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        libraries = accelerator.efficiency.known_attention
        if attention.value not in libraries:
            yield (
                f"training.attention: nothing is known of {attention.value} on {accelerator.name}; "
                f"it has {', '.join(libraries)} and standard"
            )


def _supports_attention_format(accelerator: Accelerator, dtype: DType) -> bool:
    return dtype in accelerator.efficiency.attention_formats


def _accelerators_supporting(dtype: DType) -> str:
    """Which packaged accelerators support a format, as text."""
    names = [name for name in data_files.list_names("accelerators") if dtype in load_accelerator(name).formats]
    return (
        f"{', '.join(names)} compute in {dtype.value}"
        if names
        else f"no packaged accelerator computes in {dtype.value}"
    )


def check_matrix_block_size(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the shards of low-precision matmul operands are multiples of the block size."""
    recipe, model, layout = scenario.training.recipe, scenario.model, scenario.layout
    if (low_precision := recipe.matmul_formats.low_precision) is None or recipe.casts is None:
        return
    block_size, name = _BLOCK_SIZES.get(low_precision, _DEFAULT_BLOCK_SIZE), recipe.name
    sizes = [
        ("hidden", model.hidden, 1),
        *(("ffn", mlp.ffn, layout.tp) for mlp in model.distinct_dense_mlps),
        *(("experts.ffn", moe_mlp.ffn, layout.effective_etp) for moe_mlp in model.distinct_moes),
        *(
            ("heads x head_dim", distinct_attention.heads * distinct_attention.head_dim, layout.tp)
            for distinct_attention in model.distinct_attentions
        ),
    ]
    for key, size, shards in sizes:
        if size % (block_size * shards):
            shards_text = f" over tp {shards}" if shards > 1 else ""
            multiples = Remedy.multiples(f"model.{key}", size, block_size * shards)
            yield Problem(
                f"training.precision: {name} has blocks of {block_size}, but {key} of {model.name} is "
                f"{size}{shards_text}",
                *((multiples,) if key in _SIZE_KEYS else ()),
            )


def check_token_block_size(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the tokens of low-precision matmuls are a multiple of the block size."""
    training, recipe = scenario.training, scenario.training.recipe
    if (low_precision := recipe.matmul_formats.low_precision) is None or recipe.casts is None:
        return
    block_size, tokens = (
        _BLOCK_SIZES.get(low_precision, _DEFAULT_BLOCK_SIZE),
        training.microbatch * training.sequence // scenario.layout.cp,
    )
    if tokens % block_size:
        tokens_of_rank = block_size * scenario.layout.cp
        step = tokens_of_rank // math.gcd(tokens_of_rank, training.microbatch)
        yield Problem(
            f"training.precision: {recipe.name} has blocks of {block_size}, but a microbatch has {tokens} tokens on "
            "a rank",
            Remedy.multiples("training.sequence", training.sequence, step),
        )


def check_high_precision_layers(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the model has as many layers as are to be kept in high precision."""
    recipe, layers = scenario.training.recipe, scenario.model.layer_count
    for key, layer_count in (
        ("num_layers_at_start_in_bf16", recipe.num_layers_at_start_in_bf16),
        ("num_layers_at_end_in_bf16", recipe.num_layers_at_end_in_bf16),
    ):
        if layer_count > layers:
            yield Problem(
                f"training.precision.{key}: {layer_count}, but {scenario.model.name} has {layers} layers",
                Remedy(f"training.precision.{key}", ((layers,),)),
            )


def check_lora_precision(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that LoRA is not combined with quantized matmuls."""
    recipe = scenario.training.recipe
    if scenario.training.lora is not None and recipe.casts is not None:
        yield Problem(
            f"training.lora: adapters with matmuls in {recipe.name} are not modelled",
            Remedy("training.precision", (("bf16",),)),
        )
