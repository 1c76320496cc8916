"""Kernels of published tables and of users' own: predicted, or skipped with a reason."""

from pathlib import Path

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import MatmulLayout
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import summarize_comparisons
from clustersim.validation.kernels import (
    case_attention,
    compare_kernels,
    measured_seconds,
    read_kernels,
    timed_kernels,
    timed_matmul,
)
from tests.validation.csv_tables import write_table

GEMM = {
    **{"op": "gemm", "gpu": "h100-sxm-80gb", "m": "8192", "n": "8192", "k": "8192", "batch": "1"},
    **{"seq": "", "heads": "", "kv_heads": "", "head_dim": "", "v_head_dim": "", "causal": "", "direction": ""},
    **{"dtype": "bf16", "layout": "TN", "implementation": "cuBLAS", "tflops": "", "time_us": "1600"},
    **{"flop_convention": "2mnk", "source": "me"},
}
ATTENTION = GEMM | {
    **{"op": "attention", "m": "", "n": "", "k": "", "batch": "2", "seq": "4096", "heads": "32", "head_dim": "128"},
    **{"causal": "yes", "direction": "fwd", "implementation": "FA3", "layout": "", "tflops": "500", "time_us": ""},
    "flop_convention": "4bhs^2d fwd, x2.5 bwd, halved when causal",
}


def compare_table(folder: Path, *rows: dict[str, str]) -> list[CaseComparison]:
    return compare_kernels(read_kernels(write_table(folder / "mine.csv", *rows)))


@pytest.fixture(scope="module")
def packaged_comparisons() -> list[CaseComparison]:
    return compare_kernels(read_kernels())


def test_packaged_kernels_are_predicted_within_eleven_percent(packaged_comparisons: list[CaseComparison]) -> None:
    statistics = summarize_comparisons(packaged_comparisons)
    assert statistics.mape is not None
    assert statistics.mape <= 0.11
    assert statistics.n >= 1000


def test_every_packaged_row_is_predicted_or_has_a_reason(packaged_comparisons: list[CaseComparison]) -> None:
    assert len(packaged_comparisons) == len(read_kernels())
    assert all(
        (case_comparison.predicted is None) == bool(case_comparison.skip_reason)
        for case_comparison in packaged_comparisons
    )
    assert not any(item.skip_reason for item in packaged_comparisons if item.is_expressible)


def test_upper_bounds_are_not_compared(packaged_comparisons: list[CaseComparison]) -> None:
    bounds = [index for index, case in enumerate(read_kernels()) if "best shape" in case.text("implementation")]
    assert bounds
    assert all(packaged_comparisons[index].predicted is None for index in bounds)


def test_a_matmul_is_predicted_by_the_roofline(tmp_path: Path) -> None:
    case, accumulated = read_kernels(
        write_table(tmp_path / "t.csv", GEMM, GEMM | {"dtype": "bf16 -> fp32", "layout": "NT"})
    )
    kernel = timed_matmul(case)
    assert kernel.flops == 2 * 8192**3
    assert kernel.bytes == 3 * 8192**2 * 2
    assert (
        compare_kernels([case])[0].predicted == Roofline(load_accelerator("h100-sxm-80gb")).time_kernel(kernel).seconds
    )
    assert timed_matmul(accumulated).bytes == 2 * 8192**2 * 2 + 2 * 8192**2 * 4, "an FP32 result is read and written"
    assert (timed_matmul(accumulated).shape.operands, timed_matmul(case).shape.operands) == (
        MatmulLayout.TN,
        MatmulLayout.NT,
    )  # type: ignore[union-attr]


def test_a_batched_matmul_is_one_kernel(tmp_path: Path) -> None:
    single, batched = map(timed_matmul, read_kernels(write_table(tmp_path / "t.csv", GEMM, GEMM | {"batch": "4"})))
    assert (batched.flops, batched.bytes) == (4 * single.flops, 4 * single.bytes)


def test_a_rate_is_converted_by_its_flop_convention(tmp_path: Path) -> None:
    """4 b h s^2 d FLOP of 2 sequences, half of them under a causal mask: 0.275 TFLOP at 500 TFLOP/s, 0.55 ms."""
    halved, full_matrix = compare_table(
        tmp_path, ATTENTION, ATTENTION | {"flop_convention": "full matrix (no causal halving)"}
    )
    flops = 4 * 2 * 32 * 4096**2 * 128
    assert halved.measured == pytest.approx(flops / 2 / 500e12)
    assert full_matrix.measured == pytest.approx(flops / 500e12)
    (gemm,) = compare_table(tmp_path, GEMM | {"time_us": "", "tflops": "700"})
    assert gemm.measured == pytest.approx(2 * 8192**3 / 700e12)


def test_forward_and_backward_add_up(tmp_path: Path) -> None:
    forward, backward, both = compare_table(
        tmp_path, ATTENTION, ATTENTION | {"direction": "bwd"}, ATTENTION | {"direction": "fwd+bwd"}
    )
    assert forward.predicted is not None
    assert backward.predicted is not None
    assert both.predicted == pytest.approx(forward.predicted + backward.predicted)


def test_backward_is_five_products_of_forwards_two(tmp_path: Path) -> None:
    (case,) = read_kernels(write_table(tmp_path / "t.csv", ATTENTION))
    forward, backward = case_attention(case, backward=False), case_attention(case, backward=True)
    assert backward.flops == 2.5 * forward.flops
    assert measured_seconds(case, [backward]) == pytest.approx(2.5 * measured_seconds(case, [forward]))
    assert forward.dtype is DType.BF16


def test_packaged_accelerator_names_are_accepted(tmp_path: Path) -> None:
    table_name, packaged_name = compare_table(tmp_path, GEMM | {"gpu": "b200"}, GEMM | {"gpu": "b200-sxm-180gb"})
    assert table_name.predicted == packaged_name.predicted
    assert table_name.case_id == "gemm-b200-8192x8192x8192-bf16-TN-cuBLAS"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": "grouped_gemm", "direction": ""}, "direction is not stated"),
        ({"op": "grouped_gemm", "direction": "fwd"}, "groups is not stated"),
        ({"op": "grouped_gemm", "direction": "fwd", "implementation": "DeepSeek"}, "not modelled"),
        ({"op": "gemm_set", "direction": "fwd"}, "sizes of the layer or its direction are not stated"),
        ({"op": "cast", "dtype": "bf16 -> fp32"}, "no cast that is modelled"),
        ({"op": "softmax"}, "op softmax: not modelled"),
        ({"gpu": "gaudi2"}, "gpu gaudi2: there is no such accelerator"),
        ({"gpu": ""}, "gpu is not stated"),
        ({"m": "many"}, "line 2: m 'many' is not a number above 0"),
        ({"k": ""}, "line 2: k is not stated"),
        ({"n": "0.5"}, "line 2: n '0.5' is not a whole number"),
        ({"time_us": "-3"}, "line 2: time_us '-3' is not a number above 0"),
        ({"dtype": "int4"}, "dtype int4: not modelled"),
        ({"dtype": "nvfp4"}, "h100-sxm-80gb has no nvfp4 peak; it computes in"),
        ({"layout": "XY"}, "line 2: layout XY is none of TN, NN, NT"),
        ({"implementation": "best shape of a search"}, "upper bound"),
    ],
)
def test_an_unpredictable_row_has_a_reason(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    bad, good = compare_table(tmp_path, GEMM | change, GEMM)
    assert reason in (bad.skip_reason or "")
    assert not bad.is_expressible
    assert good.predicted is not None


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "standard attention (PyTorch)"},
        {"implementation": "FA3", "gpu": "b200"},
        {"dtype": "fp8"},
        {"direction": ""},
    ],
)
def test_unmodelled_attention_is_not_compared(tmp_path: Path, change: dict[str, str]) -> None:
    bad, good = compare_table(tmp_path, ATTENTION | change, ATTENTION)
    assert bad.skip_reason
    assert not bad.is_expressible
    assert good.predicted is not None


def test_attention_is_predicted_for_the_library_that_was_timed(tmp_path: Path) -> None:
    """FlashAttention-2 takes longer than cuDNN on H100."""
    fastest, older = compare_table(tmp_path, ATTENTION, ATTENTION | {"implementation": "FA2"})
    assert fastest.predicted is not None
    assert older.predicted is not None
    assert older.predicted > 1.3 * fastest.predicted


def test_a_table_without_a_required_column_is_rejected(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {key: text for key, text in GEMM.items() if key not in ("k", "dtype")})
    with pytest.raises(InputError, match="missing columns k, dtype"):
        read_kernels(path)


def test_backward_of_a_matmul_is_the_gradients_of_both_operands(tmp_path: Path) -> None:
    """Gradients dX [m, k] = dC [m, n] W [n, k] and dW [n, k] = dC^T [n, m] X [m, k]: 4mnk FLOP, operands read twice."""
    sizes = {"m": "4096", "n": "2048", "k": "1024"}
    row = GEMM | sizes | {"direction": "bwd", "layout": "", "time_us": "", "tflops": "500", "flop_convention": "4mnk"}
    (case,) = read_kernels(write_table(tmp_path / "t.csv", row))
    input_gradient, weight_gradient = timed_kernels(case)
    m, n, k = 4096, 2048, 1024
    shapes = [(kernel.shape.m, kernel.shape.n, kernel.shape.k) for kernel in (input_gradient, weight_gradient)]  # type: ignore[union-attr]
    assert shapes == [(m, k, n), (k, n, m)]
    assert input_gradient.flops + weight_gradient.flops == 4 * m * n * k
    assert input_gradient.bytes == weight_gradient.bytes == 2 * (m * n + n * k + m * k)
    (comparison,) = compare_kernels([case])
    assert comparison.measured == pytest.approx(4 * m * n * k / 500e12)
