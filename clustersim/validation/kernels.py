"""Do predicted kernels take as long as published ones took?

A row is one MoE layer (`moe_layer_benchmark`), one matmul or its gradients, the matmuls of a layer's linear
layers (with a recipe's casts, if they were timed with them: `matmul_formats`), one cast, one flash attention
kernel, one grouped GEMM or one operator of linear attention (`scan_kernels`). Its measured time is the printed one,
or the one that the printed rate implies with FLOP counted as `flop_convention` says. The prediction is the
accelerator's roofline model (`cost.roofline`), of attention that of the library that was timed. The best shape
found by a search is an upper bound and is skipped.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.roofline import Roofline
from clustersim.model.attention import AttentionCore
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.newton_schulz import product_kernel, shared_iteration, update_kernels
from clustersim.model.optimizers import Muon
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.model.training import AttentionBackend
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.validation.accelerator_lookup import case_accelerator
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import group_by
from clustersim.validation.grouped_gemm import grouped_gemm_kernels
from clustersim.validation.matmul_formats import operand_dtype, result_format, timed_casts
from clustersim.validation.moe_layer_benchmark import moe_layer_breakdown
from clustersim.validation.scan_kernels import SCAN_OPS, timed_scan_kernels

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "kernels.csv"
REQUIRED_COLUMNS: Final = (
    *(
        "op",
        "gpu",
        "m",
        "n",
        "k",
        "batch",
        "seq",
        "heads",
        "head_dim",
        "causal",
        "direction",
        "dtype",
        "layout",
    ),
    *("tflops", "time_us", "flop_convention", "source"),
)
BEST_OF_SEARCH: Final = "best shape of a search"
# cuBLAS names operands in column-major order: its TN is a linear layer's forward, the default of rows without.
_MATMUL_LAYOUTS: Final = {"TN": MatmulLayout.NT, "NN": MatmulLayout.NN, "NT": MatmulLayout.TN, "": MatmulLayout.NT}
_UNSUPPORTED_OPS: Final = {
    "attention_peak": "a peak that a text states, without its shape",
    "hbm_stream_triad": "a bandwidth, not a kernel's time",
    "transformer_layer": "a layer is many kernels; its step is among the steps",
}
_UNSUPPORTED_ATTENTION: Final = ("standard", "Triton", "no intra-warpgroup", "no warp specialisation")
_LIBRARY_OF_IMPLEMENTATION: Final = {
    **{"FA2": AttentionBackend.FLASH2, "flash_attention_2": AttentionBackend.FLASH2},
    **{"FA3": AttentionBackend.FLASH3, "FA3 full": AttentionBackend.FLASH3, "cuDNN": AttentionBackend.CUDNN},
    **{"FA4": AttentionBackend.FLASH4, "SDPA (cuDNN)": AttentionBackend.SDPA},
}
_ATTENTION_DTYPES: Final = {
    **{"bf16": DType.BF16, "fp16": DType.FP16, "fp16/bf16": DType.BF16},
    **{dtype.value: dtype for dtype in (DType.FP8, DType.MXFP8)},
}
_LAYER_SIZES_NOTE: Final = re.compile(r"hidden (\d+), ffn (\d+), (\d+) tokens")
_MNK_BY_DIRECTION: Final[Mapping[str, Callable[[int, int, int], tuple[int, int, int]]]] = {
    "fwd": lambda tokens, outputs, inputs: (tokens, outputs, inputs),
    "dgrad": lambda tokens, outputs, inputs: (tokens, inputs, outputs),
    "wgrad": lambda tokens, outputs, inputs: (inputs, outputs, tokens),
}
_BACKWARD_FLAGS: Final = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}


def read_kernels(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of kernels; a missing `case_id` is composed from the other cells."""
    return [_with_case_id(case) for case in read_cases(path, REQUIRED_COLUMNS)]


def compare_kernels(cases: Sequence[ValidationCase]) -> list[CaseComparison]:
    """Predict every case, in seconds."""
    rooflines = {
        key: _roofline(group_cases[0], key[1]) for key, group_cases in group_by(cases, _gpu_and_library).items()
    }
    return [_compare_case(case, rooflines[_gpu_and_library(case)]) for case in cases]


def attention_library(case: ValidationCase) -> AttentionBackend:
    """The library that a row times; the accelerator's fastest where the row does not say."""
    return _LIBRARY_OF_IMPLEMENTATION.get(case.text("implementation"), AttentionBackend.FLASH)


def timed_kernels(case: ValidationCase) -> tuple[Kernel, ...]:
    """The kernels that a row times, in order; raises CannotPredictError if they are not modelled."""
    op = case.text("op")
    if op in _UNSUPPORTED_OPS:
        raise CannotPredictError(_UNSUPPORTED_OPS[op], is_expressible=False)
    if case.text("implementation") == BEST_OF_SEARCH:
        raise CannotPredictError("the best shape of a search is an upper bound", is_expressible=False)
    if op in ("gemm", "gemm_set"):
        return tuple(kernel for matmul in timed_matmuls(case) for kernel in (matmul, *_matmul_casts(case, matmul)))
    if op == "cast":
        return (timed_cast(case),)
    if op == "newton_schulz":
        return _newton_schulz(case)
    if op == "grouped_gemm":
        return grouped_gemm_kernels(case)
    if op not in ("attention", *SCAN_OPS):
        raise CannotPredictError(f"op {op or 'is not stated'}: not modelled", is_expressible=False)
    if case.text("direction") not in _BACKWARD_FLAGS:
        raise CannotPredictError("direction is not stated", is_expressible=False)
    directions = _BACKWARD_FLAGS[case.text("direction")]
    if op in SCAN_OPS:
        return tuple(kernel for backward in directions for kernel in timed_scan_kernels(case, backward=backward))
    return tuple(case_attention(case, backward=backward) for backward in directions)


def _newton_schulz(case: ValidationCase) -> tuple[Kernel, ...]:
    """Five steps of Muon's iteration on a matrix of `m` x `n`, or on a batch of them."""
    matrix = WeightMatrix(case.positive_int("m"), case.positive_int("n"), case.positive_int("groups", 1))
    muon = Muon()
    iteration = shared_iteration(matrix, muon, 1)
    return (product_kernel(iteration, muon), *update_kernels(iteration, muon)) * muon.steps


def timed_matmuls(case: ValidationCase) -> tuple[Kernel, ...]:
    """The matmuls of a row, in order: one, both gradients of one, or those of linear layers in one direction."""
    if case.text("op") != "gemm":
        return tuple(_matmul(case, *sizes) for sizes in _layer_sizes(case))
    return _gradient_matmuls(case) if times_gradients(case) else (timed_matmul(case),)


def times_gradients(case: ValidationCase) -> bool:
    """Whether a row of a matmul times the gradients of both of its operands."""
    return case.text("direction") == "bwd"


def _gradient_matmuls(case: ValidationCase) -> tuple[Kernel, ...]:
    """The matmuls of the gradients of a linear layer's input and weights, as autograd runs them."""
    m, n, k = (case.positive_int(column) for column in ("m", "n", "k"))
    return tuple(
        _matmul(
            ValidationCase({**case.cells, "layout": layout}, case.line_number), *_MNK_BY_DIRECTION[direction](m, n, k)
        )
        for direction, layout in (("dgrad", "NN"), ("wgrad", "NT"))
    )


def timed_matmul(case: ValidationCase) -> Kernel:
    """The matmul of a row."""
    m, n, k = (case.positive_int(column) for column in ("m", "n", "k"))
    return _matmul(case, m, n, k)


def timed_cast(case: ValidationCase) -> Kernel:
    """The kernel that quantizes an `m` x `k` tensor to a scaled format; one copy is written."""
    format_name = result_format(case)
    if format_name not in {dtype.value for dtype in LOW_PRECISION_DTYPES}:
        raise CannotPredictError(
            f"dtype {case.text('dtype') or 'is not stated'}: no cast that is modelled", is_expressible=False
        )
    sizes = case.positive_int("m"), case.positive_int("k")
    (kernel,) = quantize_kernels(
        "cast", OperandCast(1, 1), sizes, high_precision=operand_dtype(case), low_precision=DType(format_name)
    )
    return kernel


def _matmul_casts(case: ValidationCase, matmul: Kernel) -> tuple[Kernel, ...]:
    return timed_casts(case, matmul.shape) if isinstance(matmul.shape, MatmulShape) else ()


def _layer_sizes(case: ValidationCase) -> list[tuple[int, int, int]]:
    """(m, n, k) of the linear layers of attention and an ungated MLP, with the sizes that the notes state."""
    match = _LAYER_SIZES_NOTE.search(case.text("notes"))
    if match is None or case.text("direction") not in _MNK_BY_DIRECTION:
        raise CannotPredictError("sizes of the layer or its direction are not stated", is_expressible=False)
    hidden, ffn, tokens = (int(size) for size in match.groups())
    to_mnk = _MNK_BY_DIRECTION[case.text("direction")]
    sizes = [(3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)]
    return [to_mnk(tokens, outputs, inputs) for outputs, inputs in sizes]


def _matmul(case: ValidationCase, m: int, n: int, k: int) -> Kernel:
    """A matmul; an FP32 result is a weight gradient, which is accumulated: read and written."""
    accumulation_dtype, dtype = DType.FP32 if result_format(case) == "fp32" else None, operand_dtype(case)
    shape = MatmulShape(m, n, k, operands=_matmul_layout(case), accumulated=accumulation_dtype)
    if case.positive_int("batch", 1) > 1:
        shape = replace(shape, batch=case.positive_int("batch"))
    result_bytes = 2 * accumulation_dtype.bytes if accumulation_dtype else DType.BF16.bytes
    bytes_moved = ((m + n) * k * dtype.bytes + m * n * result_bytes) * shape.batch
    return Kernel("matmul", KernelKind.MATMUL, dtype, 2.0 * m * n * k * shape.batch, float(bytes_moved), shape)


def case_attention(case: ValidationCase, *, backward: bool) -> Kernel:
    """The flash attention kernel of a row; its FLOP are those executed, half of the matrix with a causal mask."""
    _require_flash(case)
    heads, sequence = case.positive_int("heads"), case.positive_int("seq")
    shape = AttentionShape(
        batch=case.positive_int("batch", 1),
        query=sequence,
        key=sequence,
        heads=heads,
        kv_heads=case.positive_int("kv_heads", heads),
        head_dim=case.positive_int("head_dim"),
        causal=case.boolean("causal"),
        value_dim=_value_dim(case),
    )
    return timed_attention(shape, _ATTENTION_DTYPES[case.text("dtype")], backward=backward)


def _value_dim(case: ValidationCase) -> int | None:
    """The head dimension of values, if it differs from that of keys."""
    values = case.positive_int("v_head_dim", case.positive_int("head_dim"))
    return None if values == case.positive_int("head_dim") else values


def timed_attention(shape: AttentionShape, dtype: DType, *, backward: bool) -> Kernel:
    """Flash attention whose FLOP are counted as published rates count them."""
    scores = shape.batch * shape.heads * shape.query * shape.key * (0.5 if shape.causal else 1.0)
    flops = scores * shape.flops_per_score(backward=backward)
    return replace(flash_kernel(shape, dtype, backward=backward), flops=flops)


def flash_kernel(shape: AttentionShape, dtype: DType, *, backward: bool) -> Kernel:
    """Flash attention of a shape as a training step runs it."""
    low_precision = dtype if dtype in LOW_PRECISION_DTYPES else None
    (operator,) = AttentionCore(
        shape, DType.BF16 if low_precision else dtype, dropout=False, fused=True, low_precision=low_precision
    ).flash_operators()
    return operator.input_gradient[-1] if backward else operator.forward[-1]


def measured_seconds(case: ValidationCase, kernels: Sequence[Kernel]) -> Seconds:
    """The measured time; attention tables print rates, from which it is computed."""
    preferred = "tflops" if case.text("op") == "attention" else "time_us"
    alternative = "time_us" if preferred == "tflops" else "tflops"
    column = preferred if case.text(preferred) or not case.text(alternative) else alternative
    if column == "time_us":
        return case.positive_float("time_us") * 1e-6
    counts_full_matrix = case.boolean("causal") and "no causal halving" in case.text("flop_convention")
    return sum(kernel.flops for kernel in kernels) / (
        case.positive_float("tflops") * 1e12 / (2.0 if counts_full_matrix else 1.0)
    )


def _compare_case(case: ValidationCase, roofline: Roofline | CannotPredictError) -> CaseComparison:
    measured, predicted, skip_reason, is_expressible = math.nan, None, None, True
    try:
        measured, predicted = _measured_and_predicted(case, roofline)
    except CannotPredictError as error:
        skip_reason, is_expressible = str(error), error.is_expressible
    except InputError as error:  # a format that the accelerator does not support
        skip_reason, is_expressible = f"line {case.line_number}: {error}", False
    groupings = {column: case.text(column) or "not stated" for column in ("gpu", "op", "direction", "dtype")}
    groupings["format"] = _format_name(case)
    return CaseComparison(
        case.text("case_id"), case.text("source"), measured, predicted, skip_reason, is_expressible, groupings
    )


def _measured_and_predicted(case: ValidationCase, roofline: Roofline | CannotPredictError) -> tuple[Seconds, Seconds]:
    """Measured and predicted seconds of a row."""
    if case.text("op") == "moe_layer":
        return case.positive_float("time_us") * 1e-6, sum(moe_layer_breakdown(case).values())
    kernels = timed_kernels(case)
    if isinstance(roofline, CannotPredictError):
        raise roofline
    return measured_seconds(case, kernels), sum(roofline.time_kernel(kernel).seconds for kernel in kernels)


def _gpu_and_library(case: ValidationCase) -> tuple[str, AttentionBackend]:
    return case.text("gpu"), attention_library(case)


def _roofline(case: ValidationCase, library: AttentionBackend) -> Roofline | CannotPredictError:
    try:
        return Roofline(case_accelerator(case), attention=library)
    except CannotPredictError as error:
        return error


def _require_flash(case: ValidationCase) -> None:
    """Raise CannotPredictError for attention by none of the libraries that are modelled."""
    implementation = case.text("implementation")
    if implementation.startswith(_UNSUPPORTED_ATTENTION):
        raise CannotPredictError(f"{implementation} is no flash attention that is modelled", is_expressible=False)
    if case.text("dtype") not in _ATTENTION_DTYPES:
        raise CannotPredictError(
            f"attention in {case.text('dtype') or 'no stated format'} is not modelled", is_expressible=False
        )


def _format_name(case: ValidationCase) -> str:
    try:
        return result_format(case) if case.text("op") == "cast" else operand_dtype(case).value
    except CannotPredictError:
        return "not stated"


def _matmul_layout(case: ValidationCase) -> MatmulLayout:
    if case.text("layout") not in _MATMUL_LAYOUTS:
        raise CannotPredictError(
            f"line {case.line_number}: layout {case.text('layout')} is none of TN, NN, NT", is_expressible=False
        )
    return _MATMUL_LAYOUTS[case.text("layout")]


def _with_case_id(case: ValidationCase) -> ValidationCase:
    if case.text("case_id"):
        return case
    sizes = ("m", "n", "k") if case.text("m") else ("batch", "seq", "heads", "head_dim")
    shape = "x".join(case.text(size) or "1" for size in sizes)
    options = [case.text(column) for column in ("layout", "direction") if case.text(column)]
    options += ["causal"] if case.text("causal") == "yes" else []
    dtype = case.text("dtype").replace(" ", "")
    labels = [case.text("op"), case.text("gpu"), shape, dtype, *options, case.text("implementation").replace(" ", "-")]
    return ValidationCase({**case.cells, "case_id": "-".join(label for label in labels if label)}, case.line_number)
