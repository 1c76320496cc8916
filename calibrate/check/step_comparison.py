"""How are a predicted and a measured step put beside each other? As a table for people and as JSON for programs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.check.phase_timer import Part
from calibrate.collectives.tables import beside_table
from clustersim.common.units import Bytes, Seconds, format_bytes, format_seconds
from clustersim.cost.calibration_record import InterferenceSample, kernel_slowdowns

SHOWN = 6  # kernels that were not measured


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds, predicted and measured."""

    predicted: Seconds
    measured: Seconds

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where nothing was measured."""
        return None if self.measured <= 0.0 else self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Modelled:
    """A kernel of the plan that was not measured: its seconds in the prediction, by a model, and why."""

    kernel: str
    seconds: Seconds
    why: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """Means of a GPU's SM clock in MHz, under kernels alone and in steps."""

    alone: float
    in_steps: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step, predicted and measured.

    fastest, slowest: of the measured steps; parts: means over ranks; kinds: kernels by kind, means over ranks, measured
    under a profiler; peaks: bytes of tensors on the fullest rank, predicted and measured; provenance: what the
    prediction rests on; beside: kernels and collectives beside each other, as far as they were measured; layers: of the
    model that was trained, out of `layers_of`; modelled: kernels that were not measured, those with most seconds first;
    clocks: None where the device does not tell them.
    """

    name: str
    device: str
    layout: str
    layers: int
    layers_of: int
    steps: int
    step: Pair
    fastest: Seconds
    slowest: Seconds
    parts: Mapping[Part, Pair]
    kinds: Mapping[str, Pair]
    predicted_peak: Bytes
    measured_peak: Bytes
    provenance: Mapping[str, float]
    beside: tuple[InterferenceSample, ...] = ()
    modelled: tuple[Modelled, ...] = ()
    clocks: Clocks | None = None

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak of memory, less one."""
        return self.predicted_peak / self.measured_peak - 1.0

    def to_json(self) -> str:
        """The comparison as one JSON object, in seconds, bytes and fractions."""
        content: dict[str, Any] = {
            "name": self.name,
            "predicted_s": self.step.predicted,
            "measured_s": self.step.measured,
            "error": self.step.error,
            "measured_fastest_s": self.fastest,
            "measured_slowest_s": self.slowest,
            "predicted_peak_bytes": self.predicted_peak,
            "measured_peak_bytes": self.measured_peak,
            "peak_error": self.peak_error,
            "parts": {part.value: _fields(pair) for part, pair in self.parts.items()},
            "kinds": {kind: _fields(pair) for kind, pair in self.kinds.items()},
            "device": self.device,
            "layout": self.layout,
            "layers": self.layers,
            "layers_of_model": self.layers_of,
            "steps": self.steps,
            "sm_clock_mhz": None if self.clocks is None else asdict(self.clocks),
            "interference": {
                f"{kind.value} beside {kernel_class.value} kernels": part
                for (kind, kernel_class), part in kernel_slowdowns(self.beside).items()
            },
            "provenance_share": dict(self.provenance),
            "not_measured": [
                {"kernel": modelled.kernel, "predicted_s": modelled.seconds, "why": modelled.why}
                for modelled in self.modelled
            ],
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def to_text(self) -> str:
        """A table."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        cut = "" if self.layers == self.layers_of else f", {self.layers} of {self.layers_of} layers"
        yield f"{self.name}{cut}: {self.layout} on {self.device}"
        spread = f"{format_seconds(self.fastest)} to {format_seconds(self.slowest)}"
        yield f"{self.steps} real steps, {spread}; median beside the prediction"
        yield f"{'':<24}{'predicted':>12}{'measured':>12}{'error':>9}"
        yield _line("step", self.step)
        for part, pair in self.parts.items():
            yield _line(f"  {part.value}", pair)
        yield "kernels by kind (measured under a profiler, which slows small ones)"
        for kind, pair in sorted(self.kinds.items(), key=lambda each: -each[1].measured):
            yield _line(f"  {kind}", pair)
        peaks = f"{format_bytes(self.predicted_peak):>12}{format_bytes(self.measured_peak):>12}"
        yield f"{'peak memory of tensors':<24}{peaks}{100 * self.peak_error:>+8.1f} %"
        if self.clocks is not None:
            alone, in_steps = self.clocks.alone, self.clocks.in_steps
            yield f"SM clock: {alone:,.0f} MHz under kernels alone, {in_steps:,.0f} MHz in steps"
        if self.beside:
            yield beside_table(self.beside)
        yield from self._not_measured()
        shares = ", ".join(f"{100 * share:.1f} % {name}" for name, share in self.provenance.items() if share > 0)
        yield f"the prediction's seconds are {shares}"

    def _not_measured(self) -> Iterator[str]:
        """Which kernels the prediction has from a model."""
        if not self.modelled:
            return
        seconds = format_seconds(sum(modelled.seconds for modelled in self.modelled))
        yield f"{seconds} of the prediction rest on a model of kernels that were not measured:"
        for item in self.modelled[:SHOWN]:
            yield _line(f"  {item.kernel}", Pair(item.seconds, 0.0)).rstrip() + f"  {item.why}"
        if len(self.modelled) > SHOWN:
            yield f"  and {len(self.modelled) - SHOWN} others"


def _fields(pair: Pair) -> dict[str, float | None]:
    return {"predicted_s": pair.predicted, "measured_s": pair.measured, "error": pair.error}


def _line(name: str, pair: Pair) -> str:
    error = "" if pair.error is None else f"{100 * pair.error:>+7.1f} %"
    return f"{name:<24}{format_seconds(pair.predicted):>12}{format_seconds(pair.measured):>12}{error:>9}"
