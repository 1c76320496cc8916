"""How are a predicted and a measured step put beside each other? As a table for people and as JSON for programs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.check.phase_timer import StepPhase
from calibrate.collectives.tables import interference_table
from clustersim.common.units import Bytes, Seconds, format_bytes, format_seconds
from clustersim.cost.calibration_record import InterferenceSample, kernel_slowdowns

MAX_LISTED = 6  # kernels that were not measured


@dataclass(frozen=True, slots=True)
class TimeComparison:
    """Seconds, predicted and measured."""

    predicted: Seconds
    measured: Seconds

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where nothing was measured."""
        return None if self.measured <= 0.0 else self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class UnmeasuredKernel:
    """A kernel of the plan that was not measured: its seconds in the prediction, by a model, and why."""

    kernel_name: str
    seconds: Seconds
    reason: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """Means of a GPU's SM clock in MHz, under kernels alone and in steps."""

    alone: float
    in_steps: float


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step, predicted and measured.

    fastest, slowest: of the measured steps; parts: means over ranks; kinds: kernels by kind, means over ranks, measured
    under a profiler; peaks: bytes of tensors on the fullest rank, predicted and measured; provenance: what the
    prediction rests on; beside: kernels and collectives beside each other, as far as they were measured; layers: of the
    model that was trained, out of `model_layers`; modelled: kernels that were not measured, those with most seconds first;
    clocks: None where the device does not tell them.
    """

    name: str
    device: str
    layout: str
    layers: int
    model_layers: int
    steps: int
    step: TimeComparison
    fastest: Seconds
    slowest: Seconds
    phases: Mapping[StepPhase, TimeComparison]
    kernel_kinds: Mapping[str, TimeComparison]
    predicted_peak: Bytes
    measured_peak: Bytes
    provenance: Mapping[str, float]
    interference: tuple[InterferenceSample, ...] = ()
    unmeasured: tuple[UnmeasuredKernel, ...] = ()
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
            "parts": {phase.value: _time_fields(times) for phase, times in self.phases.items()},
            "kinds": {kind: _time_fields(times) for kind, times in self.kernel_kinds.items()},
            "device": self.device,
            "layout": self.layout,
            "layers": self.layers,
            "layers_of_model": self.model_layers,
            "steps": self.steps,
            "sm_clock_mhz": None if self.clocks is None else asdict(self.clocks),
            "interference": {
                f"{kind.value} beside {kernel_class.value} kernels": part
                for (kind, kernel_class), part in kernel_slowdowns(self.interference).items()
            },
            "provenance_share": dict(self.provenance),
            "not_measured": [
                {
                    "kernel": unmeasured_kernel.kernel_name,
                    "predicted_s": unmeasured_kernel.seconds,
                    "why": unmeasured_kernel.reason,
                }
                for unmeasured_kernel in self.unmeasured
            ],
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def to_text(self) -> str:
        """A table."""
        return "\n".join(self._text_lines())

    def _text_lines(self) -> Iterator[str]:
        layers_text = "" if self.layers == self.model_layers else f", {self.layers} of {self.model_layers} layers"
        yield f"{self.name}{layers_text}: {self.layout} on {self.device}"
        spread = f"{format_seconds(self.fastest)} to {format_seconds(self.slowest)}"
        yield f"{self.steps} real steps, {spread}; median beside the prediction"
        yield f"{'':<24}{'predicted':>12}{'measured':>12}{'error':>9}"
        yield _table_line("step", self.step)
        for phase, times in self.phases.items():
            yield _table_line(f"  {phase.value}", times)
        yield "kernels by kind (measured under a profiler, which slows small ones)"
        for kind, times in sorted(self.kernel_kinds.items(), key=lambda each: -each[1].measured):
            yield _table_line(f"  {kind}", times)
        peaks = f"{format_bytes(self.predicted_peak):>12}{format_bytes(self.measured_peak):>12}"
        yield f"{'peak memory of tensors':<24}{peaks}{100 * self.peak_error:>+8.1f} %"
        if self.clocks is not None:
            alone, in_steps = self.clocks.alone, self.clocks.in_steps
            yield f"SM clock: {alone:,.0f} MHz under kernels alone, {in_steps:,.0f} MHz in steps"
        if self.interference:
            yield interference_table(self.interference)
        yield from self._unmeasured_lines()
        shares = ", ".join(f"{100 * share:.1f} % {name}" for name, share in self.provenance.items() if share > 0)
        yield f"the prediction's seconds are {shares}"

    def _unmeasured_lines(self) -> Iterator[str]:
        """Which kernels the prediction has from a model."""
        if not self.unmeasured:
            return
        seconds = format_seconds(sum(unmeasured_kernel.seconds for unmeasured_kernel in self.unmeasured))
        yield f"{seconds} of the prediction rest on a model of kernels that were not measured:"
        for item in self.unmeasured[:MAX_LISTED]:
            yield _table_line(f"  {item.kernel_name}", TimeComparison(item.seconds, 0.0)).rstrip() + f"  {item.reason}"
        if len(self.unmeasured) > MAX_LISTED:
            yield f"  and {len(self.unmeasured) - MAX_LISTED} others"


def _time_fields(times: TimeComparison) -> dict[str, float | None]:
    return {"predicted_s": times.predicted, "measured_s": times.measured, "error": times.error}


def _table_line(name: str, times: TimeComparison) -> str:
    error = "" if times.error is None else f"{100 * times.error:>+7.1f} %"
    return f"{name:<24}{format_seconds(times.predicted):>12}{format_seconds(times.measured):>12}{error:>9}"
