"""Flash attention in formats with scales: its casts by hand, and nothing else of a layer; a pace of its own."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import Training
from clustersim.validation.kernels import flash_kernel
from tests.uniform_models import layer

MODEL = load_preset("llama-tiny")  # hidden 512, 8 heads of 64, 4 of them with keys
T, HIDDEN, KEYS = 256, 512, 256
RECIPE = load_recipe("mxfp8")


def made(attention: DType | None) -> LayerOperators:
    return layer(MODEL, Training(T, 1, recipe=replace(RECIPE, attention=attention)), LayerShard(1, T, T))


def core(attention: DType | None) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    (found,) = (operator for operator in made(attention).operators if operator.name == "attention.core")
    return found.forward, found.input_gradient


@pytest.mark.parametrize(("dtype", "copies"), [(DType.FP8, 1), (DType.MXFP8, 2)])
def test_what_it_reads_is_cast_before(dtype: DType, copies: int) -> None:
    """Queries, keys and values forward, the result's gradient backward: read in 2 bytes, written in 1 or twice 1."""
    (cast, forward), (back, backward) = core(dtype)
    assert [kernel.kind for kernel in (cast, back)] == [KernelKind.CAST] * 2
    assert cast.bytes == T * (HIDDEN + 2 * KEYS) * (2 + copies * dtype.bytes)
    assert back.bytes == T * HIDDEN * (2 + copies * dtype.bytes)
    assert forward.dtype is backward.dtype is dtype


def test_all_else_is_as_it_was() -> None:
    plain, narrow = made(None), made(DType.MXFP8)
    assert [operator for operator in plain.operators if operator.name != "attention.core"] == [
        item for item in narrow.operators if item.name != "attention.core"
    ]
    for (own,), (_, other) in zip(core(None), core(DType.MXFP8), strict=True):
        assert (own.flops, own.shape) == (other.flops, other.shape)
        assert other.bytes < own.bytes


def test_layers_without_narrow_products_have_none() -> None:
    assert replace(RECIPE, attention=DType.MXFP8).high_precision == RECIPE.high_precision


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [DType.FP8, DType.MXFP8])
def test_it_is_so_many_times_as_fast_as_an_accelerators_file_says(dtype: DType, backward: bool) -> None:
    """Of what arithmetic takes; a kernel's start is as long in any format."""
    accelerator = load_accelerator("gb200")
    own = accelerator.efficiency
    constants = own.attention_backward if backward else own.attention_forward
    shape = AttentionShape(4, 8192, 8192, 32, 8, 128, causal=True)
    wide, narrow = (
        Roofline(accelerator).time_kernel(flash_kernel(shape, d_type, backward=backward)).seconds - own.kernel_latency
        for d_type in (DType.BF16, dtype)
    )
    assert wide / narrow == pytest.approx(constants.formats[dtype])


def test_an_accelerator_without_it_says_so() -> None:
    shape = AttentionShape(1, 1024, 1024, 8, 8, 128, causal=True)
    with pytest.raises(InputError, match="h100-sxm-80gb has no attention in fp8"):
        Roofline(load_accelerator("h100-sxm-80gb")).time_kernel(flash_kernel(shape, DType.FP8, backward=False))
