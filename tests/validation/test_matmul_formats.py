"""Published rows in formats with scales: which format they are, and what is timed with them."""

from pathlib import Path

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.error_statistics import statistics_by_grouping, summarize_comparisons
from clustersim.validation.grouped_gemm import grouped_gemm_kernels
from clustersim.validation.kernels import compare_kernels, read_kernels, timed_kernels, timed_matmuls
from clustersim.validation.matmul_formats import operand_dtype, timed_casts
from tests.validation.csv_tables import write_table
from tests.validation.test_kernels import GEMM

M, N, K = 15872, 12288, 4096
GEMM_SET = GEMM | {
    **{"op": "gemm_set", "gpu": "b300", "m": str(M), "n": "", "k": "", "direction": "fwd"},
    "notes": "four linear layers (hidden 4096, ffn 16384, 15872 tokens) in sum; pre-quantised, kernel only",
}


def kernel_case(folder: Path, **change: str) -> ValidationCase:
    (read_case,) = read_kernels(write_table(folder / "mine.csv", GEMM | {"notes": ""} | change))
    return read_case


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp8", DType.FP8),
        ("fp8 current scaling", DType.FP8),
        ("fp8 delayed scaling", DType.FP8),
        ("fp8-rowwise -> bf16", DType.FP8_ROWWISE),
        ("fp8 (1x128/128x128 scaling) -> bf16", DType.FP8_BLOCKWISE),
        ("fp8 blockwise", DType.FP8_BLOCKWISE),
        ("mxfp8", DType.MXFP8),
        ("nvfp4", DType.NVFP4),
        ("bf16 -> fp32", DType.BF16),
    ],
)
def test_formats_are_read_from_recipes_and_block_sizes(tmp_path: Path, precision: str, dtype: DType) -> None:
    assert operand_dtype(kernel_case(tmp_path, dtype=precision)) is dtype
    (product, *_) = timed_matmuls(kernel_case(tmp_path, dtype=precision))
    assert product.dtype is dtype


def test_deepgemms_fp8_is_in_blocks_and_one_kernel_for_all_experts(tmp_path: Path) -> None:
    row = kernel_case(
        tmp_path, op="grouped_gemm", groups="4", dtype="fp8 -> bf16", implementation="DeepGEMM contiguous"
    )
    assert operand_dtype(row) is DType.FP8_BLOCKWISE
    (kernel,) = grouped_gemm_kernels(row)
    assert (kernel.kind, kernel.dtype) == (KernelKind.GROUPED_MATMUL, DType.FP8_BLOCKWISE)
    assert kernel.shape == MatmulShape(8192, 8192, 8192, 4)


def total_bytes(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.bytes for kernel in kernels)


@pytest.mark.parametrize(
    ("dtype", "gpu", "of_input", "of_weight"),
    [
        ("fp8 delayed scaling", "b300", 2 + 1, 2 + 1),  # read, written: operands are read either way
        ("fp8 delayed scaling", "h200-sxm-141gb", 2 + 2, 2 + 1),  # and transposed, of the input
        ("fp8 current scaling", "b300", 2 + 2 + 1, 2 + 2 + 1),  # the largest element first
        ("fp8 current scaling", "h200-sxm-141gb", 2 + 2 + 2, 2 + 2 + 1),
        ("mxfp8", "b300", 2 + 2 * 33 / 32, 2 + 33 / 32),  # a byte for 32, both ways
        ("fp8 blockwise", "h200-sxm-141gb", 2 + 2 * 132 / 128, 2 + 132 / 128),  # four bytes for 128
        ("nvfp4", "b300", 2 + 2 + 2 * 9 / 16, 2 + 2 + 9 / 16),  # half a byte, and one for 16
    ],
)
def test_timed_casts_are_memory_bound(tmp_path: Path, dtype: str, gpu: str, of_input: float, of_weight: float) -> None:
    row = kernel_case(tmp_path, dtype=dtype, gpu=gpu, notes="QKV; autocast, with quantisation")
    casts = timed_casts(row, MatmulShape(M, N, K))
    assert total_bytes(casts) == pytest.approx(M * K * of_input + N * K * of_weight)
    assert all(
        isinstance(cast.shape, MemoryBoundShape) and cast.shape.routine is MemoryBoundOp.QUANTIZE for cast in casts
    )


def test_prequantized_operands_are_not_cast_except_delayed_scaling(tmp_path: Path) -> None:
    shape, notes = MatmulShape(M, N, K), "pre-quantised, kernel only (delayed scaling still quantises)"
    for dtype in ("bf16", "fp8 current scaling", "mxfp8", "nvfp4"):
        assert timed_casts(kernel_case(tmp_path, dtype=dtype, gpu="b300", notes=notes), shape) == ()
    assert timed_casts(kernel_case(tmp_path, dtype="fp8 delayed scaling", gpu="b300", notes=notes), shape)
    assert (
        timed_casts(kernel_case(tmp_path, dtype="bf16", gpu="b300", notes="autocast, with quantisation"), shape) == ()
    )


def test_casts_of_an_unknown_recipe_are_not_guessed(tmp_path: Path) -> None:
    row = kernel_case(tmp_path, dtype="fp8", notes="with quantisation")
    with pytest.raises(CannotPredictError, match="how operands were cast to fp8 is not stated"):
        timed_kernels(row)


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_a_gemm_set_is_a_layer_s_matmuls_of_one_direction(tmp_path: Path, direction: str) -> None:
    """QKV, attention's output, and two of an MLP without a gate: 2 x 15872 x 4096 x 49152 FLOP in each direction."""
    (row,) = read_kernels(write_table(tmp_path / "mine.csv", GEMM_SET | {"direction": direction, "dtype": "mxfp8"}))
    matmuls = timed_kernels(row)
    assert len(matmuls) == 4
    assert sum(product.flops for product in matmuls) == 2 * 15872 * 4096 * 49152
    shapes = [kernel.shape for kernel in matmuls if isinstance(kernel.shape, MatmulShape)]
    summed = {"fwd": [4096, 4096, 4096, 16384], "dgrad": [12288, 4096, 16384, 4096], "wgrad": [15872] * 4}
    assert [shape.k for shape in shapes] == summed[direction]


def test_torchao_grouped_gemms_cast_both_operands(tmp_path: Path) -> None:
    """Of 1024 rows of 4 experts in all, 256 inputs, 512 outputs: input, output and each weight twice, 3 1/32 bytes."""
    row = kernel_case(
        tmp_path,
        **{"op": "grouped_gemm", "gpu": "b200", "groups": "4", "m": "1024", "n": "512", "k": "256"},
        **{"direction": "fwd+bwd", "dtype": "mxfp8", "implementation": "torchao", "flop_convention": "6mnk"},
        notes="forward and backward; with quantisation and scale layout",
    )
    casts = [
        grouped_gemm_kernel
        for grouped_gemm_kernel in grouped_gemm_kernels(row)
        if grouped_gemm_kernel.kind is KernelKind.CAST
    ]
    elements = 2 * (1024 * 256 + 1024 * 512 + 4 * 256 * 512)
    assert total_bytes(tuple(casts)) == pytest.approx(elements * (2 + 33 / 32))


def test_low_precision_matmuls_are_within_ten_percent() -> None:
    gemm_cases = [read_kernel for read_kernel in read_kernels() if read_kernel.text("op") in ("gemm", "gemm_set")]
    statistics = statistics_by_grouping(compare_kernels(gemm_cases))["format"]
    for dtype in ("fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"):
        assert statistics[dtype].mape is not None
        assert statistics[dtype].mape <= 0.10, dtype


def test_transformer_engine_timings_are_within_eight_percent() -> None:
    profiled_cases = [
        read_kernel for read_kernel in read_kernels() if read_kernel.text("source") == "te-gemm-profiling"
    ]
    statistics = summarize_comparisons(
        compare_kernels(
            [profiled_case for profiled_case in profiled_cases if operand_dtype(profiled_case) is not DType.BF16]
        )
    )
    assert statistics.n == 37
    assert statistics.mape is not None
    assert statistics.mape <= 0.08
