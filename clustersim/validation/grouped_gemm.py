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
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.matmul_formats import format_of, has_casts, result_of

_ONE_KERNEL: Final = ("torch", "DeepGEMM")
_OTHERS: Final = ("DeepSeek",)
_FORWARD: Final = "DeepGEMM"
_ONCE: Final = OperandCast(reads=1, copies=1)
_READ: Final = {"f": ("input", "weight"), "d": ("output", "weight"), "w": ("output", "input")}
_PARTS: Final = {"fwd": "f", "dgrad": "d", "wgrad": "w", "bwd": "dw", "fwd+bwd": "fdw"}


def grouped_of(case: Case) -> tuple[Kernel, ...]:
    """The kernels, one after the other; raise CannotPredictError if it is none that is modelled."""
    implementation, dtype = case.text("implementation"), format_of(case)
    if implementation.startswith(_OTHERS):
        raise CannotPredictError(f"{implementation}'s products of experts are not modelled", owed=False)
    direction = case.text("direction") or ("fwd" if implementation.startswith(_FORWARD) else "")
    if direction not in _PARTS:
        raise CannotPredictError("direction is not stated", owed=False)
    one = implementation.startswith(_ONE_KERNEL)
    linear = _linear(case, dtype, Grouping.KERNEL if one else Grouping.STREAMS)
    gradients = dtype if result_of(case) == dtype.value else DType.FP32
    made = _parts(linear, _recipe(gradients), direction, added=not one)
    return (*made, *_casts(linear, dtype, direction)) if has_casts(case) else made


def _casts(linear: GroupedLinear, dtype: DType, direction: str) -> tuple[Kernel, ...]:
    """Of both operands of each product of a direction."""
    weight = linear.expert_count * linear.outputs, linear.inputs
    tensors = {"input": (linear.tokens, linear.inputs), "output": (linear.tokens, linear.outputs), "weight": weight}
    used = [name for part in _PARTS[direction] for name in _READ[part]]
    return tuple(
        kernel
        for name in used
        for kernel in quantize_kernels(name, _ONCE, tensors[name], high_precision=DType.BF16, low_precision=dtype)
    )


def _linear(case: Case, dtype: DType, grouping: Grouping) -> GroupedLinear:
    groups, rows = case.whole("groups"), case.whole("m")
    tokens = rows if case.text("flop_convention") == "6mnk" else rows * groups
    formats = MatmulFormats.uniform(dtype)
    return GroupedLinear("experts", groups, tokens, case.whole("k"), case.whole("n"), formats, grouping=grouping)


def _recipe(gradients: DType) -> PrecisionRecipe:
    usual = mixed_precision()
    return replace(usual, weight_formats=replace(usual.weight_formats, gradients=gradients))


def _parts(linear: GroupedLinear, recipe: PrecisionRecipe, direction: str, *, added: bool) -> tuple[Kernel, ...]:
    """The products of a direction; a weight gradient that is not added to others is written by itself."""
    how = Accumulation.FUSED if added else Accumulation.ADDED
    made = {
        "f": linear.forward(recipe)[0],
        "d": linear.input_gradient(recipe)[0],
        "w": linear.weight_gradient(recipe, how)[0],
    }
    return tuple(made[part] for part in _PARTS[direction])
