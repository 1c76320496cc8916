"""Profile of one real step: kernel time by kind, and peak tensor memory.

One step under torch's profiler: on a CPU an operator's self time is used, on a GPU the time of the kernels
that it launched (`calibrate.check.profile_attribution`).

Memory: on a GPU the allocator's own peak, less what is not of the training. On a CPU what torch's allocator
reports to the profiler, plus the tensors that persist from step to step: bytes of tensors, not of the process.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity

from calibrate.check.operator_labels import OperatorLabel
from calibrate.check.phase_timer import PhaseTimer
from calibrate.check.profile_attribution import DeviceTimer, HostTimer, seconds_by_label
from calibrate.check.trainer import Trainer, TrainingBatch, training_step
from clustersim.common.units import Bytes, Seconds
from clustersim.model.kernels import KernelKind

_BEFORE: Final = 2  # steps on a GPU before the one that is profiled


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of each kind of kernel in one step, and the peak of tensor memory in bytes."""

    kernel_kinds: Mapping[KernelKind, Seconds]
    peak_bytes: Bytes


def profile_step(trainer: Trainer, batch: TrainingBatch, device: torch.device) -> StepProfile:
    """Profile one step."""
    resident_bytes = _resident_bytes([*trainer.weight_update.persistent_tensors(), batch.tokens, batch.targets])
    if device.type == "cuda":
        return _on_gpu(trainer, batch, device, resident_bytes)
    timer = PhaseTimer(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        training_step(trainer, batch, timer)
        timer.read_step()
    return StepProfile(
        _seconds_by_kind(seconds_by_label(profiler.events(), HostTimer())), resident_bytes + _peak_bytes(profiler)
    )


def _on_gpu(trainer: Trainer, batch: TrainingBatch, device: torch.device, resident_bytes: Bytes) -> StepProfile:
    # between steps: the load that keeps the GPU warm, libraries' workspaces, operands of kernels measured meanwhile
    foreign_bytes = torch.cuda.memory_allocated(device) - resident_bytes
    torch.cuda.reset_peak_memory_stats(device)
    events = warm_events(lambda: training_step(trainer, batch, PhaseTimer(device)), _BEFORE, 1)
    peak_bytes = torch.cuda.max_memory_allocated(device) - foreign_bytes
    return StepProfile(_seconds_by_kind(seconds_by_label(events, DeviceTimer())), peak_bytes)


def warm_events(action: Callable[[], None], warmup_count: int, count: int) -> Any:
    """Profiler events of `count` runs on the current GPU, right after `warmup_count` runs that are not recorded.

    A GPU that was idle, as it is while the profiler starts, is faster for some 0.15 s, until its power is capped.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=warmup_count, active=count, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as profiler:
        for _ in range(warmup_count + count - 1):
            action()
            profiler.step()
        action()
        torch.cuda.synchronize()
        profiler.step()
    return profiler.events()


def _resident_bytes(tensors: list[Tensor]) -> Bytes:
    """Bytes of the distinct storages of tensors."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return float(sum(storages.values()))


def _peak_bytes(profiler: Any) -> Bytes:
    """Peak of allocations since the profile began, minus memory from before that was freed."""
    allocated, peak = 0, 0
    for _, size in sorted(_allocation_events(profiler.profiler.kineto_results.experimental_event_tree())):
        allocated += size
        peak = max(peak, allocated)
    return float(peak)


def _allocation_events(events: Any) -> Iterator[tuple[int, int]]:
    """Time in nanoseconds and bytes of each allocation event: negative if freed."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocation_events(event.children)


def _seconds_by_kind(seconds_of_label: Mapping[OperatorLabel, Seconds]) -> dict[KernelKind, Seconds]:
    by_kind = dict.fromkeys((label.kind for label in seconds_of_label), 0.0)
    for label, label_seconds in seconds_of_label.items():
        by_kind[label.kind] += label_seconds
    return by_kind
