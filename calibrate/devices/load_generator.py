"""What keeps a GPU as warm as training does between measurements?

Matmuls of random operands in the compute format of training, over and over: they draw as much power as a
step's matmuls, so that power, temperature and therefore clocks stay where they were. A kernel that only
waits (`torch.cuda._sleep`) draws little power, and a GPU behind one returns to its boost clock.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from calibrate.devices.telemetry_sampling import run_periodically
from clustersim.common.units import Seconds

_M, _N, _K = 4096, 1024, 16384  # 137 GFLOP: 0.1 to 1 ms; a result of 8 MB, so that little is left to be written back
_TIMED_MATMULS: Final = 8  # matmuls in a timed batch
_MAX_BATCH_MATMULS: Final = 256  # launched at once; a stream queues some 1000 kernels before the host must wait
_BATCH_SECONDS: Final = 0.01  # seconds of matmuls that are launched at once


@dataclass(frozen=True, slots=True)
class MatmulBatch:
    """`count` matmuls between two events."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    count: int

    @property
    def is_done(self) -> bool:
        """Whether the last matmul has finished."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def seconds_per_matmul(self) -> Seconds:
        """Seconds per matmul; waits until the batch has finished."""
        self.end.synchronize()
        return 1e-3 * float(self.start.elapsed_time(self.end)) / self.count


class LoadGenerator:
    """Matmul load on one GPU.

    background_stream: for load that runs while the host does something else; matmul_seconds: of one matmul, as
    last measured.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, background_stream: torch.cuda.Stream) -> None:
        self._device, self._background_stream = device, background_stream
        with torch.cuda.device(device):
            self._a, self._b = (torch.empty(*sizes, device=device, dtype=dtype) for sizes in ((_M, _K), (_K, _N)))
            self._out = torch.empty(_M, _N, device=device, dtype=dtype)
            self._a.normal_()  # random bits cost as much power as real data
            self._b.normal_()
        self._launch_timed_batch(_TIMED_MATMULS)  # warm-up: the library selects its kernel
        self.matmul_seconds = max(1e-6, self._launch_timed_batch(_TIMED_MATMULS).seconds_per_matmul())

    def launch_load(self, seconds: Seconds) -> None:
        """Launch matmuls of about `seconds` on the current stream: at least one, at most what its queue holds."""
        self._launch_matmuls(min(_MAX_BATCH_MATMULS, max(1, math.ceil(seconds / self.matmul_seconds))))

    def run_load(self, seconds: Seconds) -> Seconds:
        """Keep the GPU busy for `seconds` of device time without a gap; returns the last seconds per matmul."""
        elapsed, running = 0.0, self.launch_batch()
        while elapsed < seconds:
            next_batch = self.launch_batch()
            self.matmul_seconds = running.seconds_per_matmul()
            elapsed, running = elapsed + self.matmul_seconds * running.count, next_batch
        return self.matmul_seconds

    def launch_batch(self) -> "MatmulBatch":
        """Launch a batch of matmuls of about _BATCH_SECONDS on the current stream."""
        return self._launch_timed_batch(min(_MAX_BATCH_MATMULS, max(1, round(_BATCH_SECONDS / self.matmul_seconds))))

    def _launch_timed_batch(self, count: int) -> "MatmulBatch":
        with torch.cuda.device(self._device):  # events are recorded on this device's stream
            start = record_timed_event()
            self._launch_matmuls(count)
            return MatmulBatch(start, record_timed_event(), count)

    @contextmanager
    def background_load(self) -> Iterator[None]:
        """Keep the GPU busy while the block runs on the host: from another thread, on the background stream."""
        self._background_stream.wait_stream(torch.cuda.current_stream(self._device))

        def launch_and_wait() -> None:
            try:
                with torch.cuda.stream(self._background_stream):
                    self._background_stream.query()  # cuBLAS wants a context, which a thread has from its first call
                    self.launch_load(_BATCH_SECONDS)
                    self._background_stream.synchronize()
            except RuntimeError:  # the measuring thread gets the same error at its own next call, and reports it
                return

        stop = run_periodically(launch_and_wait, 0.0)
        try:
            yield
        finally:
            stop()
            torch.cuda.current_stream(self._device).wait_stream(self._background_stream)

    def _launch_matmuls(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)


def record_timed_event() -> torch.cuda.Event:
    """A timing event recorded now on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
