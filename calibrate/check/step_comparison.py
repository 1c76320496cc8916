"""Comparison of a predicted and a measured step, as a text table and as JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.check.phase_timer import StepPhase
from calibrate.collectives.tables import interference_table
from clustersim.common.units import Bytes, Seconds, format_bytes, format_seconds
from clustersim.cost.calibration_record import InterferenceSample, kernel_slowdowns

MAX_LISTED = 6  # number of unmeasured kernels that are listed


@dataclass(frozen=True, slots=True)
class TimeComparison:
    """Seconds, predicted and measured."""

    predicted: Seconds
    measured: Seconds

    @property
    def error(self) -> float | None:
        """Predicted over measured minus 1; None if nothing was measured."""
        return None if self.measured <= 0.0 else self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class UnmeasuredKernel:
    """A kernel of the plan that was not measured: its predicted seconds, from a model, and the reason."""

    kernel_name: str
    seconds: Seconds
    reason: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """Means of a GPU's SM clock in MHz, under kernels alone and in steps."""

    isolated: float
    in_steps: float


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step, predicted and measured.

    fastest, slowest: of the measured steps; phases: means over ranks; kernel_kinds: kernel time by kind, means
    over ranks, measured under a profiler; predicted_peak, measured_peak: bytes of tensors on the peak-memory
    rank; provenance: shares of predicted time by source; interference: kernels overlapped with collectives, as
    far as measured; layers: of the trained model, out of `model_layers`; unmeasured: kernels without a
    measurement, longest first.
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
        """Predicted over measured peak memory minus 1."""
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
                f"{kind.value} with concurrent {kernel_class.value} kernels": slowdown
                for (kind, kernel_class), slowdown in kernel_slowdowns(self.interference).items()
            },
            "provenance_share": dict(self.provenance),
            "not_measured": [
                {
                    "kernel": unmeasured_kernel.kernel_name,
                    "predicted_s": unmeasured_kernel.seconds,
                    "reason": unmeasured_kernel.reason,
                }
                for unmeasured_kernel in self.unmeasured
            ],
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def to_text(self) -> str:
        """The comparison as a text table."""
        return "\n".join(self._text_lines())

    def _text_lines(self) -> Iterator[str]:
        layers_text = "" if self.layers == self.model_layers else f", {self.layers} of {self.model_layers} layers"
        yield f"{self.name}{layers_text}: {self.layout} on {self.device}"
        spread = f"{format_seconds(self.fastest)} to {format_seconds(self.slowest)}"
        yield f"{self.steps} real steps, {spread}; median against the prediction"
        yield f"{'':<24}{'predicted':>12}{'measured':>12}{'error':>9}"
        yield _table_line("step", self.step)
        for phase, times in self.phases.items():
            yield _table_line(f"  {phase.value}", times)
        yield "kernels by kind (measured under a profiler, which slows small ones)"
        for kind, times in sorted(self.kernel_kinds.items(), key=lambda kind_times: -kind_times[1].measured):
            yield _table_line(f"  {kind}", times)
        peaks = f"{format_bytes(self.predicted_peak):>12}{format_bytes(self.measured_peak):>12}"
        yield f"{'peak memory of tensors':<24}{peaks}{100 * self.peak_error:>+8.1f} %"
        if self.clocks is not None:
            isolated_mhz, in_steps = self.clocks.isolated, self.clocks.in_steps
            yield f"SM clock: {isolated_mhz:,.0f} MHz under isolated kernels, {in_steps:,.0f} MHz in steps"
        if self.interference:
            yield interference_table(self.interference)
        yield from self._unmeasured_lines()
        shares = ", ".join(f"{100 * share:.1f} % {name}" for name, share in self.provenance.items() if share > 0)
        yield f"the prediction's seconds are {shares}"

    def _unmeasured_lines(self) -> Iterator[str]:
        """Lines on kernels whose predicted time comes from a model."""
        if not self.unmeasured:
            return
        seconds = format_seconds(sum(unmeasured_kernel.seconds for unmeasured_kernel in self.unmeasured))
        yield f"{seconds} of the prediction rest on a model of kernels that were not measured:"
        for kernel in self.unmeasured[:MAX_LISTED]:
            yield (
                _table_line(f"  {kernel.kernel_name}", TimeComparison(kernel.seconds, 0.0)).rstrip()
                + f"  {kernel.reason}"
            )
        if len(self.unmeasured) > MAX_LISTED:
            yield f"  and {len(self.unmeasured) - MAX_LISTED} others"


def _time_fields(times: TimeComparison) -> dict[str, float | None]:
    return {"predicted_s": times.predicted, "measured_s": times.measured, "error": times.error}


def _table_line(name: str, times: TimeComparison) -> str:
    error = "" if times.error is None else f"{100 * times.error:>+7.1f} %"
    return f"{name:<24}{format_seconds(times.predicted):>12}{format_seconds(times.measured):>12}{error:>9}"
