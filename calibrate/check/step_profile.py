"""Which kinds of kernels does a real step spend its time in, and how much memory do its tensors take?

One step under torch's profiler: on a CPU an operator's own time counts, on a GPU that of the kernels which it launched
(`calibrate.check.profile_attribution`), behind steps that are not written down.

Memory: on a GPU the allocator's own peak. On a CPU what torch's allocator reports to the profiler, added to what
stays from step to step: bytes of tensors, not of the process.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity

from calibrate.check.operator_labels import Label
from calibrate.check.phase_timer import Timeline
from calibrate.check.profile_attribution import OnDevice, OnHost, folded
from calibrate.check.trainer import Batch, Trainer, step
from clustersim.common.units import Bytes, Seconds
from clustersim.model.kernels import KernelKind

_BEFORE: Final = 2  # steps on a GPU before the one that is profiled


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of each kind of kernel in one step, and the peak of memory in bytes of tensors."""

    kinds: Mapping[KernelKind, Seconds]
    peak: Bytes


def profiled(trainer: Trainer, batch: Batch, device: torch.device) -> Profile:
    """Profile one step."""
    if device.type == "cuda":
        return _on_gpu(trainer, batch, device)
    resident = _resident([*trainer.update.states(), batch.tokens, batch.targets])
    timeline = Timeline(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step(trainer, batch, timeline)
        timeline.read()
    return Profile(_kinds(folded(profiler.events(), OnHost())), resident + _peak(profiler))


def _on_gpu(trainer: Trainer, batch: Batch, device: torch.device) -> Profile:
    torch.cuda.reset_peak_memory_stats(device)
    events = warm_events(lambda: step(trainer, batch, Timeline(device)), _BEFORE, 1)
    return Profile(_kinds(folded(events, OnDevice())), float(torch.cuda.max_memory_allocated(device)))


def warm_events(action: Callable[[], None], before: int, many: int) -> Any:
    """What the profiler writes down of so many runs on the current GPU, right behind others of which it does not.

    A GPU that was idle, as it is while the profiler starts, is faster for some 0.15 s, until its power is capped.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=before, active=many, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as profiler:
        for _ in range(before + many - 1):
            action()
            profiler.step()
        action()
        torch.cuda.synchronize()
        profiler.step()
    return profiler.events()


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
