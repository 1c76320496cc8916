"""Matmuls of operands with scales: PyTorch's checks accept them, and unsupported ones are reported."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

torch = pytest.importorskip("torch")
scaled_matmul = pytest.importorskip("calibrate.kernels.pytorch_ops.scaled_matmul")
from calibrate.kernels.formulas import UnsupportedKernel  # noqa: E402 - after torch is known to be there
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor  # noqa: E402

CPU_DEVICE, META_DEVICE = torch.device("cpu"), torch.device("meta")
SHAPE = MatmulShape(200, 384, 640)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("operands", MatmulLayout)
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES)
def test_pytorch_accepts_operands_and_scales_of_every_format(dtype: DType, operands: MatmulLayout) -> None:
    """On `meta` it checks sizes, formats, strides and layout as on a GPU; blocks of 128 also for other sizes."""
    result = scaled_matmul.random_scaled_matmul(replace(SHAPE, operands=operands), dtype, META_DEVICE)()
    assert (result.shape, result.dtype) == ((200, 384), torch.bfloat16)


@pytest.mark.parametrize("dtype", [item for item in LOW_PRECISION_DTYPES if item is not DType.FP8])
def test_pytorch_rejects_too_few_scales(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shows that the checks are active."""
    original = scaled_matmul._operand_scales

    def truncated_scales(dtype: DType, rows: Any, k: int, **options: bool) -> Any:
        scales = original(dtype, rows, k, **options)
        return replace(scales, values=scales.values[:-1])

    monkeypatch.setattr(scaled_matmul, "_operand_scales", truncated_scales)
    with pytest.raises((RuntimeError, ValueError), match="scal"):
        scaled_matmul.random_scaled_matmul(SHAPE, dtype, META_DEVICE)()


@pytest.mark.parametrize("dtype", [DType.FP8, DType.FP8_ROWWISE])
def test_scaled_matmul_is_near_the_exact_one(dtype: DType) -> None:
    """E4M3 has 3 mantissa bits: the relative error of a factor is at most 1/16, of a sum of 64 far less."""
    torch.manual_seed(0)
    action = scaled_matmul.random_scaled_matmul(MatmulShape(32, 16, 64), dtype, CPU_DEVICE)
    torch.manual_seed(0)
    a, b = (torch.empty(size, 64, dtype=torch.bfloat16).normal_() for size in (32, 16))
    exact = a.float() @ b.float().t()
    assert (action().float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (MatmulShape(32, 16, 30), DType.FP8, "multiples of 16 along k and of 16 along n; k is 30"),
        (MatmulShape(32, 24, 32), DType.FP8_ROWWISE, "of 16 along n; k is 32, n is 24"),
        (MatmulShape(32, 128, 192), DType.FP8_BLOCKWISE, "multiples of 128 along k and of 128 along n"),
        (MatmulShape(32, 192, 128), DType.FP8_BLOCKWISE, "multiples of 128 along k and of 128 along n"),
        (MatmulShape(32, 16, 48), DType.MXFP8, "multiples of 32 along k"),
        (MatmulShape(32, 16, 48), DType.NVFP4, "multiples of 32 along k"),
        (MatmulShape(32, 32, 32, accumulated=DType.FP32), DType.MXFP8, "no matmul in mxfp8 that is accumulated"),
        (MatmulShape(32, 32, 32, batch=2), DType.NVFP4, "no batched matmul in nvfp4"),
    ],
)
def test_scaled_matmuls_that_pytorch_lacks_are_unsupported(shape: MatmulShape, dtype: DType, message: str) -> None:
    with pytest.raises(UnsupportedKernel, match=message):
        scaled_matmul.random_scaled_matmul(shape, dtype, META_DEVICE)


def _record_arguments(monkeypatch: pytest.MonkeyPatch, shape: MatmulShape, dtype: DType) -> SimpleNamespace:
    """Scaling types of the operands, layout of the scales, and whether accumulation is fast."""
    calls: list[SimpleNamespace] = []

    def fake_scaled_mm(
        _a: Any, _b: Any, scales_a: Any, a: Any, scales_b: Any, b: Any, *order: Any, use_fast_accum: bool
    ) -> None:
        calls.append(
            SimpleNamespace(of=(a.name, b.name), order=order, fast=use_fast_accum, scales=(scales_a, scales_b))
        )

    monkeypatch.setattr(scaled_matmul, "scaled_mm", fake_scaled_mm)
    scaled_matmul.random_scaled_matmul(shape, dtype, META_DEVICE)()
    return calls[0]


@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES)
def test_fast_accumulation_is_used_forward_and_with_rowwise_scales(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {
        operands
        for operands in MatmulLayout
        if _record_arguments(monkeypatch, replace(SHAPE, operands=operands), dtype).fast
    }
    assert fast == {DType.FP8: {MatmulLayout.NT}, DType.FP8_ROWWISE: set(MatmulLayout)}.get(dtype, set())


def test_weights_have_square_scale_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling_types = {
        operands: _record_arguments(monkeypatch, replace(SHAPE, operands=operands), DType.FP8_BLOCKWISE).of
        for operands in MatmulLayout
    }
    activations = "BlockWise1x128"
    assert scaling_types[MatmulLayout.TN] == (activations, activations)
    assert scaling_types[MatmulLayout.NT] == scaling_types[MatmulLayout.NN] == (activations, "BlockWise128x128")


@pytest.mark.parametrize(("dtype", "shared"), [(DType.MXFP8, 32), (DType.NVFP4, 16)])
def test_block_scales_are_tiled_except_on_amd_gpus(dtype: DType, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 rows of 640: 256 rows of 20 blocks of 32, or of 40 of 16; without tiles 200."""
    arguments = _record_arguments(monkeypatch, SHAPE, dtype)
    assert arguments.scales[0].numel() == 256 * 640 // shared
    assert {item.name for item in arguments.order} == {"SWIZZLE_32_4_4"}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr("calibrate.devices.matmul_support._architecture", lambda _: "gfx950")
    arguments = _record_arguments(monkeypatch, SHAPE, dtype)
    assert arguments.scales[0].numel() == 200 * 640 // shared
    assert {element.name for element in arguments.order} == {"NO_SWIZZLE"}


def test_fp4_tensors_are_rounded_normal_numbers() -> None:
    """Two in a byte, scaled to a maximum of about six; the share of each value is that of a normal number."""
    bits = normal_tensor(CPU_DEVICE, DType.NVFP4, 1024, 1024).view(torch.uint8).flatten().int()
    assert bits.numel() == 1024 * 512
    values = torch.tensor((*E2M1_VALUES, *(-item for item in E2M1_VALUES)))
    samples = values[torch.cat((bits % 16, bits // 16))]
    assert samples.mean().item() == pytest.approx(0.0, abs=0.02)
    assert samples.std().item() == pytest.approx(3.0, rel=0.1)
    upper_share = (samples.abs() >= 2.0).float().mean().item()  # share of numbers above 1.75 / 3
    assert upper_share == pytest.approx(
        2.0 * (1.0 - torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(1.75 / 3)).item()), rel=0.02
    )
