"""Which kinds of kernels does a real step spend its time in, and how much memory do its tensors take?

One step under torch's profiler: on a CPU an operator's own time counts, on a GPU that of the kernels which it launched
(`calibrate.check.fold`).

Memory: on a GPU the allocator's own peak. On a CPU what torch's allocator reports to the profiler, added to what
stays from step to step: bytes of tensors, not of the process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity

from calibrate.check.fold import OnDevice, OnHost, folded
from calibrate.check.labels import Label
from calibrate.check.timeline import Timeline
from calibrate.check.trainer import Batch, Trainer, step
from clustersim.units import Bytes, Seconds
from clustersim.workload.kernels import KernelKind


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
    return Profile(_kinds(folded(profiler.events(), OnDevice() if on_gpu else OnHost())), peak)


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


def _kinds(seconds: Mapping[Label, Seconds]) -> dict[KernelKind, Seconds]:
    kinds = dict.fromkeys((label.kind for label in seconds), 0.0)
    for label, spent in seconds.items():
        kinds[label.kind] += spent
    return kinds
