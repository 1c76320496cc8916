"""Labels that attribute the operators of a real step to kernels of the plan.

The same classes as the plan's kernels: matmuls and attention by kind, memory-bound operations by operation
and direction. Label names begin with a prefix of our own, so that no torch operator has the same. A label
costs the host about 15 us, so labels are recorded only under a profiler.
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
    """A class of kernels that a profile sums over. op: the memory-bound operation, None: matmul or attention.

    backward: its gradient. Matmuls have one label for all directions; the directions of attention are two kinds.
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
        """The label of the autograd nodes of operators with this label."""
        if self.kind is KernelKind.ATTENTION_FORWARD:
            return ATTENTION_BACKWARD
        return self if self.op is None else replace(self, backward=True)

    @property
    def profiler_name(self) -> str:
        """The name in a profile."""
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
    """The label of an operation after the last backward."""
    return OperatorLabel(KernelKind.OPTIMIZER, op)


def memory_bound_label(spec: MemoryBoundSpec) -> OperatorLabel:
    """The label of the forward of a memory-bound operator."""
    return OperatorLabel(spec.kind, spec.op)


def parse_label(name: str) -> OperatorLabel | None:
    """The (forward) label with this profiler name, None if it is no label."""
    prefix, _, text = name.partition("/")
    if prefix != _PREFIX:
        return None
    kind, _, op = text.partition("/")
    return OperatorLabel(KernelKind(kind), MemoryBoundOp(op) if op else None)


def record_label(label: OperatorLabel) -> AbstractContextManager[object]:
    """A context whose operators have the label, if a profiler is active."""
    return profiler.record_function(label.profiler_name) if profiler._is_profiler_enabled else nullcontext()
