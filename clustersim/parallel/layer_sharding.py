"""Which collectives do the ranks of a tensor- and context-parallel group run for one layer, and of what size?

With `tensor_parallel_copies` (torch's DTensor) activations are [batch, sequence, hidden] and the collectives
of sequence parallelism, which work on the first dimension, are on the second: what was gathered is
concatenated anew behind an all-gather, and what is reduced before a reduce-scatter, one copy of the whole
activation each (`all_gather_tensor` and `reduce_scatter_tensor` of torch/distributed/_functional_collectives.py;
pytorch/torchtitan pull request 437: two of them take 0.18 ms of 3 ms of an MLP with 8,192 tokens). Left out:
since December 2025 gathers of a single sequence are a view (pytorch/pytorch pull request 169404). The fused
kernels of asynchronous tensor parallelism (`tp_comm_overlap`) take the layout as it is.
"""

from dataclasses import dataclass

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel
from clustersim.model.memory_bound import copy_kernel
from clustersim.parallel.context_parallel import NO_EXCHANGE, ContextExchange, ContextParallel
from clustersim.parallel.layout import Layout
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.program.task import CollectiveType, CommOp, Operation, WorkType


@dataclass(frozen=True, slots=True)
class GatheredOperands:
    """Operands that are quantized before they are gathered. needs_amax: their global maximum is reduced first."""

    format: DType
    needs_amax: bool = False


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """Parameters of a layer's collectives.

    activation_bytes: of the unsharded activation [batch, sequence / cp, hidden]; format: its; context: what
    context-parallel ranks exchange, None: nothing; has_sharded_input, has_sharded_output:
    whether activations flow into and out of the layer's sharded regions (the embedding takes tokens, and the loss
    has no output); dispatch: token dispatch of a MoE layer; operands: format in which operands are gathered, if
    another; has_copies: collectives of sequence parallelism are copied before or after; gathers_per_linear,
    reduces_per_linear: every column-parallel layer gathers its input, or reduces that input's gradient, by itself;
    gathers_logits: the loss is computed of gathered logits.
    """

    layout: Layout
    activation_bytes: Bytes
    format: DType
    has_sharded_input: bool = True
    has_sharded_output: bool = True
    dispatch: TokenDispatch | None = None
    operands: GatheredOperands | None = None
    has_copies: bool = False
    gathers_per_linear: bool = False
    reduces_per_linear: bool = False
    gathers_logits: bool = False
    context: ContextParallel | None = None

    @property
    def sequence_parallel(self) -> bool:
        """Whether replicated regions hold a shard of the sequence."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    def gather_input(self, size: Bytes | None) -> CommOp | None:
        """The collective before a column-parallel matmul, forward; size: input bytes, None: an activation's."""
        is_gathered = self.sequence_parallel and self.has_sharded_input
        return self._comm_op("gather input", CollectiveType.ALL_GATHER, size) if is_gathered else None

    def reduce_output(self) -> CommOp | None:
        """The collective after a row-parallel matmul, forward."""
        if self.layout.tp == 1 or not self.has_sharded_output:
            return None
        return self._comm_op("reduce output", self._reduction_type)

    def gather_output_gradient(self) -> CommOp | None:
        """The collective before the backward of a row-parallel matmul."""
        is_gathered = self.sequence_parallel and self.has_sharded_output
        return self._comm_op("gather output gradient", CollectiveType.ALL_GATHER) if is_gathered else None

    def regather_input(self, size: Bytes | None) -> CommOp | None:
        """The all-gather of a column-parallel matmul's input for its weight gradient; overlaps the input gradient."""
        is_gathered = self.sequence_parallel and self.has_sharded_input
        return self._comm_op("gather input again", CollectiveType.ALL_GATHER, size) if is_gathered else None

    def reduce_input_gradient(self, size: Bytes | None) -> CommOp | None:
        """The reduction of a column-parallel matmul's input gradient, which overlaps the weight gradient."""
        if self.layout.tp == 1 or not self.has_sharded_input:
            return None
        return self._comm_op("reduce input gradient", self._reduction_type, size)

    def copy_of(self, comm_op: CommOp | None) -> Kernel | None:
        """The copy of what a collective gathers or scatters, where there is one."""
        copied = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)
        if not self.has_copies or comm_op is None or comm_op.collective not in copied:
            return None
        is_gather = comm_op.collective is CollectiveType.ALL_GATHER
        dtype = self.operands.format if is_gather and self.operands is not None else self.format
        return copy_kernel(f"{comm_op.name}.copy", dtype, round(comm_op.payload / dtype.bytes))

    def amax_operations(self, gathered: CommOp | None, work_type: WorkType) -> list[Operation]:
        """All-reduce of the amax of a tensor over the ranks whose shards are gathered, where quantization needs it."""
        if gathered is None or self.operands is None or not self.operands.needs_amax:
            return []
        size, collective = float(DType.FP32.bytes), CollectiveType.ALL_REDUCE
        return [
            Operation(
                CommOp("largest element", collective, self.layout.tp_group.name, size, reduce_dtype=DType.FP32),
                work_type,
            )
        ]

    @property
    def kv_bytes(self) -> Bytes:
        """Bytes of the keys and values of the full sequence on this rank."""
        return 0.0 if self.context is None else self.context.kv_bytes

    def context_exchange(self, *, backward: bool) -> ContextExchange:
        """What context-parallel ranks exchange for attention in one pass."""
        return NO_EXCHANGE if self.context is None else self.context.exchange(backward=backward)

    def vocab_parallel_loss(self, tokens: int) -> list[Operation]:
        """Collectives of a vocab-parallel cross entropy: FP32 maximum, target logit and sum of every token."""
        if self.layout.tp == 1 or self.gathers_logits:
            return []
        names = ("largest logit", "target logit", "sum of exponentials")
        payload = float(tokens * DType.FP32.bytes)
        return [
            Operation(
                CommOp(name, CollectiveType.ALL_REDUCE, self.layout.tp_group.name, payload, reduce_dtype=DType.FP32),
                WorkType.FORWARD,
            )
            for name in names
        ]

    @property
    def _reduction_type(self) -> CollectiveType:
        return CollectiveType.REDUCE_SCATTER if self.sequence_parallel else CollectiveType.ALL_REDUCE

    def _comm_op(self, name: str, collective: CollectiveType, size: Bytes | None = None) -> CommOp:
        payload = self.activation_bytes if size is None else size
        if collective is CollectiveType.ALL_GATHER and self.operands is not None:
            payload *= self.operands.format.bytes / self.format.bytes
        return CommOp(
            name,
            collective,
            self.layout.tp_group.name,
            payload,
            reduce_dtype=self.format if collective.is_reduction else None,
        )
