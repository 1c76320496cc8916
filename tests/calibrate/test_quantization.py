"""Casts into formats with scales: the values equal the operand, in as many bytes as the model counts."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.calibration_record import family_of, signature_of
from clustersim.cost.kernel_features import extract_features
from clustersim.model.kernels import Kernel, MemoryBoundShape
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels, transpose_kernel

torch = pytest.importorskip("torch")
quantization = pytest.importorskip("calibrate.kernels.pytorch_ops.quantization")
from calibrate.kernels import pytorch_ops, quantization_formulas  # noqa: E402 - after torch is known to be there
from calibrate.kernels.formulas import UnsupportedKernel, _copy_function  # noqa: E402

CPU_DEVICE = torch.device("cpu")
SIZES = 256, 384
SUPPORTED_FORMATS = [item for item in LOW_PRECISION_DTYPES if item is not DType.NVFP4]
SCALE_BLOCKS = {DType.FP8: None, DType.FP8_ROWWISE: 384, DType.FP8_BLOCKWISE: 128, DType.MXFP8: 32}


def _cast(dtype: DType, reads: int = 1, copies: int = 2, sizes: tuple[int, int] = SIZES) -> Kernel:
    (kernel,) = quantize_kernels(
        "test", OperandCast(reads, copies), sizes, high_precision=DType.BF16, low_precision=dtype
    )
    return kernel


def _select_formula(kernel: Kernel) -> tuple[quantization.Formula, tuple[torch.Tensor, ...]]:
    assert isinstance(kernel.shape, MemoryBoundShape)
    selected: tuple[quantization.Formula, tuple[torch.Tensor, ...]] = quantization.select_formula(
        kernel.shape, kernel.dtype, CPU_DEVICE
    )
    return selected


def _run_formula(kernel: Kernel) -> tuple[torch.Tensor, quantization_formulas.QuantizedTensors]:
    """The operand, and its quantized copies."""
    formula, operands = _select_formula(kernel)
    return operands[0], formula(*operands)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("narrow", SUPPORTED_FORMATS)
def test_written_bytes_are_the_counted_ones(narrow: DType, copies: int) -> None:
    """Values and block scales; scales of rows (1 in 256) and of the tensor are counted as nothing."""
    kernel = _cast(narrow, copies=copies)
    written_bytes = sum(item.nbytes for item in _run_formula(kernel)[1])
    assert written_bytes == pytest.approx(copies * SIZES[0] * SIZES[1] * narrow.bytes, rel=4 / 256)
    assert kernel.bytes == SIZES[0] * SIZES[1] * (2 + copies * narrow.bytes)
    assert pytorch_ops.allocated_bytes(kernel, torch.device("cuda")) == kernel.bytes


@pytest.mark.parametrize("narrow", [element for element in SUPPORTED_FORMATS if element is not DType.FP8])
def test_rowwise_and_columnwise_copies_equal_the_operand(narrow: DType) -> None:
    """Scaled values have a relative error of at most 1/16.

    Values far below their block's maximum a small absolute one.
    """
    x, (row_values, row_scales, column_values, column_scales) = _run_formula(
        _cast(narrow, reads=3 if narrow is DType.FP8_ROWWISE else 1)
    )
    for expected, values, scales in ((x, row_values, row_scales), (x.t(), column_values, column_scales)):
        assert values.shape == expected.shape and values.is_contiguous()
        fp32_scales = torch.exp2(scales.float() - 127) if narrow is DType.MXFP8 else scales
        expanded_scales = torch.repeat_interleave(fp32_scales, expected.shape[1] // fp32_scales.shape[1], dim=1)
        assert torch.allclose(values.float() * expanded_scales, expected.float(), rtol=1 / 16, atol=0.01)
        assert values.float().abs().max() <= 448.0


def test_current_scaling_uses_the_tensor_maximum() -> None:
    x, (values, scale, transposed) = _run_formula(_cast(DType.FP8, reads=2))
    assert values.float().abs().max().item() == 448.0
    assert torch.allclose(values.float() / scale, x.float(), rtol=1 / 16, atol=0.001)
    assert torch.equal(transposed.float(), values.t().float()) and transposed.is_contiguous()


def test_zeros_are_quantized_to_zeros() -> None:
    zeros, like = torch.zeros(SIZES), torch.empty(0, dtype=torch.float8_e4m3fn)
    for formula in (
        quantization_formulas.current_scaling,
        quantization_formulas.rowwise_and_columnwise,
        quantization_formulas.blockwise_transposed,
        quantization_formulas.mx_scaling_transposed,
    ):
        assert float(formula(zeros, like)[0].float().abs().max()) == 0.0


@pytest.mark.parametrize(
    ("kernel", "formula"),
    [
        (_cast(DType.FP8, reads=1, copies=1), quantization_formulas.delayed_scaling),
        (_cast(DType.FP8, reads=1), quantization_formulas.delayed_scaling_transposed),
        (_cast(DType.FP8, reads=2, copies=1), quantization_formulas.current_scaling),
        (
            _cast(DType.FP8, reads=0, copies=1),
            quantization_formulas.transpose_copy,
        ),  # a norm has written the first copy
        (_cast(DType.FP8_ROWWISE, reads=1, copies=1), quantization_formulas.rowwise),
        (_cast(DType.FP8_ROWWISE, reads=2, copies=1), quantization_formulas.columnwise),
        (_cast(DType.FP8_ROWWISE, reads=3), quantization_formulas.rowwise_and_columnwise),
        (transpose_kernel("test", SIZES, DType.MXFP8), quantization_formulas.transpose_copy),
    ],
)
def test_formula_is_selected_by_the_number_of_reads(kernel: Kernel, formula: quantization.Formula) -> None:
    assert _select_formula(kernel)[0] is formula


def test_read_counts_distinguish_kernel_signatures() -> None:
    once, twice = (_cast(DType.FP8, reads=reads) for reads in (1, 2))
    signatures = [signature_of(kernel) for kernel in (once, twice, _cast(DType.MXFP8))]
    assert None not in signatures and len(set(signatures)) == 3
    assert len({extract_features(item).comparable_key for item in signatures if item is not None}) == 3
    assert [family_of(element) for element in signatures if element is not None] == [
        "quantize fused bf16 fp8",
        "quantize fused bf16 fp8",
        "quantize fused bf16 mxfp8",
    ]


def test_loaded_rank_keeps_the_number_of_reads() -> None:
    loaded = _cast(DType.FP8, reads=2).scale_rows(1.5)
    assert isinstance(loaded.shape, MemoryBoundShape)
    assert (loaded.shape.table, loaded.shape.rows) == (2, 384)


def test_weights_of_a_step_are_cast_as_matrices() -> None:
    """They are counted as one column of all elements."""
    x, _ = _run_formula(_cast(DType.MXFP8, sizes=(96 * 4096, 1)))
    assert x.shape == (96, 4096)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_cast(DType.NVFP4, reads=2), "no cast to nvfp4"),
        (transpose_kernel("test", SIZES, DType.NVFP4), "no cast to nvfp4"),
        (_cast(DType.MXFP8, sizes=(256, 48)), "mxfp8 shares scales in blocks of 32, which 256 x 48"),
        (_cast(DType.FP8_BLOCKWISE, sizes=(64, 256)), "fp8-blockwise shares scales in blocks of 128"),
    ],
)
def test_casts_that_pytorch_lacks_are_unsupported(kernel: Kernel, message: str) -> None:
    with pytest.raises(UnsupportedKernel, match=message):
        _select_formula(kernel)


def test_rowwise_only_casts_need_no_full_column_blocks() -> None:
    kernel = _cast(DType.FP8_BLOCKWISE, copies=1, sizes=(64, 256))
    assert _select_formula(replace(kernel))[0] is quantization_formulas.blockwise


def test_fused_casts_are_unsupported_on_a_cpu() -> None:
    with pytest.raises(UnsupportedKernel, match="quantize: PyTorch has no fused kernel for it on a CPU"):
        pytorch_ops.prepare_kernel(_cast(DType.FP8), CPU_DEVICE)


@pytest.mark.parametrize(
    "formula",
    [
        quantization_formulas.current_scaling_transposed,
        quantization_formulas.rowwise_and_columnwise,
        quantization_formulas.blockwise_transposed,
        quantization_formulas.mx_scaling_transposed,
    ],
)
def test_casts_compile_without_graph_breaks(formula: quantization.Formula) -> None:
    """As on a GPU, except for the kernels: PyTorch traces the formula without a break, with the same strides."""
    x, like = torch.randn(SIZES).bfloat16(), torch.empty(0, dtype=torch.float8_e4m3fn)
    run = torch.compile(_copy_function(formula), dynamic=False, fullgraph=True, backend="aot_eager")
    for compiled, expected in zip(run(x, like), formula(x, like), strict=True):
        assert compiled.stride() == expected.stride()
        assert torch.equal(compiled.float(), expected.float())
