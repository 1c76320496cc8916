"""CUPTI of a fake GPU: torch's profiler, whose operators contain the kernels that `fake_cuda` ran for them.

    FakeCupti(cuda, monkeypatch)        torch.profiler.profile records the kernels of `fake_tensors` on the GPU

Every kernel is an event inside the operator that launched it; after profiling it becomes one of that
operator's `kernels`, and an event of the device timeline, as in torch's parser of Kineto results.
"""

from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval, Kernel
from torch.profiler import ProfilerActivity, record_function

from tests.calibrate.fake_cuda import FakeCuda
from tests.calibrate.fake_gpu import FakeKernel, VirtualStream

_KERNEL = "fake::kernel/"
_PROFILE = torch.profiler.profile


class FakeCupti:
    """Records kernels while a profile is taken."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu = cuda.gpu()
        self._run = self._gpu.run
        self.spans: list[tuple[float, float, float]] | None = None
        monkeypatch.setattr(self._gpu, "run", self.run_steps)
        monkeypatch.setattr(torch.profiler, "profile", self.profile_steps)

    def run_steps(self, stream: VirtualStream, work: FakeKernel) -> None:
        """Run a kernel and record it inside the operator that launched it."""
        if self.spans is None:
            self._run(stream, work)
            return
        with record_function(f"{_KERNEL}{len(self.spans)}"):
            self._run(stream, work)
        self.spans.append((self._gpu.clock.now, self._gpu._starts[-1], self._gpu._spans[-1][0]))

    def profile_steps(self, activities: Any, **options: Any) -> "_Profile":
        """`torch.profiler.profile`."""
        has_cuda = ProfilerActivity.CUDA in activities
        return _Profile(self if has_cuda else None, _PROFILE(activities=[ProfilerActivity.CPU], **options))


class _Profile:
    def __init__(self, cupti: FakeCupti | None, real: Any) -> None:
        self._cupti, self._real = cupti, real
        self._events: list[Any] = []

    def __enter__(self) -> Self:
        if self._cupti is not None:
            self._cupti.spans = []
        self._real.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._real.__exit__(*reason)
        self._events = list(self._real.events())
        if self._cupti is not None:
            spans, self._cupti.spans = self._cupti.spans, None
            self._events = _with_kernels(self._events, spans or [])

    def step(self) -> None:
        self._real.step()

    def events(self) -> list[Any]:
        return self._events


def _with_kernels(events: list[Any], spans: list[tuple[float, float, float]]) -> list[Any]:
    kernel_events = [event for event in events if not event.name.startswith(_KERNEL)]
    for event in events:
        if event.name.startswith(_KERNEL):
            correlation_id = int(event.name.removeprefix(_KERNEL))
            launch_time, start, end = spans[correlation_id]
            correlation = SimpleNamespace(launcher=event.cpu_parent, number=correlation_id)
            kernel_events.append(
                _device_event(correlation, "cudaLaunchKernel", DeviceType.CPU, (launch_time, launch_time))
            )
            kernel_events.append(_device_event(correlation, "kernel", DeviceType.CUDA, (start, end)))
            if event.cpu_parent is not None:
                event.cpu_parent.kernels.append(Kernel("kernel", 0, 1e6 * (end - start)))
                event.cpu_parent.cpu_children.remove(event)
    return kernel_events


def _device_event(correlation: Any, name: str, device: DeviceType, span: tuple[float, float]) -> Any:
    """A kernel, or the call that launched it: both have its correlation id, and the operator's."""
    return SimpleNamespace(
        name=name,
        id=correlation.number,
        device_type=device,
        cpu_parent=None,
        cpu_children=[],
        kernels=[],
        time_range=Interval(1e6 * span[0], 1e6 * span[1]),
        thread=0,
        fwd_thread=0,
        sequence_nr=-1,
        is_user_annotation=False,
    )
