"""Products of operands in formats with scales: PyTorch's own checks take them, and what it lacks is said."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import MatmulLayout, MatmulShape

torch = pytest.importorskip("torch")
scaled = pytest.importorskip("calibrate.kernels.pytorch_ops.scaled_matmul")
from calibrate.kernels.formulas import UnsupportedKernel  # noqa: E402 - after torch is known to be there
from calibrate.kernels.pytorch_ops.random_tensors import normal_tensor  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = MatmulShape(200, 384, 640)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("operands", MatmulLayout)
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES)
def test_pytorch_takes_operands_and_scales_of_every_format(dtype: DType, operands: MatmulLayout) -> None:
    """On `meta` it checks sizes, formats, strides and order as on a GPU. Blocks of 128 also of what is no multiple."""
    made = scaled.random_scaled_matmul(replace(SHAPE, operands=operands), dtype, META)()
    assert (made.shape, made.dtype) == ((200, 384), torch.bfloat16)


@pytest.mark.parametrize("dtype", [item for item in LOW_PRECISION_DTYPES if item is not DType.FP8])
def test_pytorch_refuses_other_scales(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the checks are there."""
    kept = scaled._operand_scales

    def fewer(dtype: DType, rows: Any, k: int, **words: bool) -> Any:
        found = kept(dtype, rows, k, **words)
        return replace(found, numbers=found.numbers[:-1])

    monkeypatch.setattr(scaled, "_scales", fewer)
    with pytest.raises((RuntimeError, ValueError), match="scal"):
        scaled.random_scaled_matmul(SHAPE, dtype, META)()


@pytest.mark.parametrize("dtype", [DType.FP8, DType.FP8_ROWWISE])
def test_a_product_is_near_the_exact_one(dtype: DType) -> None:
    """E4M3 keeps 3 bits: each factor is off by at most 1/16, a sum of 64 of them by far less."""
    torch.manual_seed(0)
    action = scaled.random_scaled_matmul(MatmulShape(32, 16, 64), dtype, CPU)
    torch.manual_seed(0)
    a, b = (torch.empty(rows, 64, dtype=torch.bfloat16).normal_() for rows in (32, 16))
    exact = a.float() @ b.float().t()
    assert (action().float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        (MatmulShape(32, 16, 30), DType.FP8, "multiples of 16 along k and of 16 along n; k is 30"),
        (MatmulShape(32, 24, 32), DType.FP8_ROWWISE, "of 16 along n; k is 32, n is 24"),
        (MatmulShape(32, 128, 192), DType.FP8_BLOCKWISE, "multiples of 128 along k and of 128 along n"),
        (MatmulShape(32, 192, 128), DType.FP8_BLOCKWISE, "multiples of 128 along k and of 128 along n"),
        (MatmulShape(32, 16, 48), DType.MXFP8, "multiples of 32 along k"),
        (MatmulShape(32, 16, 48), DType.NVFP4, "multiples of 32 along k"),
        (MatmulShape(32, 32, 32, accumulated=DType.FP32), DType.MXFP8, "no product in mxfp8 that is accumulated"),
        (MatmulShape(32, 32, 32, batch=2), DType.NVFP4, "no product of a batch in nvfp4"),
    ],
)
def test_products_that_pytorch_has_not_are_unsupported(shape: MatmulShape, dtype: DType, said: str) -> None:
    with pytest.raises(UnsupportedKernel, match=said):
        scaled.random_scaled_matmul(shape, dtype, META)


def _asked(monkeypatch: pytest.MonkeyPatch, shape: MatmulShape, dtype: DType) -> SimpleNamespace:
    """What scales of operands are of, in which order they lie, and whether sums are fast."""
    seen: list[SimpleNamespace] = []

    def product(_a: Any, _b: Any, of_a: Any, a: Any, of_b: Any, b: Any, *order: Any, use_fast_accum: bool) -> None:
        seen.append(SimpleNamespace(of=(a.name, b.name), order=order, fast=use_fast_accum, scales=(of_a, of_b)))

    monkeypatch.setattr(scaled, "scaled_mm", product)
    scaled.random_scaled_matmul(shape, dtype, META)()
    return seen[0]


@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES)
def test_sums_are_fast_forward_and_with_scales_of_rows_always(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {
        matmul_layout
        for matmul_layout in MatmulLayout
        if _asked(monkeypatch, replace(SHAPE, operands=matmul_layout), dtype).fast
    }
    assert fast == {DType.FP8: {MatmulLayout.NT}, DType.FP8_ROWWISE: set(MatmulLayout)}.get(dtype, set())


def test_weights_have_square_blocks_and_a_weights_gradient_none(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {
        matmul_layout: _asked(monkeypatch, replace(SHAPE, operands=matmul_layout), DType.FP8_BLOCKWISE).of
        for matmul_layout in MatmulLayout
    }
    activations = "BlockWise1x128"
    assert of[MatmulLayout.TN] == (activations, activations)
    assert of[MatmulLayout.NT] == of[MatmulLayout.NN] == (activations, "BlockWise128x128")


@pytest.mark.parametrize(("dtype", "shared"), [(DType.MXFP8, 32), (DType.NVFP4, 16)])
def test_scales_of_blocks_lie_in_tiles_but_on_amds_gpus(
    dtype: DType, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rows of 640: 256 rows of 20 blocks of 32, or of 40 of 16; without tiles 200."""
    found = _asked(monkeypatch, SHAPE, dtype)
    assert found.scales[0].numel() == 256 * 640 // shared
    assert {item.name for item in found.order} == {"SWIZZLE_32_4_4"}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr("calibrate.devices.matmul_support._architecture", lambda _: "gfx950")
    found = _asked(monkeypatch, SHAPE, dtype)
    assert found.scales[0].numel() == 200 * 640 // shared
    assert {element.name for element in found.order} == {"NO_SWIZZLE"}


def test_numbers_of_four_bits_are_normal_ones_rounded() -> None:
    """Two in a byte, of sixteen the largest about six; the share of each value is that of a normal number."""
    bits = normal_tensor(CPU, DType.NVFP4, 1024, 1024).view(torch.uint8).flatten().int()
    assert bits.numel() == 1024 * 512
    values = torch.differentiable((*E2M1, *(-item for item in E2M1)))
    numbers = values[torch.cat((bits % 16, bits // 16))]
    assert numbers.mean().item() == pytest.approx(0.0, abs=0.02)
    assert numbers.std().item() == pytest.approx(3.0, rel=0.1)
    over = (numbers.abs() >= 2.0).float().mean().item()  # of what was beyond 1.75 / 3
    assert over == pytest.approx(
        2.0 * (1.0 - torch.distributions.Normal(0.0, 1.0).cdf(torch.differentiable(1.75 / 3)).item()), rel=0.02
    )
