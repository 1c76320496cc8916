"""By what are the operators of a real step told apart?

By what the plan's kernels are: products and attention by their kind, what streams through memory by its routine and
direction. Names of labels begin with a word of ours, so that no operator of torch has one. A label costs the host about
15 us, so nothing is labelled but under a profiler.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from torch.autograd import profiler

from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.memory_bound import MemoryBoundSpec

_OURS: Final = "clustersim"


@dataclass(frozen=True, slots=True)
class Label:
    """Kernels that a profile adds up. routine: of what streams, None: products and attention; backward: its gradient.

    Products are one label in all directions, and attention's directions are two kinds.
    """

    kind: KernelKind
    routine: MemoryBoundOp | None = None
    backward: bool = False

    @classmethod
    def of(cls, kernel: Kernel) -> "Label":
        """The label of a kernel of the plan."""
        if isinstance(kernel.shape, MemoryBoundShape):
            return cls(kernel.kind, kernel.shape.routine, kernel.shape.backward)
        return cls(kernel.kind)

    @property
    def gradient(self) -> "Label":
        """What the nodes are that autograd makes of operators with this label."""
        if self.kind is KernelKind.ATTENTION_FORWARD:
            return ATTENTION_BACKWARD
        return self if self.routine is None else replace(self, backward=True)

    @property
    def name(self) -> str:
        """As a profile has it."""
        routine = () if self.routine is None else (self.routine.value,)
        return "/".join((_OURS, self.kind.value, *routine))


PRODUCT: Final = Label(KernelKind.MATMUL)
ATTENTION: Final = Label(KernelKind.ATTENTION_FORWARD)
ATTENTION_BACKWARD: Final = Label(KernelKind.ATTENTION_BACKWARD)
ACCUMULATE: Final = Label(KernelKind.COPY, MemoryBoundOp.ACCUMULATE)
BIAS_GRADIENT: Final = Label(KernelKind.COPY, MemoryBoundOp.BIAS_GRADIENT)
GRADIENT_SUM: Final = Label(KernelKind.RESIDUAL, MemoryBoundOp.RESIDUAL)
PRODUCTS: Final = Label(KernelKind.GROUPED_MATMUL)
ROW_MAP: Final = Label(KernelKind.COPY, MemoryBoundOp.ROW_MAP)
PERMUTE: Final = Label(KernelKind.COPY, MemoryBoundOp.PERMUTE)
UNPERMUTE: Final = Label(KernelKind.COPY, MemoryBoundOp.UNPERMUTE)
WEIGHTING: Final = Label(KernelKind.RESIDUAL, MemoryBoundOp.WEIGHTING)
LOOKUP: Final = Label(KernelKind.EMBEDDING, MemoryBoundOp.LOOKUP)
POSITIONS: Final = Label(KernelKind.EMBEDDING, MemoryBoundOp.POSITIONS)


def optimizer(routine: MemoryBoundOp) -> Label:
    """A part of what follows the last backward."""
    return Label(KernelKind.OPTIMIZER, routine)


def streaming(over: MemoryBoundSpec) -> Label:
    """The forward of a streaming operator."""
    return Label(over.kind, over.op)


def named(name: str) -> Label | None:
    """The (forward) label of that name, None where it is no label's."""
    ours, _, words = name.partition("/")
    if ours != _OURS:
        return None
    kind, _, routine = words.partition("/")
    return Label(KernelKind(kind), MemoryBoundOp(routine) if routine else None)


def labelled(label: Label) -> AbstractContextManager[object]:
    """What runs inside has the label, if a profiler looks on."""
    return profiler.record_function(label.name) if profiler._is_profiler_enabled else nullcontext()
