"""When does a real step begin and end its forward, its backward and its optimizer?

On a CPU the host's clock is read; on a GPU events are queued among the kernels and read when all is done, so that the
host runs ahead as it does in training. What no part covers (zeroing gradients, waiting for another stage) is `OTHER`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Any, Final

import torch

from clustersim.common.units import Seconds


class Part(Enum):
    """Parts of a step; the value is its name in answers."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


TIMED: Final = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: its seconds, and those of its parts, which sum to them."""

    seconds: Seconds
    parts: Mapping[Part, Seconds]


@dataclass(slots=True)
class Timeline:
    """Collects the parts of one step on one rank."""

    device: torch.device
    _spans: list[tuple[Part | None, Any, Any]] = field(default_factory=list)

    @contextmanager
    def of(self, part: Part | None) -> Iterator[None]:
        """What runs inside belongs to a part; None: it is the whole step."""
        begin = self._now()
        yield
        self._spans.append((part, begin, self._now()))

    def read(self) -> StepTime:
        """The step that was run last; waits until the device is done with it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = dict.fromkeys((*TIMED, None), 0.0)
        for part, begin, end in self._spans:
            seconds[part] += self._between(begin, end)
        self._spans.clear()
        whole = seconds.pop(None)
        parts = {part: seconds[part] for part in TIMED}
        return StepTime(whole, {**parts, Part.OTHER: whole - sum(parts.values())})

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> Seconds:
        return float(end - begin) if self.device.type != "cuda" else float(begin.elapsed_time(end)) * 1e-3
