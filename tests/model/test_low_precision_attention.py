"""Flash attention in scaled formats: its casts by hand, nothing else of a layer changes, and its speedup."""

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
from tests.uniform_models import uniform_layer

MODEL = load_preset("llama-tiny")  # hidden 512, 8 heads of 64, 4 of them with keys
T, HIDDEN, KEYS = 256, 512, 256
RECIPE = load_recipe("mxfp8")


def attention_layer(attention: DType | None) -> LayerOperators:
    return uniform_layer(MODEL, Training(T, 1, recipe=replace(RECIPE, attention=attention)), LayerShard(1, T, T))


def core_kernels(attention: DType | None) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    (operator,) = (item for item in attention_layer(attention).operators if item.name == "attention.core")
    return operator.forward, operator.input_gradient


@pytest.mark.parametrize(("dtype", "copies"), [(DType.FP8, 1), (DType.MXFP8, 2)])
def test_attention_inputs_are_cast_before_the_kernel(dtype: DType, copies: int) -> None:
    """Queries, keys and values forward, the result's gradient backward: read in 2 bytes, written in 1 or twice 1."""
    (cast, forward), (gradient_cast, backward) = core_kernels(dtype)
    assert [kernel.kind for kernel in (cast, gradient_cast)] == [KernelKind.CAST] * 2
    assert cast.bytes == T * (HIDDEN + 2 * KEYS) * (2 + copies * dtype.bytes)
    assert gradient_cast.bytes == T * HIDDEN * (2 + copies * dtype.bytes)
    assert forward.dtype is backward.dtype is dtype


def test_other_operators_are_unchanged() -> None:
    bf16_layer, mxfp8_layer = attention_layer(None), attention_layer(DType.MXFP8)
    assert [operator for operator in bf16_layer.operators if operator.name != "attention.core"] == [
        item for item in mxfp8_layer.operators if item.name != "attention.core"
    ]
    for (bf16_kernel,), (_, mxfp8_kernel) in zip(core_kernels(None), core_kernels(DType.MXFP8), strict=True):
        assert (bf16_kernel.flops, bf16_kernel.shape) == (mxfp8_kernel.flops, mxfp8_kernel.shape)
        assert mxfp8_kernel.bytes < bf16_kernel.bytes


def test_high_precision_layers_have_high_precision_attention() -> None:
    assert replace(RECIPE, attention=DType.MXFP8).high_precision == RECIPE.high_precision


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [DType.FP8, DType.MXFP8])
def test_the_speedup_is_that_of_the_accelerator_file(dtype: DType, backward: bool) -> None:
    """Of the arithmetic time; a kernel's start is as long in any format."""
    accelerator = load_accelerator("gb200")
    efficiency = accelerator.efficiency
    constants = efficiency.attention_backward if backward else efficiency.attention_forward
    shape = AttentionShape(4, 8192, 8192, 32, 8, 128, causal=True)
    bf16_seconds, low_precision_seconds = (
        Roofline(accelerator).time_kernel(flash_kernel(shape, d_type, backward=backward)).seconds
        - efficiency.kernel_latency
        for d_type in (DType.BF16, dtype)
    )
    assert bf16_seconds / low_precision_seconds == pytest.approx(constants.speedup_by_format[dtype])


def test_an_accelerator_without_low_precision_attention_is_rejected() -> None:
    shape = AttentionShape(1, 1024, 1024, 8, 8, 128, causal=True)
    with pytest.raises(InputError, match="h100-sxm-80gb has no attention in fp8"):
        Roofline(load_accelerator("h100-sxm-80gb")).time_kernel(flash_kernel(shape, DType.FP8, backward=False))
