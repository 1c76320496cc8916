"""In which format, and with which quantization recipe, was a published matmul computed?

Tables name formats as their sources do: by recipe (`fp8 current scaling`) or by scaling block (`fp8
(1x128/128x128 scaling)`). DeepGEMM's FP8 is blockwise. A row whose notes say that it was timed with
quantization (Transformer Engine's `autocast`) includes the recipe's casts: those of an input that will need
a weight gradient, and of weights whose input needs no gradient, in each call (NVIDIA/TransformerEngine,
benchmarks/gemm/benchmark_gemm.py). Delayed scaling always includes them.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.quantization import quantize_kernels
from clustersim.model.recipe_files import load_recipe
from clustersim.validation.accelerator_lookup import case_accelerator
from clustersim.validation.cases import CannotPredictError, ValidationCase

_DELAYED_SCALING: Final = "fp8 delayed scaling"
_DTYPE_BY_NAME: Final = {dtype.value: dtype for dtype in COMPUTE_DTYPES} | {
    "fp8 current scaling": DType.FP8,
    _DELAYED_SCALING: DType.FP8,
    "fp8 rowwise": DType.FP8_ROWWISE,
    "fp8 blockwise": DType.FP8_BLOCKWISE,
    "fp8 (1x128/128x128 scaling)": DType.FP8_BLOCKWISE,
    "fp8 (1x128/128x128)": DType.FP8_BLOCKWISE,
}
_RECIPE_BY_NAME: Final = {
    "fp8 current scaling": "fp8-current",
    _DELAYED_SCALING: "fp8",
    "fp8 blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
_BLOCKWISE_LIBRARY: Final = "DeepGEMM"
_QUANTIZATION_NOTE: Final = "quantisation"


def operand_dtype(case: ValidationCase) -> DType:
    """Data type of a row's operands; raises CannotPredictError if it is not modelled."""
    name = _operand_name(case)
    if name not in _DTYPE_BY_NAME:
        raise CannotPredictError(f"dtype {case.text('dtype') or 'is not stated'}: not modelled", is_expressible=False)
    dtype = _DTYPE_BY_NAME[name]
    return (
        DType.FP8_BLOCKWISE
        if dtype is DType.FP8 and case.text("implementation").startswith(_BLOCKWISE_LIBRARY)
        else dtype
    )


def result_format(case: ValidationCase) -> str:
    """The stated format of the result; empty if not stated."""
    return case.text("dtype").partition("->")[2].strip()


def has_casts(case: ValidationCase) -> bool:
    """Whether a row was timed with its casts."""
    return operand_dtype(case) in LOW_PRECISION_DTYPES and (
        _operand_name(case) == _DELAYED_SCALING or _QUANTIZATION_NOTE in case.text("notes")
    )


def timed_casts(case: ValidationCase, shape: MatmulShape) -> tuple[Kernel, ...]:
    """The cast kernels that were timed with a matmul run as a linear layer's forward."""
    name, low_precision = _operand_name(case), operand_dtype(case)
    if not has_casts(case):
        return ()
    if name not in _RECIPE_BY_NAME:
        raise CannotPredictError(f"how operands were cast to {name} is not stated", is_expressible=False)
    recipe = load_recipe(_RECIPE_BY_NAME[name])
    casts = recipe.for_hardware(tn_only=case_accelerator(case).efficiency.matmul.tn_only, weights_sharded=False).casts
    if casts is None:
        return ()
    weight = replace(casts.weight, copies=min(casts.weight.copies, 1))
    return (
        *quantize_kernels(
            "input", casts.input, (shape.m, shape.k), high_precision=recipe.activations, low_precision=low_precision
        ),
        *quantize_kernels(
            "weight", weight, (shape.n, shape.k), high_precision=recipe.activations, low_precision=low_precision
        ),
    )


def _operand_name(case: ValidationCase) -> str:
    return case.text("dtype").partition("->")[0].strip()
