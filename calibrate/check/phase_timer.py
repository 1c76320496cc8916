"""Timing of the forward, backward and optimizer phases of a real step.

On a CPU the host's clock is read; on a GPU events are recorded among the kernels and read when all is done,
so that the host runs ahead as it does in training. What no phase covers (zeroing gradients, waiting for
another stage) is `OTHER`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Any, Final

import torch

from clustersim.common.units import Seconds


class StepPhase(Enum):
    """Phases of a step; the value is the label in results."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


TIMED_PHASES: Final = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: its seconds, and those of its phases, which sum to them."""

    seconds: Seconds
    phases: Mapping[StepPhase, Seconds]


@dataclass(slots=True)
class PhaseTimer:
    """Collects the phases of one step on one rank."""

    device: torch.device
    _spans: list[tuple[StepPhase | None, Any, Any]] = field(default_factory=list)

    @contextmanager
    def time_phase(self, phase: StepPhase | None) -> Iterator[None]:
        """A context that attributes its time to a phase; None: it is the full step."""
        begin = self._now()
        yield
        self._spans.append((phase, begin, self._now()))

    def read_step(self) -> StepTime:
        """The last step; waits until the device is done with it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = dict.fromkeys((*TIMED_PHASES, None), 0.0)
        for phase, begin, end in self._spans:
            seconds[phase] += self._elapsed_seconds(begin, end)
        self._spans.clear()
        step_seconds = seconds.pop(None)
        phases = {phase: seconds[phase] for phase in TIMED_PHASES}
        return StepTime(step_seconds, {**phases, StepPhase.OTHER: step_seconds - sum(phases.values())})

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_seconds(self, begin: Any, end: Any) -> Seconds:
        return float(end - begin) if self.device.type != "cuda" else float(begin.elapsed_time(end)) * 1e-3
