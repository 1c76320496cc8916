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

_PREFIX: Final = "clustersim"


@dataclass(frozen=True, slots=True)
class OperatorLabel:
    """Kernels that a profile adds up. routine: of what streams, None: products and attention; backward: its gradient.

    Products are one label in all directions, and attention's directions are two kinds.
    """

    kind: KernelKind
    op: MemoryBoundOp | None = None
    backward: bool = False

    @classmethod
    def from_kernel(cls, kernel: Kernel) -> "OperatorLabel":
        """The label of a kernel of the plan."""
        if isinstance(kernel.shape, MemoryBoundShape):
            return cls(kernel.kind, kernel.shape.routine, kernel.shape.backward)
        return cls(kernel.kind)

    @property
    def backward_label(self) -> "OperatorLabel":
        """What the nodes are that autograd makes of operators with this label."""
        if self.kind is KernelKind.ATTENTION_FORWARD:
            return ATTENTION_BACKWARD
        return self if self.op is None else replace(self, backward=True)

    @property
    def profiler_name(self) -> str:
        """As a profile has it."""
        op_suffix = () if self.op is None else (self.op.value,)
        return "/".join((_PREFIX, self.kind.value, *op_suffix))


MATMUL: Final = OperatorLabel(KernelKind.MATMUL)
ATTENTION: Final = OperatorLabel(KernelKind.ATTENTION_FORWARD)
ATTENTION_BACKWARD: Final = OperatorLabel(KernelKind.ATTENTION_BACKWARD)
ACCUMULATE: Final = OperatorLabel(KernelKind.COPY, MemoryBoundOp.ACCUMULATE)
BIAS_GRADIENT: Final = OperatorLabel(KernelKind.COPY, MemoryBoundOp.BIAS_GRADIENT)
GRADIENT_SUM: Final = OperatorLabel(KernelKind.RESIDUAL, MemoryBoundOp.RESIDUAL)
GROUPED_MATMUL: Final = OperatorLabel(KernelKind.GROUPED_MATMUL)
PERMUTATION_MAP: Final = OperatorLabel(KernelKind.COPY, MemoryBoundOp.ROW_MAP)
PERMUTE: Final = OperatorLabel(KernelKind.COPY, MemoryBoundOp.PERMUTE)
UNPERMUTE: Final = OperatorLabel(KernelKind.COPY, MemoryBoundOp.UNPERMUTE)
WEIGHTING: Final = OperatorLabel(KernelKind.RESIDUAL, MemoryBoundOp.WEIGHTING)
LOOKUP: Final = OperatorLabel(KernelKind.EMBEDDING, MemoryBoundOp.LOOKUP)
POSITIONS: Final = OperatorLabel(KernelKind.EMBEDDING, MemoryBoundOp.POSITIONS)


def optimizer_label(op: MemoryBoundOp) -> OperatorLabel:
    """A part of what follows the last backward."""
    return OperatorLabel(KernelKind.OPTIMIZER, op)


def memory_bound_label(spec: MemoryBoundSpec) -> OperatorLabel:
    """The forward of a streaming operator."""
    return OperatorLabel(spec.kind, spec.op)


def parse_label(name: str) -> OperatorLabel | None:
    """The (forward) label of that name, None where it is no label's."""
    prefix, _, text = name.partition("/")
    if prefix != _PREFIX:
        return None
    kind, _, op = text.partition("/")
    return OperatorLabel(KernelKind(kind), MemoryBoundOp(op) if op else None)


def record_label(label: OperatorLabel) -> AbstractContextManager[object]:
    """What runs inside has the label, if a profiler looks on."""
    return profiler.record_function(label.profiler_name) if profiler._is_profiler_enabled else nullcontext()
