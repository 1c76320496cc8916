"""Which kernels does a published row of grouped GEMM time?

A row states the tokens per expert (`m`; for `6mnk` rates, of all experts) and the weights' sizes `n` x `k`
(outputs, inputs), whatever its direction. PyTorch's grouped GEMM is one kernel for all experts, as are Composable
Kernel's and Triton's on AMD's GPUs; the others are one library GEMM per expert: Transformer Engine's,
grouped_gemm's. A weight gradient is accumulated, in FP32 unless `dtype` says otherwise; that of PyTorch's autograd
is written. DeepGEMM's is one kernel, of forward where no direction is stated.

torchao rows that were timed with quantization cast both operands of each of the three GEMMs separately
(pytorch/ao, torchao/prototype/moe_training/README.md, "MXFP8 Kernel Breakdown by Pass"); rearranging the
scales for the kernel, a tenth of that time, is not modelled.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.grouped_linear import GroupedLinear
from clustersim.model.kernels import Kernel
from clustersim.model.overheads import Accumulation, Grouping
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, mixed_precision
from clustersim.model.quantization import quantize_kernels
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.matmul_formats import has_casts, operand_dtype, result_format

_SINGLE_KERNEL_LIBRARIES: Final = ("torch", "DeepGEMM", "Composable Kernel", "Triton")
_UNSUPPORTED_LIBRARIES: Final = ("DeepSeek",)
_FORWARD_ONLY_LIBRARY: Final = "DeepGEMM"
_SINGLE_CAST: Final = OperandCast(reads=1, copies=1)
_OPERANDS_BY_PASS: Final = {"f": ("input", "weight"), "d": ("output", "weight"), "w": ("output", "input")}
_PASSES_BY_DIRECTION: Final = {"fwd": "f", "dgrad": "d", "wgrad": "w", "bwd": "dw", "fwd+bwd": "fdw"}


def grouped_gemm_kernels(case: ValidationCase) -> tuple[Kernel, ...]:
    """The kernels in order; raises CannotPredictError if they are not modelled."""
    implementation, dtype = case.text("implementation"), operand_dtype(case)
    if implementation.startswith(_UNSUPPORTED_LIBRARIES):
        raise CannotPredictError(f"{implementation}'s matmuls of experts are not modelled", is_expressible=False)
    direction = case.text("direction") or ("fwd" if implementation.startswith(_FORWARD_ONLY_LIBRARY) else "")
    if direction not in _PASSES_BY_DIRECTION:
        raise CannotPredictError("direction is not stated", is_expressible=False)
    is_single_kernel = implementation.startswith(_SINGLE_KERNEL_LIBRARIES)
    linear = _grouped_linear(case, dtype, Grouping.KERNEL if is_single_kernel else Grouping.STREAMS)
    gradients = dtype if result_format(case) == dtype.value else DType.FP32
    matmuls = _grouped_matmuls(linear, _recipe(gradients), direction, accumulates=not is_single_kernel)
    return (*matmuls, *_cast_kernels(linear, dtype, direction)) if has_casts(case) else matmuls


def _cast_kernels(linear: GroupedLinear, dtype: DType, direction: str) -> tuple[Kernel, ...]:
    """Casts of both operands of each GEMM of a direction."""
    weight = linear.expert_count * linear.outputs, linear.inputs
    tensors = {"input": (linear.tokens, linear.inputs), "output": (linear.tokens, linear.outputs), "weight": weight}
    operands = [name for gemm_pass in _PASSES_BY_DIRECTION[direction] for name in _OPERANDS_BY_PASS[gemm_pass]]
    return tuple(
        kernel
        for name in operands
        for kernel in quantize_kernels(
            name, _SINGLE_CAST, tensors[name], high_precision=DType.BF16, low_precision=dtype
        )
    )


def _grouped_linear(case: ValidationCase, dtype: DType, grouping: Grouping) -> GroupedLinear:
    groups, m = case.positive_int("groups"), case.positive_int("m")
    tokens = m if case.text("flop_convention") == "6mnk" else m * groups
    formats = MatmulFormats.uniform(dtype)
    return GroupedLinear(
        "experts", groups, tokens, case.positive_int("k"), case.positive_int("n"), formats, grouping=grouping
    )


def _recipe(gradients: DType) -> PrecisionRecipe:
    default = mixed_precision()
    return replace(default, weight_formats=replace(default.weight_formats, gradients=gradients))


def _grouped_matmuls(
    linear: GroupedLinear, recipe: PrecisionRecipe, direction: str, *, accumulates: bool
) -> tuple[Kernel, ...]:
    """The GEMMs of a direction; a weight gradient that is not accumulated is written to its own tensor."""
    accumulation = Accumulation.FUSED if accumulates else Accumulation.ADDED
    matmuls = {
        "f": linear.forward(recipe)[0],
        "d": linear.input_gradient(recipe)[0],
        "w": linear.weight_gradient(recipe, accumulation)[0],
    }
    return tuple(matmuls[gemm_pass] for gemm_pass in _PASSES_BY_DIRECTION[direction])
