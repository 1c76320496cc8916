"""In which format, and by which recipe, was a published product computed?

Tables name formats as their sources do: by the recipe that casts to them (`fp8 current scaling`), or by what shares a
scale (`fp8 (1x128/128x128 scaling)`). DeepGEMM's FP8 is in blocks. A row whose `notes` say that it was timed with its
quantisation (Transformer Engine's `autocast`) takes what the recipe's casts take, too: those of an input of which a
weight gradient will be made, and of weights whose input needs no gradient, in each call (NVIDIA/TransformerEngine,
benchmarks/gemm/benchmark_gemm.py). Delayed scaling is never without.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.quantization import quantize_kernels
from clustersim.model.recipe_files import load_recipe
from clustersim.validation.accelerator_lookup import accelerator_of
from clustersim.validation.cases import CannotPredictError, Case

_DELAYED: Final = "fp8 delayed scaling"
_NAMES: Final = {item.value: item for item in COMPUTE_DTYPES} | {
    "fp8 current scaling": DType.FP8,
    _DELAYED: DType.FP8,
    "fp8 rowwise": DType.FP8_ROWWISE,
    "fp8 blockwise": DType.FP8_BLOCKWISE,
    "fp8 (1x128/128x128 scaling)": DType.FP8_BLOCKWISE,
    "fp8 (1x128/128x128)": DType.FP8_BLOCKWISE,
}
_RECIPES: Final = {
    "fp8 current scaling": "fp8-current",
    _DELAYED: "fp8",
    "fp8 blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
_IN_BLOCKS: Final = "DeepGEMM"
_WITH_CASTS: Final = "quantisation"


def format_of(case: Case) -> DType:
    """The format of a row's operands; raise CannotPredictError for one that is not modelled."""
    name = _operand(case)
    if name not in _NAMES:
        raise CannotPredictError(f"dtype {case.text('dtype') or 'is not stated'}: not modelled", owed=False)
    known = _NAMES[name]
    return DType.FP8_BLOCKWISE if known is DType.FP8 and case.text("implementation").startswith(_IN_BLOCKS) else known


def result_of(case: Case) -> str:
    """What a row says of the format of its result; empty: nothing."""
    return case.text("dtype").partition("->")[2].strip()


def has_casts(case: Case) -> bool:
    """Whether a row was timed with its casts."""
    return format_of(case) in LOW_PRECISION_DTYPES and (_operand(case) == _DELAYED or _WITH_CASTS in case.text("notes"))


def casts_of(case: Case, shape: MatmulShape) -> tuple[Kernel, ...]:
    """The casts that a row timed with its product, as which a linear layer's forward ran."""
    name, narrow = _operand(case), format_of(case)
    if not has_casts(case):
        return ()
    if name not in _RECIPES:
        raise CannotPredictError(f"how operands were cast to {name} is not stated", owed=False)
    recipe = load_recipe(_RECIPES[name])
    casts = recipe.for_hardware(tn_only=accelerator_of(case).efficiency.matmul.by_rows, weights_sharded=False).casts
    if casts is None:
        return ()
    weight = replace(casts.weight, copies=min(casts.weight.copies, 1))
    return (
        *quantize_kernels(
            "input", casts.input, (shape.m, shape.k), high_precision=recipe.activations, low_precision=narrow
        ),
        *quantize_kernels(
            "weight", weight, (shape.n, shape.k), high_precision=recipe.activations, low_precision=narrow
        ),
    )


def _operand(case: Case) -> str:
    return case.text("dtype").partition("->")[0].strip()
