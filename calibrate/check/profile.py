"""Which kinds of kernels does a real step spend its time in, and how much memory do its tensors take?

One step under torch's profiler. Its operators are nested: an operator belongs to the kind of the label around it; one
of backward to that of the forward operator whose sequence number it has. What autograd adds where the residual forked
is a residual's gradient sum, AccumulateGrad is a copy. On a CPU an operator's own time counts, on a GPU that of the
kernels which it launched. What has no label (views, the framework's own) is left out, and so are collectives, in which
a CPU waits for others.

Memory: on a GPU the allocator's own peak. On a CPU what torch's allocator reports to the profiler, added to what
stays from step to step: bytes of tensors, not of the process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity

from calibrate.check.timeline import Timeline
from calibrate.check.trainer import Batch, Trainer, step
from clustersim.units import Bytes, Seconds
from clustersim.workload.kernels import KernelKind

_LABELS: Final = {kind.value: kind for kind in KernelKind}
_NODE: Final = "autograd::engine::evaluate_function: "
_ADDITIONS: Final = ("aten::add", "aten::add_")
_SUMS: Final = ("aten::sum",)
_ACCUMULATE: Final = "AccumulateGrad"
_COLLECTIVES: Final = ("_c10d_functional", "c10d", "gloo:", "nccl:", "DistributedDataParallel", "FSDP")
_BACKWARD: Final = {KernelKind.ATTENTION_FORWARD: KernelKind.ATTENTION_BACKWARD}


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of each kind of kernel in one step, and the peak of memory in bytes of tensors."""

    kinds: Mapping[KernelKind, Seconds]
    peak: Bytes


def profiled(trainer: Trainer, batch: Batch, device: torch.device) -> Profile:
    """Profile one step."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    resident = _resident([*trainer.update.states(), batch.tokens, batch.targets])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    timeline = Timeline(device)
    with torch.profiler.profile(activities=activities, profile_memory=not on_gpu, acc_events=True) as profiler:
        step(trainer, batch, timeline)
        timeline.read()
    peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else resident + _peak(profiler)
    return Profile(_kinds(profiler.events(), on_gpu=on_gpu), peak)


def _resident(tensors: list[Tensor]) -> Bytes:
    """Bytes of the storages of tensors, each once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return float(sum(storages.values()))


def _peak(profiler: Any) -> Bytes:
    """The most that was allocated at a time since the profile began, less what was freed of what had been before."""
    held, peak = 0, 0
    for _, size in sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree())):
        held += size
        peak = max(peak, held)
    return float(peak)


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    """When, and how many bytes: below zero where they are freed."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _kinds(events: Any, *, on_gpu: bool) -> dict[KernelKind, Seconds]:
    made = _sequence(events)
    seconds: dict[KernelKind, Seconds] = {}
    for root in (event for event in events if event.cpu_parent is None):
        for event, kind in _walk(root, None, made):
            if kind is not None:
                seconds[kind] = seconds.get(kind, 0.0) + _seconds(event, on_gpu=on_gpu)
    return seconds


def _seconds(event: Any, *, on_gpu: bool) -> Seconds:
    if on_gpu:
        return float(sum(kernel.duration for kernel in event.kernels)) * 1e-6
    return float(event.self_cpu_time_total) * 1e-6


def _sequence(events: Any) -> dict[int, KernelKind]:
    """The kind of the forward operator that made each node of the graph: the last one that saw its number."""
    made: dict[int, KernelKind] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        kind = _around(event)
        if kind is not None and event.sequence_nr >= 0 and not event.name.startswith(_NODE):
            made[event.sequence_nr] = kind
    return made


def _around(event: Any) -> KernelKind | None:
    """The nearest label around an operator of the forward."""
    while event is not None:
        if event.name in _LABELS:
            return _LABELS[event.name]
        event = event.cpu_parent
    return None


def _walk(event: Any, kind: KernelKind | None, made: Mapping[int, KernelKind]) -> Iterator[tuple[Any, Any]]:
    """An operator and those inside it, with their kinds."""
    kind = _kind(event, kind, made)
    yield event, kind
    for inner in event.cpu_children:
        yield from _walk(inner, kind, made)


def _kind(event: Any, outer: KernelKind | None, made: Mapping[int, KernelKind]) -> KernelKind | None:
    name = event.name
    if name.startswith(_COLLECTIVES):
        return None
    if name in _LABELS:
        return _LABELS[name]
    if name.startswith(_NODE):
        return _of_node(name, made.get(event.sequence_nr))
    beside_node = event.cpu_parent is not None and event.cpu_parent.name.startswith(_NODE)
    return _of_engine(name, outer) if beside_node else outer


def _of_node(name: str, forward: KernelKind | None) -> KernelKind | None:
    """The kind of a node of backward, by that of its forward operator."""
    if _ACCUMULATE in name:
        return KernelKind.COPY
    return None if forward is None else _BACKWARD.get(forward, forward)


def _of_engine(name: str, node: KernelKind | None) -> KernelKind | None:
    """The kind of what runs in a node's place: the node itself, or what the engine does with its result."""
    if name in _ADDITIONS and node is not KernelKind.COPY:
        return KernelKind.RESIDUAL
    if name in _SUMS and node is KernelKind.MATMUL:
        return KernelKind.COPY
    return node
