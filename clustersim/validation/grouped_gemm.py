"""Which kernels does a published row of products of experts time?

A row says how many tokens each expert has (`m`; of `6mnk` rates, all together), and the weights' sizes `n` x `k`
(outputs, inputs), whatever its direction. PyTorch's are one kernel for all experts; the others are Transformer
Engine's, a product of cuBLAS for each. A weight gradient is added to what is accumulated, in FP32 unless `dtype` says
otherwise; one of PyTorch's autograd is written. DeepGEMM's are one kernel, of forward where no direction is stated.

Rows of torchao that were timed with their quantisation cast both operands of each of the three products by themselves
(pytorch/ao, torchao/prototype/moe_training/README.md, "MXFP8 Kernel Breakdown by Pass"); what it takes to lay out the
scales as the kernel wants them, a tenth of that, is left out.
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

_SINGLE_KERNEL_LIBRARIES: Final = ("torch", "DeepGEMM")
_UNSUPPORTED_LIBRARIES: Final = ("DeepSeek",)
_FORWARD_ONLY_LIBRARY: Final = "DeepGEMM"
_SINGLE_CAST: Final = OperandCast(reads=1, copies=1)
_OPERANDS_BY_PASS: Final = {"f": ("input", "weight"), "d": ("output", "weight"), "w": ("output", "input")}
_PASSES_BY_DIRECTION: Final = {"fwd": "f", "dgrad": "d", "wgrad": "w", "bwd": "dw", "fwd+bwd": "fdw"}


def grouped_gemm_kernels(case: ValidationCase) -> tuple[Kernel, ...]:
    """The kernels, one after the other; raise CannotPredictError if it is none that is modelled."""
    implementation, dtype = case.text("implementation"), operand_dtype(case)
    if implementation.startswith(_UNSUPPORTED_LIBRARIES):
        raise CannotPredictError(f"{implementation}'s products of experts are not modelled", is_expressible=False)
    direction = case.text("direction") or ("fwd" if implementation.startswith(_FORWARD_ONLY_LIBRARY) else "")
    if direction not in _PASSES_BY_DIRECTION:
        raise CannotPredictError("direction is not stated", is_expressible=False)
    is_single_kernel = implementation.startswith(_SINGLE_KERNEL_LIBRARIES)
    linear = _grouped_linear(case, dtype, Grouping.KERNEL if is_single_kernel else Grouping.STREAMS)
    gradients = dtype if result_format(case) == dtype.value else DType.FP32
    matmuls = _grouped_matmuls(linear, _recipe(gradients), direction, accumulates=not is_single_kernel)
    return (*matmuls, *_cast_kernels(linear, dtype, direction)) if has_casts(case) else matmuls


def _cast_kernels(linear: GroupedLinear, dtype: DType, direction: str) -> tuple[Kernel, ...]:
    """Of both operands of each product of a direction."""
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
    """The products of a direction; a weight gradient that is not added to others is written by itself."""
    accumulation = Accumulation.FUSED if accumulates else Accumulation.ADDED
    matmuls = {
        "f": linear.forward(recipe)[0],
        "d": linear.input_gradient(recipe)[0],
        "w": linear.weight_gradient(recipe, accumulation)[0],
    }
    return tuple(matmuls[gemm_pass] for gemm_pass in _PASSES_BY_DIRECTION[direction])
