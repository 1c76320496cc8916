"""Which kernels does a published row of products of experts time?

A row says how many tokens each expert has (`m`; of `6mnk` rates, all together), and the weights' sizes `n` x `k`
(outputs, inputs), whatever its direction. PyTorch's are one kernel for all experts; the others are Transformer
Engine's, a product of cuBLAS for each. A weight gradient is added to what is accumulated, in FP32 unless `dtype` says
otherwise; one of PyTorch's autograd is written.
"""

from dataclasses import replace
from typing import Final

from clustersim.dtypes import DType
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.workload.grouped import GroupedLinear
from clustersim.workload.kernels import Kernel
from clustersim.workload.overheads import Accumulation, Grouping
from clustersim.workload.recipe import Products, Recipe, mixed

_PYTORCH: Final = ("torch",)
_OTHERS: Final = ("DeepGEMM", "DeepSeek")
_PARTS: Final = {"fwd": "f", "dgrad": "d", "wgrad": "w", "bwd": "dw", "fwd+bwd": "fdw"}


def grouped_of(case: Case) -> tuple[Kernel, ...]:
    """The kernels, one after the other; raise CannotPredictError if it is none that is modelled."""
    implementation = case.text("implementation")
    operand, _, result = (part.strip() for part in case.text("dtype").partition("->"))
    if implementation.startswith(_OTHERS) or operand not in (DType.BF16.value, DType.FP16.value):
        raise CannotPredictError(f"{implementation}'s products of experts in {operand} are not modelled", owed=False)
    if case.text("direction") not in _PARTS:
        raise CannotPredictError("direction is not stated", owed=False)
    pytorch = implementation.startswith(_PYTORCH)
    linear = _linear(case, DType(operand), Grouping.KERNEL if pytorch else Grouping.STREAMS)
    gradients = DType(operand) if result == operand else DType.FP32
    return _parts(linear, _recipe(gradients), case.text("direction"), added=not pytorch)


def _linear(case: Case, dtype: DType, grouping: Grouping) -> GroupedLinear:
    groups, rows = case.whole("groups"), case.whole("m")
    tokens = rows if case.text("flop_convention") == "6mnk" else rows * groups
    formats = Products.all_in(dtype)
    return GroupedLinear("experts", groups, tokens, case.whole("k"), case.whole("n"), formats, grouping=grouping)


def _recipe(gradients: DType) -> Recipe:
    usual = mixed()
    return replace(usual, weights=replace(usual.weights, gradients=gradients))


def _parts(linear: GroupedLinear, recipe: Recipe, direction: str, *, added: bool) -> tuple[Kernel, ...]:
    """The products of a direction; a weight gradient that is not added to others is written by itself."""
    how = Accumulation.FUSED if added else Accumulation.ADDED
    made = {
        "f": linear.forward(recipe)[0],
        "d": linear.input_gradient(recipe)[0],
        "w": linear.weight_gradient(recipe, how)[0],
    }
    return tuple(made[part] for part in _PARTS[direction])
