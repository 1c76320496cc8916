"""Can the job's accelerators and matrices have the formats that its recipe wants?

Libraries take sizes of matrices in multiples of a block: 16 elements (Transformer Engine, `assert_dim_for_fp8_exec`, as
cuBLAS wants rows of whole 16 bytes), with MXFP8 32 (its blocks).
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.model.precision_recipe import Recipe
from clustersim.model.training import Attention
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, FullyShard
from clustersim.scenario.nearest_values import multiples_around
from clustersim.scenario.resolved import Setup

_BLOCKS: Final = {DType.MXFP8: 32}
_BLOCK: Final = 16


def as_run(recipe: Recipe, accelerator: Accelerator, data: DataParallelStrategy) -> Recipe:
    """A recipe as an accelerator reads operands, and as a strategy holds weights."""
    by_rows, sharded = accelerator.efficiency.matmul.by_rows, isinstance(data, FullyShard)
    return recipe.as_run(by_rows=by_rows, sharded=sharded)


def check_formats(scenario: Setup) -> Iterator[str]:
    """Whether every accelerator computes in every format of the products."""
    products = scenario.training.recipe.products
    formats = dict.fromkeys((products.forward, products.input_gradient, products.weight_gradient))
    for accelerator, dtype in product(scenario.cluster.kinds()[0], formats):
        try:
            accelerator.peak_of(dtype)
        except InputError as error:
            yield f"training.precision: {error}; {_having(dtype)}"


def check_attention(scenario: Setup) -> Iterator[str]:
    """Whether every accelerator has attention in the format that the recipe wants, and what asks for it is flash."""
    dtype, asked = scenario.training.recipe.attention, scenario.training.attention
    if dtype is None:
        return
    key = f"training.precision.attention: {dtype.value}"
    if asked is not Attention.FLASH:
        yield f"{key} is of flash attention, but training.attention is {asked.value}"
    for accelerator in scenario.cluster.kinds()[0]:
        if not _attends(accelerator, dtype):
            known = [name for name in data_files.names("accelerators") if _attends(load_accelerator(name), dtype)]
            yield f"{key}, but nothing is known of it on {accelerator.name}; {', '.join(known)} have it"


def _attends(accelerator: Accelerator, dtype: DType) -> bool:
    return dtype in accelerator.efficiency.attention_formats


def _having(dtype: DType) -> str:
    """Which shipped accelerators compute in a format."""
    names = [name for name in data_files.names("accelerators") if dtype in load_accelerator(name).formats]
    return (
        f"{', '.join(names)} compute in {dtype.value}" if names else f"no shipped accelerator computes in {dtype.value}"
    )


def check_blocks(scenario: Setup) -> Iterator[str]:
    """Whether the matrices of narrow products are cut into whole blocks."""
    recipe, model, layout = scenario.training.recipe, scenario.model, scenario.layout
    if (narrow := recipe.products.narrow) is None or recipe.casts is None:
        return
    block, name = _BLOCKS.get(narrow, _BLOCK), recipe.name
    sizes = [
        ("hidden", model.hidden, 1),
        *(("ffn", mlp.ffn, layout.tp) for mlp in model.mlps),
        *(("experts.ffn", mixture.ffn, layout.effective_etp) for mixture in model.mixtures),
        *(("heads x head_dim", attention.heads * attention.head_dim, layout.tp) for attention in model.attentions),
    ]
    for key, size, parts in sizes:
        if size % (block * parts):
            cut = f" over tp {parts}" if parts > 1 else ""
            yield (
                f"training.precision: {name} has blocks of {block}, but {key} of {model.name} is {size}{cut}; "
                f"{multiples_around(size, block * parts)} fits"
            )


def check_tokens(scenario: Setup) -> Iterator[str]:
    """Whether the tokens of narrow products are whole blocks."""
    training, recipe = scenario.training, scenario.training.recipe
    if (narrow := recipe.products.narrow) is None or recipe.casts is None:
        return
    block, tokens = _BLOCKS.get(narrow, _BLOCK), training.microbatch * training.sequence // scenario.layout.cp
    if tokens % block:
        yield (
            f"training.precision: {recipe.name} has blocks of {block}, but a microbatch has {tokens} tokens on a rank; "
            f"{multiples_around(tokens, block)} fits"
        )


def check_ends(scenario: Setup) -> Iterator[str]:
    """Whether the model has as many layers as are to be without narrow products."""
    recipe, layers = scenario.training.recipe, scenario.model.layers
    for key, wide in (("first_layers", recipe.first), ("last_layers", recipe.last)):
        if wide > layers:
            yield f"training.precision.{key}: {wide}, but {scenario.model.name} has {layers} layers; {layers} fits"


def check_adapted(scenario: Setup) -> Iterator[str]:
    """Whether adapters are trained beside products that are cast for."""
    recipe = scenario.training.recipe
    if scenario.training.lora is not None and recipe.casts is not None:
        yield f"training.lora: adapters beside products in {recipe.name} are not modelled; precision bf16 fits"
