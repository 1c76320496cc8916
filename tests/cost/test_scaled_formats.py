"""Matmuls and casts in scaled formats: closed forms for an accelerator of known constants, and independence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.matmul_tiles import alignment_rate
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.alignment import KernelAlignment
from clustersim.hardware.efficiency import GroupedGemmEfficiency
from clustersim.model.grouped_linear import GroupedLinear
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape
from clustersim.model.overheads import Grouping
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, mixed_precision
from clustersim.model.quantization import quantize_kernels
from tests.conftest import examples

TILE, UNITS, K = 128, 10, 4096
H100 = load_accelerator("h100-sxm-80gb")


def accelerator_with(**scaled: float) -> Accelerator:
    """One tile and no edge: 10 units, 1 TFLOP/s in all formats at a share of one half, except blockwise FP8."""
    matmul = replace(H100.efficiency.matmul.with_uniform_fraction(0.5), prologue=0.0, edge=0.0, tiles=((TILE, TILE),))
    plain = replace(matmul, prologue_by_format={}, kernel_latency_by_format={})
    matmul_efficiency = plain.with_peak_fraction(DType.FP8_BLOCKWISE, scaled.get("share", 0.5))
    matmul_efficiency = matmul_efficiency.with_format_overheads(
        DType.FP8_BLOCKWISE, scaled.get("prologue"), scaled.get("start")
    )
    efficiency = replace(
        H100.efficiency, matmul=matmul_efficiency, kernel_latency=0.0, launch_interval=0.0, grouped_gemm=None
    )
    return replace(
        H100,
        peak=dict.fromkeys((DType.BF16, DType.FP8, DType.FP32), 1e12),
        compute_units=UNITS,
        memory_bandwidth=1e15,
        efficiency=efficiency,
    )


def matmul_kernel(dtype: DType, tiles: int = UNITS, k: int = K) -> Kernel:
    shape = MatmulShape(TILE, TILE * tiles, k)
    return Kernel("x", KernelKind.MATMUL, dtype, 2.0 * shape.m * shape.n * k, 1.0, shape)


def roofline_seconds(kernel: Kernel, accelerator: Accelerator) -> float:
    return Roofline(accelerator).time_kernel(kernel).seconds


def test_prologue_and_start_apply_to_their_format_only() -> None:
    """One wave: 2 x 128 x 128 x (4096 + 256) FLOP of ten units at half of 1 TFLOP/s, and 2 us."""
    accelerator = accelerator_with(prologue=256.0, start=2e-6)
    wave = 2.0 * TILE * TILE * UNITS / 0.5e12
    assert roofline_seconds(matmul_kernel(DType.FP8_BLOCKWISE), accelerator) == pytest.approx(wave * (K + 256) + 2e-6)
    for dtype in (DType.FP8, DType.FP8_ROWWISE, DType.BF16):
        assert roofline_seconds(matmul_kernel(dtype), accelerator) == pytest.approx(wave * K)


@given(st.floats(0.1, 1.0), st.integers(0, 512), st.floats(0.0, 1e-5))
@examples(50)
def test_constants_of_scaled_formats_do_not_affect_others(share: float, prologue: int, start: float) -> None:
    matmul = H100.efficiency.matmul
    for dtype in LOW_PRECISION_DTYPES:
        matmul = matmul.with_peak_fraction(dtype, share).with_format_overheads(dtype, float(prologue), start)
    grouped = replace(
        H100.efficiency.expert_matmul, kernel_peak_fraction_by_format=dict.fromkeys(LOW_PRECISION_DTYPES, share)
    )
    changed = replace(
        H100,
        efficiency=replace(H100.efficiency, matmul=matmul, grouped_gemm=grouped, quantization_bandwidth_ratio=share),
    )
    linear = GroupedLinear("up", 8, 4096, 1024, 2048, MatmulFormats.uniform(DType.BF16), grouping=Grouping.KERNEL)
    kernels = [matmul_kernel(DType.BF16), matmul_kernel(DType.FP32), *linear.forward(mixed_precision())]
    assert [Roofline(H100).time_kernel(kernel) for kernel in kernels] == [
        Roofline(changed).time_kernel(item) for item in kernels
    ]


def test_grouped_gemms_keep_the_dense_format_ratio_unless_calibrated() -> None:
    """Two thirds of the BF16 rate in dense matmuls, so in grouped ones; or 0.4 of the peak, of one kernel."""
    base = accelerator_with(share=1 / 3)
    grouped = GroupedGemmEfficiency(0.25, 0.25, 0.0, 0.0, 0.0)
    uncalibrated = replace(base, efficiency=replace(base.efficiency, grouped_gemm=grouped))
    with_share = replace(grouped, kernel_peak_fraction_by_format={DType.FP8_BLOCKWISE: 0.4})
    calibrated = replace(base, efficiency=replace(base.efficiency, grouped_gemm=with_share))

    def grouped_seconds(accelerator: Accelerator, dtype: DType, grouping: Grouping) -> float:
        formats = MatmulFormats.uniform(dtype)
        linear = GroupedLinear("up", 2, 2 * TILE, K, TILE * UNITS, formats, grouping=grouping)
        return roofline_seconds(linear.forward(mixed_precision())[0], accelerator)

    for grouping in (Grouping.STREAMS, Grouping.KERNEL):
        bf16_seconds = grouped_seconds(uncalibrated, DType.BF16, grouping)
        assert grouped_seconds(uncalibrated, DType.FP8_BLOCKWISE, grouping) == pytest.approx(
            1.5 * bf16_seconds, rel=1e-3
        )
        assert grouped_seconds(calibrated, DType.BF16, grouping) == bf16_seconds
    assert grouped_seconds(calibrated, DType.FP8_BLOCKWISE, Grouping.STREAMS) == grouped_seconds(
        uncalibrated, DType.FP8_BLOCKWISE, Grouping.STREAMS
    )
    calibrated_seconds = grouped_seconds(calibrated, DType.FP8_BLOCKWISE, Grouping.KERNEL)
    assert calibrated_seconds == pytest.approx(
        grouped_seconds(uncalibrated, DType.BF16, Grouping.KERNEL) * 0.25 / 0.4, rel=1e-3
    )


def test_a_cast_takes_bytes_over_its_share_of_memory_bandwidth() -> None:
    """4096 x 8192 elements, read in BF16 and written once in FP8: 3 bytes of each."""
    accelerator = replace(
        H100,
        efficiency=replace(
            H100.efficiency,
            quantization_bandwidth_ratio=0.5,
            memory_bandwidth_fraction=0.8,
            kernel_latency=0.0,
            launch_interval=0.0,
        ),
    )
    (cast,) = quantize_kernels(
        "x", OperandCast(reads=1, copies=1), (4096, 8192), high_precision=DType.BF16, low_precision=DType.FP8
    )
    expected = 3 * 4096 * 8192 / (H100.memory_bandwidth * 0.8 * 0.5)
    assert roofline_seconds(cast, accelerator) == pytest.approx(expected)
    norm = replace(cast, kind=KernelKind.NORM, shape=None)
    assert roofline_seconds(norm, accelerator) == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("dtype", "k", "aligned"),
    [
        (DType.MXFP8, 11008, True),  # 11,008 bytes of elements, whose 344 scales are stored separately
        (DType.FP8, 11008 + 8, False),
        (DType.NVFP4, 11008 + 16, False),
        (DType.NVFP4, 11008 + 32, True),
        (DType.BF16, 11008 + 8, True),
    ],
)
def test_alignment_ignores_the_scales(dtype: DType, k: int, aligned: bool) -> None:
    accelerator = replace(H100, alignment=KernelAlignment(unaligned_rate=0.5, batched_unaligned_rate=0.5))
    assert alignment_rate(accelerator, dtype, MatmulShape(256, 264, k)) == (1.0 if aligned else 0.5)
