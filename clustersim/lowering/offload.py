"""When do activations, gradients and weights go to the host, and when are they back?

A layer's activations are copied out once its forward has run, and back before its backward, on streams of their own.
A fixed number of buffers, each as large as what a layer keeps, bounds what is on the device meanwhile: whoever needs
one (a forward that will keep something, a copy back) waits for the buffer of so many layers ago to be free, by its copy
out or by the backward that read it. So with two buffers forward is one layer ahead of the copies out, and copies back
are one layer ahead of backward, through all passes of a rank (Transformer Engine's
`AsyncDoubleBufferGroupOffloadHandler`, transformer_engine/pytorch/cpu_offload.py).

The optimizer's gradients are copied out, updated and copied back in pieces of the size of a layer, so that the copies
run beside the CPU (Megatron-LM's `--overlap-cpu-optimizer-d2h-h2d`; Ren et al. 2021, arXiv:2101.06840, section 5). They
leave when all are reduced, as the norm is known only then, unless the host holds all gradients: then each unit's leave
behind its backward, or behind their reduction, and the host takes the norm (ZeRO-Offload). Weights come back in the
format in which they are stored, and the next step waits for them (no delayed parameter update). What a shard on the
host needs is copied where it is gathered and reduced (torch FSDP2,
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py); adding up the gradients of several microbatches on the host
is not counted.
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
class HostTasks:
    """What one rank copies to and from its host, and has it compute. buffers: of activations, on the device."""

    tasks: TaskList
    buffers: int = 0
    _free: list[tuple[int, ...]] = field(init=False)
    _there: dict[tuple[int, int], list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free = [()] * self.buffers

    def run(self, what: HostOpKind, name: str, size: Bytes, after: Sequence[int]) -> int:
        """Add a copy, or work of the CPU, of so many bytes; return its number."""
        exchange = HostOp(name, CollectiveType.SEND_RECV, HOST_GROUP.name, size, what)
        return self.tasks.add(_STREAMS[what], CollectiveTask(exchange, tuple(after)))

    def before(self, action: Action, operations: Sequence[Operation]) -> tuple[int, ...]:
        """What a piece of a pass waits for: its activations, or room for those that it will keep."""
        if operations and operations[0].h2d_bytes:
            there = self._there[action.stage, action.microbatch].pop()
            return (self.run(HostOpKind.H2D, "fetch activations", operations[0].h2d_bytes, (there, *self._room())),)
        return self._room() if operations and operations[-1].d2h_bytes else ()

    def after(self, action: Action, operations: Sequence[Operation], task: int) -> Iterator[int]:
        """Copy out what a piece of a pass, done as `task`, has left, and note which buffers are free.

        Yield copies of gradients.
        """
        if self.buffers and any(operation.is_last_use for operation in operations):
            self._free.append((task,))
        if operations and operations[-1].d2h_bytes:
            copy = self.run(HostOpKind.D2H, "offload activations", operations[-1].d2h_bytes, (task,))
            self._there.setdefault((action.stage, action.microbatch), []).append(copy)
            self._free.append((copy,))
        if operations and operations[-1].gradient_d2h_bytes:
            yield self.run(HostOpKind.D2H, "offload gradients", operations[-1].gradient_d2h_bytes, (task,))

    def _room(self) -> tuple[int, ...]:
        return self._free.pop(0)


def pieces(operations: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    """Cut operations before each that fetches activations and after each that saves some, or whose gradients leave."""
    begin = 0
    for place, operation in enumerate(operations):
        if operation.h2d_bytes and place > begin:
            yield tuple(operations[begin:place])
            begin = place
        if operation.d2h_bytes or operation.gradient_d2h_bytes:
            yield tuple(operations[begin : place + 1])
            begin = place + 1
    if begin < len(operations) or not operations:
        yield tuple(operations[begin:])
