"""Offload tasks: when activations, gradients and weights are copied to the host and back.

A layer's activations are copied out once its forward has run, and back before its backward, on separate D2H
and H2D streams. A fixed number of device buffers, each as large as one layer's saved activations, bounds
device memory: a forward that will save activations, or a copy back, waits until the buffer used
`buffer_count` layers before is free, after its copy out or after the backward that read it. So with two
buffers forward is one layer ahead of the copies out, and copies back are one layer ahead of backward,
across all passes of a rank (Transformer Engine's `AsyncDoubleBufferGroupOffloadHandler`,
transformer_engine/pytorch/cpu_offload.py).

The optimizer's gradients are copied out, updated and copied back in layer-sized slices, so that the copies
overlap CPU work (Megatron-LM's `--overlap-cpu-optimizer-d2h-h2d`; Ren et al. 2021, arXiv:2101.06840,
section 5), or one slice after the other (`HostUpdate.SEQUENTIAL`, DeepSpeed).
They are copied out when all are reduced, as the norm is known only then, unless the host holds
all gradients: then each unit's are copied after its backward, or after their reduction, and the host
computes the norm (ZeRO-Offload). Weights come back in the format in which they are stored, and the next
step waits for them (no delayed parameter update). Shards on the host are copied where they are gathered and
reduced (torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py); accumulating the gradients
of several microbatches on the host is not counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from clustersim.common.units import Bytes
from clustersim.lowering.task_list import TaskList
from clustersim.parallel.mesh import HOST_GROUP
from clustersim.program.action import Action
from clustersim.program.task import CollectiveTask, CollectiveType, HostOp, HostOpKind, Operation, Stream

_STREAMS: Final = {
    HostOpKind.D2H: Stream.D2H,
    HostOpKind.ON_HOST: Stream.HOST,
    HostOpKind.H2D: Stream.H2D,
}


@dataclass(slots=True)
class HostTaskIssuer:
    """Issues one rank's host copies and host computation. buffer_count: activation buffers on the device."""

    tasks: TaskList
    buffer_count: int = 0
    _free_buffers: list[tuple[int, ...]] = field(init=False)
    _offload_tasks: dict[tuple[int, int], list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free_buffers = [()] * self.buffer_count

    def add_host_op(self, kind: HostOpKind, name: str, size_bytes: Bytes, depends_on: Sequence[int]) -> int:
        """Add a D2H or H2D copy, or CPU work, of `size_bytes`; return its task id."""
        host_op = HostOp(name, CollectiveType.SEND_RECV, HOST_GROUP.name, size_bytes, kind)
        return self.tasks.add(_STREAMS[kind], CollectiveTask(host_op, tuple(depends_on)))

    def slice_inputs(self, action: Action, operations: Sequence[Operation]) -> tuple[int, ...]:
        """Tasks that a slice of a pass waits for: its activations' H2D copy, or a buffer for those it will save."""
        if operations and operations[0].h2d_bytes:
            offload_task = self._offload_tasks[action.stage, action.microbatch].pop()
            return (
                self.add_host_op(
                    HostOpKind.H2D,
                    "fetch activations",
                    operations[0].h2d_bytes,
                    (offload_task, *self._acquire_buffer()),
                ),
            )
        return self._acquire_buffer() if operations and operations[-1].d2h_bytes else ()

    def add_offloads(self, action: Action, operations: Sequence[Operation], task: int) -> Iterator[int]:
        """Copy out what a slice of a pass (run as `task`) leaves, and record which buffers become free.

        Yields the copies of gradients.
        """
        if self.buffer_count and any(operation.is_last_use for operation in operations):
            self._free_buffers.append((task,))
        if operations and operations[-1].d2h_bytes:
            copy_task = self.add_host_op(HostOpKind.D2H, "offload activations", operations[-1].d2h_bytes, (task,))
            self._offload_tasks.setdefault((action.stage, action.microbatch), []).append(copy_task)
            self._free_buffers.append((copy_task,))
        if operations and operations[-1].gradient_d2h_bytes:
            yield self.add_host_op(HostOpKind.D2H, "offload gradients", operations[-1].gradient_d2h_bytes, (task,))

    def _acquire_buffer(self) -> tuple[int, ...]:
        return self._free_buffers.pop(0)


def split_at_host_copies(operations: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    """Split operations before each that fetches activations and after each that offloads activations or gradients."""
    begin = 0
    for index, operation in enumerate(operations):
        if operation.h2d_bytes and index > begin:
            yield tuple(operations[begin:index])
            begin = index
        if operation.d2h_bytes or operation.gradient_d2h_bytes:
            yield tuple(operations[begin : index + 1])
            begin = index + 1
    if begin < len(operations) or not operations:
        yield tuple(operations[begin:])
