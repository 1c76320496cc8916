"""What keeps a GPU as warm as training does, while nothing is measured on it?

A matrix product of random operands in the format that training computes in, over and over: it draws what a step's
matmuls draw, so that power and temperature, and with them the clocks, stay where they were. A kernel that only waits
(`torch.cuda._sleep`) draws little, and a GPU that waits behind one is at its boost clock again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from calibrate.devices.telemetry_sampling import repeated
from clustersim.common.units import Seconds

_M, _N, _K = 4096, 1024, 16384  # 137 GFLOP: 0.1 to 1 ms; a result of 8 MB, so that little is left to be written back
_TIMED: Final = 8  # products
_MOST: Final = 256  # that are launched at once; a stream takes in some 1000 kernels before the host must wait
_AHEAD: Final = 0.01  # seconds of products that are launched at once


@dataclass(frozen=True, slots=True)
class Batch:
    """So many products between two events."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    many: int

    @property
    def done(self) -> bool:
        """Whether the last of them is."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> Seconds:
        """Seconds of each of them, when they are done."""
        self.end.synchronize()
        return 1e-3 * float(self.start.elapsed_time(self.end)) / self.many


class Filler:
    """Products on one GPU. aside: the stream for what runs beside the host; seconds: of one, as the last ones took."""

    def __init__(self, device: torch.device, dtype: torch.dtype, aside: torch.cuda.Stream) -> None:
        self._device, self._aside = device, aside
        with torch.cuda.device(device):
            self._a, self._b = (torch.empty(*sizes, device=device, dtype=dtype) for sizes in ((_M, _K), (_K, _N)))
            self._out = torch.empty(_M, _N, device=device, dtype=dtype)
            self._a.normal_()  # whose bits cost the power that real ones do
            self._b.normal_()
        self._batch(_TIMED)  # the library chooses its kernel
        self.seconds = max(1e-6, self._batch(_TIMED).seconds())

    def launch(self, seconds: Seconds) -> None:
        """Products of about so many seconds on the current stream, at least one, at most what it takes in at once."""
        self._products(min(_MOST, max(1, math.ceil(seconds / self.seconds))))

    def run(self, seconds: Seconds) -> Seconds:
        """Keep the GPU busy for so long, by its own clock, without a gap; seconds of a product at the end of it."""
        done, last = 0.0, self.batch()
        while done < seconds:
            following = self.batch()
            self.seconds = last.seconds()
            done, last = done + self.seconds * last.many, following
        return self.seconds

    def batch(self) -> "Batch":
        """Some products, launched now on the current stream."""
        return self._batch(min(_MOST, max(1, round(_AHEAD / self.seconds))))

    def _batch(self, many: int) -> "Batch":
        with torch.cuda.device(self._device):  # whose stream events are recorded on
            start = timed_event()
            self._products(many)
            return Batch(start, timed_event(), many)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Keep the GPU busy while the host does something else: in another thread, on a stream of its own."""
        self._aside.wait_stream(torch.cuda.current_stream(self._device))

        def fill() -> None:
            try:
                with torch.cuda.stream(self._aside):
                    self._aside.query()  # cuBLAS wants a context, which a thread has from its first call
                    self.launch(_AHEAD)
                    self._aside.synchronize()
            except RuntimeError:  # the thread that measures meets it at its own next call, and says so
                return

        end = repeated(fill, 0.0)
        try:
            yield
        finally:
            end()
            torch.cuda.current_stream(self._device).wait_stream(self._aside)

    def _products(self, many: int) -> None:
        for _ in range(many):
            torch.mm(self._a, self._b, out=self._out)


def timed_event() -> torch.cuda.Event:
    """An event that is recorded now, on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
