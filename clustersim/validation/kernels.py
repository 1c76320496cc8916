"""Do predicted kernels take as long as published ones took?

A row is one layer of experts (`moe_layer_benchmark`), one matrix multiplication, those of a layer's linear layers (with the
casts of a recipe, where they were timed with them: `formats`), one cast, one flash attention kernel or one group of
products of experts; its time is what is printed, or what the printed rate says that it was, with the FLOP that
`flop_convention` counts. Predicted is what the roofline of the accelerator says (`cost.roofline`). The best shape
that a search found is an upper bound, and no row of a comparison.
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
from clustersim.model.precision_recipe import OperandCast
from clustersim.model.quantization import quantize_kernels
from clustersim.validation.accelerator_lookup import accelerator_of
from clustersim.validation.cases import PUBLISHED, CannotPredictError, Case, read_cases
from clustersim.validation.comparison import Comparison
from clustersim.validation.error_statistics import grouped
from clustersim.validation.grouped_gemm import grouped_of
from clustersim.validation.matmul_formats import casts_of, format_of, result_of
from clustersim.validation.moe_layer_benchmark import layer_parts

SHIPPED: Final = PUBLISHED / "kernels.csv"
NEEDED: Final = (
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
# cuBLAS names operands column by column, so that its TN is a linear layer's forward, as which those without count.
_OPERANDS: Final = {"TN": MatmulLayout.NT, "NN": MatmulLayout.NN, "NT": MatmulLayout.TN, "": MatmulLayout.NT}
_NO_KERNEL: Final = {
    "attention_peak": "a peak that a text states, without its shape",
    "hbm_stream_triad": "a bandwidth, not a kernel's time",
    "transformer_layer": "a layer is many kernels; its step is among the steps",
}
_OTHER_ATTENTION: Final = ("standard", "Triton", "no intra-warpgroup", "no warp specialisation")
_ATTENTION: Final = {
    **{"bf16": DType.BF16, "fp16": DType.FP16, "fp16/bf16": DType.BF16},
    **{item.value: item for item in (DType.FP8, DType.MXFP8)},
}
_BEFORE_HOPPER: Final = ("v100", "a100")  # on which FlashAttention-2 is what frameworks run
_LAYER: Final = re.compile(r"hidden (\d+), ffn (\d+), (\d+) tokens")
_TURNS: Final[Mapping[str, Callable[[int, int, int], tuple[int, int, int]]]] = {
    "fwd": lambda tokens, outputs, inputs: (tokens, outputs, inputs),
    "dgrad": lambda tokens, outputs, inputs: (tokens, inputs, outputs),
    "wgrad": lambda tokens, outputs, inputs: (inputs, outputs, tokens),
}
_DIRECTIONS: Final = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}


def read_kernels(path: Path = SHIPPED) -> list[Case]:
    """The rows of a table of kernels, each with a `case_id`, made of what it says if the table has none."""
    return [_named(case) for case in read_cases(path, NEEDED)]


def compare_kernels(cases: Sequence[Case]) -> list[Comparison]:
    """Predict every row, in seconds."""
    sources = {gpu: _roofline(same[0]) for gpu, same in grouped(cases, lambda case: case.text("gpu")).items()}
    return [_comparison(case, sources[case.text("gpu")]) for case in cases]


def kernels_of(case: Case) -> tuple[Kernel, ...]:
    """The kernels that a row times, one after the other; raise CannotPredictError if it is none that is modelled."""
    op = case.text("op")
    if op in _NO_KERNEL:
        raise CannotPredictError(_NO_KERNEL[op], owed=False)
    if case.text("implementation") == BEST_OF_SEARCH:
        raise CannotPredictError("the best shape of a search is an upper bound", owed=False)
    if op in ("gemm", "gemm_set"):
        return tuple(kernel for product in matmuls_of(case) for kernel in (product, *_casts_with(case, product)))
    if op == "cast":
        return (cast_of(case),)
    if op == "grouped_gemm":
        return grouped_of(case)
    if op != "attention":
        raise CannotPredictError(f"op {op or 'is not stated'}: not modelled", owed=False)
    if case.text("direction") not in _DIRECTIONS:
        raise CannotPredictError("direction is not stated", owed=False)
    return tuple(attention_of(case, backward=backward) for backward in _DIRECTIONS[case.text("direction")])


def matmuls_of(case: Case) -> tuple[Kernel, ...]:
    """The products of a row, one behind the other: one, or those of a layer's linear layers in one direction."""
    if case.text("op") == "gemm":
        return (matmul_of(case),)
    return tuple(_matmul(case, *sizes) for sizes in _layer_sizes(case))


def matmul_of(case: Case) -> Kernel:
    """The matmul of a row."""
    m, n, k = (case.whole(column) for column in ("m", "n", "k"))
    return _matmul(case, m, n, k)


def cast_of(case: Case) -> Kernel:
    """The kernel that brings a tensor of `m` rows of `k` elements into a format with scales; one copy is written."""
    name = result_of(case)
    if name not in {item.value for item in LOW_PRECISION_DTYPES}:
        raise CannotPredictError(f"dtype {case.text('dtype') or 'is not stated'}: no cast that is modelled", owed=False)
    sizes = case.whole("m"), case.whole("k")
    (kernel,) = quantize_kernels(
        "cast", OperandCast(1, 1), sizes, high_precision=format_of(case), low_precision=DType(name)
    )
    return kernel


def _casts_with(case: Case, product: Kernel) -> tuple[Kernel, ...]:
    return casts_of(case, product.shape) if isinstance(product.shape, MatmulShape) else ()


def _layer_sizes(case: Case) -> list[tuple[int, int, int]]:
    """Of the linear layers of attention and of an MLP without a gate, as `notes` say their sizes."""
    found = _LAYER.search(case.text("notes"))
    if found is None or case.text("direction") not in _TURNS:
        raise CannotPredictError("sizes of the layer or its direction are not stated", owed=False)
    hidden, ffn, tokens = (int(group) for group in found.groups())
    turned = _TURNS[case.text("direction")]
    sizes = [(3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)]
    return [turned(tokens, outputs, inputs) for outputs, inputs in sizes]


def _matmul(case: Case, m: int, n: int, k: int) -> Kernel:
    """An FP32 result is the weight gradient, which is accumulated into: read and written."""
    added, dtype = DType.FP32 if result_of(case) == "fp32" else None, format_of(case)
    shape = MatmulShape(m, n, k, operands=_operands(case), accumulated=added)
    if case.whole("batch", 1) > 1:
        shape = replace(shape, batch=case.whole("batch"))
    result_bytes = 2 * added.bytes if added else DType.BF16.bytes
    moved = ((m + n) * k * dtype.bytes + m * n * result_bytes) * shape.batch
    return Kernel("matmul", KernelKind.MATMUL, dtype, 2.0 * m * n * k * shape.batch, float(moved), shape)


def attention_of(case: Case, *, backward: bool) -> Kernel:
    """The flash attention kernel of a row; its FLOP are those executed, half of the matrix with a causal mask."""
    _require_flash(case)
    heads, sequence = case.whole("heads"), case.whole("seq")
    shape = AttentionShape(
        batch=case.whole("batch", 1),
        query=sequence,
        key=sequence,
        heads=heads,
        kv_heads=case.whole("kv_heads", heads),
        head_dim=case.whole("head_dim"),
        causal=case.is_yes("causal"),
        value_dim=_value_dim(case),
    )
    return timed_attention(shape, _ATTENTION[case.text("dtype")], backward=backward)


def _value_dim(case: Case) -> int | None:
    """The head dimension of values, where it is not that of keys."""
    values = case.whole("v_head_dim", case.whole("head_dim"))
    return None if values == case.whole("head_dim") else values


def timed_attention(shape: AttentionShape, dtype: DType, *, backward: bool) -> Kernel:
    """Flash attention whose FLOP are counted as published rates count them."""
    scores = shape.batch * shape.heads * shape.query * shape.key * (0.5 if shape.causal else 1.0)
    flops = scores * shape.flops_per_score(backward=backward)
    return replace(flash_kernel(shape, dtype, backward=backward), flops=flops)


def flash_kernel(shape: AttentionShape, dtype: DType, *, backward: bool) -> Kernel:
    """Flash attention of a shape as a training step runs it."""
    narrow = dtype if dtype in LOW_PRECISION_DTYPES else None
    (operator,) = AttentionCore(
        shape, DType.BF16 if narrow else dtype, dropout=False, fused=True, low_precision=narrow
    ).flash_operators()
    return operator.input_gradient[-1] if backward else operator.forward[-1]


def seconds_of(case: Case, kernels: Sequence[Kernel]) -> Seconds:
    """The measured time; of attention, whose rates are what is printed, what the rate says that it was."""
    printed = "tflops" if case.text("op") == "attention" else "time_us"
    other = "time_us" if printed == "tflops" else "tflops"
    column = printed if case.text(printed) or not case.text(other) else other
    if column == "time_us":
        return case.number("time_us") * 1e-6
    twice = case.is_yes("causal") and "no causal halving" in case.text("flop_convention")
    return sum(kernel.flops for kernel in kernels) / (case.number("tflops") * 1e12 / (2.0 if twice else 1.0))


def _comparison(case: Case, source: Roofline | CannotPredictError) -> Comparison:
    measured, predicted, skipped, owed = math.nan, None, None, True
    try:
        measured, predicted = _seconds(case, source)
    except CannotPredictError as refusal:
        skipped, owed = str(refusal), refusal.owed
    except InputError as refusal:  # a format that the accelerator does not have
        skipped, owed = f"line {case.line}: {refusal}", False
    factors = {column: case.text(column) or "not stated" for column in ("gpu", "op", "direction", "dtype")}
    factors["format"] = _format_name(case)
    return Comparison(case.text("case_id"), case.text("source"), measured, predicted, skipped, owed, factors)


def _seconds(case: Case, source: Roofline | CannotPredictError) -> tuple[Seconds, Seconds]:
    """What a row took, and what is predicted for it."""
    if case.text("op") == "moe_layer":
        return case.number("time_us") * 1e-6, sum(layer_parts(case).values())
    kernels = kernels_of(case)
    if isinstance(source, CannotPredictError):
        raise source
    return seconds_of(case, kernels), sum(source.time_kernel(kernel).seconds for kernel in kernels)


def _roofline(case: Case) -> Roofline | CannotPredictError:
    try:
        return Roofline(accelerator_of(case))
    except CannotPredictError as refusal:
        return refusal


def _require_flash(case: Case) -> None:
    """Refuse attention that is not the flash attention that frameworks run on such a GPU."""
    implementation, gpu = case.text("implementation"), case.text("gpu")
    other = implementation.startswith(_OTHER_ATTENTION)
    if other or (implementation == "FA2" and not gpu.startswith(_BEFORE_HOPPER)):
        raise CannotPredictError(f"{implementation} is not the flash attention that is modelled for it", owed=False)
    if case.text("dtype") not in _ATTENTION:
        raise CannotPredictError(f"attention in {case.text('dtype') or 'no stated format'} is not modelled", owed=False)


def _format_name(case: Case) -> str:
    try:
        return result_of(case) if case.text("op") == "cast" else format_of(case).value
    except CannotPredictError:
        return "not stated"


def _operands(case: Case) -> MatmulLayout:
    if case.text("layout") not in _OPERANDS:
        raise CannotPredictError(f"line {case.line}: layout {case.text('layout')} is none of TN, NN, NT", owed=False)
    return _OPERANDS[case.text("layout")]


def _named(case: Case) -> Case:
    if case.text("case_id"):
        return case
    sizes = ("m", "n", "k") if case.text("m") else ("batch", "seq", "heads", "head_dim")
    shape = "x".join(case.text(size) or "1" for size in sizes)
    said = [case.text(column) for column in ("layout", "direction") if case.text(column)]
    said += ["causal"] if case.text("causal") == "yes" else []
    dtype = case.text("dtype").replace(" ", "")
    words = [case.text("op"), case.text("gpu"), shape, dtype, *said, case.text("implementation").replace(" ", "-")]
    return Case({**case.cells, "case_id": "-".join(word for word in words if word)}, case.line)
