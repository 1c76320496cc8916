"""How likely is a call of a step an operator of the plan, by its name and size?"""

import math
import re
from typing import Final

from calibrate.profile.plan_kernels import PlanKernel
from calibrate.profile.step_calls import Call
from clustersim.model.kernels import KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.results.profiled_step import GpuSpanKind

_SAME: Final = 0.0
_POSSIBLE: Final = 0.3
_UNLIKELY: Final = 1.2
_SMALL: Final = 1 / 64  # of an operator's elements: sizes of such calls tell nothing
_SIZE_WEIGHT: Final = 0.4
_NORM: Final = r"norm|rsqrt|pow|mean|var|welford"
_WORDS: Final = {
    KernelKind.NORM: (_NORM, r"mul|copy|cast|sum|div|add|_to_"),
    KernelKind.ROTARY: (r"rotary|rope|neg|cat(?!egor)|concat|polar|complex|view_as", r"mul|add|copy|fill|slice|sub"),
    KernelKind.ACTIVATION: (r"silu|gelu|sigmoid|swiglu|tanh|relu", r"mul|split|copy|cat"),
    KernelKind.RESIDUAL: (r"^aten::add_?$|residual|add", r"copy|cast"),
    KernelKind.DROPOUT: (r"dropout|bernoulli", r"mul"),
    KernelKind.SOFTMAX: (r"softmax|mask", r"mul|div|copy|where|add"),
    KernelKind.EMBEDDING: (r"embedding|index_select|gather|indexing", r"fill|zero|sort|copy|index|scan|unique|sum"),
    KernelKind.LOSS: (r"softmax|nll|loss|entropy|logsumexp", r"copy|fill|zero|mul|div|exp|sub|max|sum|gather|cast"),
    KernelKind.COPY: (r"copy|cast|add_|zero|fill|cat|chunk|split", r"mul|add"),
    KernelKind.CAST: (r"quant|cast|amax|copy", r"abs|max|mul|div|clamp|transpose"),
}
_UPDATE_WORDS: Final = {
    MemoryBoundOp.GRADIENT_NORM: r"norm|sum|sqrt|pow|stack|cat|reciprocal|clamp",
    MemoryBoundOp.GRADIENT_CLIP: r"mul|clip|scale|div|clamp|reciprocal|add",
    MemoryBoundOp.UNSCALE: r"unscale|scale",
    MemoryBoundOp.ZERO: r"zero|fill|memset",
    MemoryBoundOp.COPY: r"copy|cast",
}


def affinity_cost(kernel: PlanKernel, call: Call) -> float:
    """How unlikely it is that a call is a part of a memory-bound kernel of the plan: 0 and more."""
    shape = kernel.kernel.shape
    routine = shape.routine if isinstance(shape, MemoryBoundShape) else None
    text = f"{call.operator} {call.name}".lower()
    if kernel.kernel.kind is KernelKind.OPTIMIZER:
        return _update_cost(routine, text, is_update=call.update)
    if call.update:
        return _UNLIKELY
    likely, possible = _WORDS.get(kernel.kernel.kind, ("", ""))
    names = call.operator.lower() or text
    cost = _UNLIKELY
    if likely and re.search(likely, names):
        cost = _SAME
    elif possible and re.search(possible, names):
        cost = _POSSIBLE
    if call.kind is GpuSpanKind.NORM:
        cost = _SAME if kernel.kernel.kind is KernelKind.NORM else _UNLIKELY
    return cost + _SIZE_WEIGHT * _size_distance(kernel, call)


def _size_distance(kernel: PlanKernel, call: Call) -> float:
    """Distance of the sizes of a call's largest input and of an operator, at most 2; 0 where one is unknown."""
    shape = kernel.kernel.shape
    if not isinstance(shape, MemoryBoundShape) or not call.elements:
        return 0.0
    ratio = call.elements / max(1.0, float(shape.elements))
    if ratio < _SMALL:
        return 0.25
    return min(2.0, abs(math.log2(ratio)))


def _update_cost(routine: MemoryBoundOp | None, text: str, *, is_update: bool) -> float:
    if routine in (MemoryBoundOp.ADAM, MemoryBoundOp.SGD):
        return _SAME if is_update or re.search("adam|sgd|multi_tensor_apply_kernel.*adam", text) else _UNLIKELY
    if is_update:
        return _UNLIKELY
    pattern = _UPDATE_WORDS.get(routine) if routine is not None else None
    return _SAME if pattern is not None and re.search(pattern, text) else _UNLIKELY
