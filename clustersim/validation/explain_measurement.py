"""What was measured: the time of a step, or its MFU, which the scenario's own FLOP make a time?"""

import math
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Dimension, Seconds, format_flops, format_step_time, parse_quantity, parse_share
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.utilization import LeadingMfu

_MFU_WORD: Final = "mfu"
_HINT: Final = "write a number above zero and its unit, such as '4.2 s' or '850 ms', or an MFU, such as '38%'"


@dataclass(frozen=True, slots=True)
class MeasuredMfu:
    """A model FLOP utilization that was measured, in the place of a step time. share: above 0, below 1."""

    share: float

    def step_time(self, result: SimulationResult) -> Seconds:
        """The time of a step of the result's job with this MFU, by the convention that leads (`LeadingMfu`)."""
        return self._step_time(result, result.leading_mfu.value)

    def conversion(self, result: SimulationResult) -> str:
        """How the step time follows from it: its convention, and what the other one would give."""
        leading, peak = result.leading_mfu, format_flops(result.peak_flops)
        other = LeadingMfu(result.mfu, AttentionFlopConvention.FULL)
        if not leading.is_causal:
            other = LeadingMfu(result.mfu_causal, AttentionFlopConvention.CAUSAL)
        other_step = format_step_time(self._step_time(result, other.value))
        return (
            f"{self.share:.1%} is read as MFU with {leading.attention_label} of {peak} per GPU, which makes a step of "
            f"{format_step_time(self.step_time(result))}; read with {other.attention_label} it would be {other_step}"
        )

    def _step_time(self, result: SimulationResult, predicted_mfu: float) -> Seconds:
        """FLOP are those of the predicted step, so its MFU times its time is that of every step."""
        return predicted_mfu * result.step_time / self.share


def parse_measurement(text: str) -> Seconds | MeasuredMfu:
    """Parse a step time such as `4.2 s`, or an MFU such as `38%`, `38% MFU` or `0.38 MFU`; raises InputError."""
    lowered = text.strip().lower()
    if lowered.endswith(("%", _MFU_WORD)):
        return _parse_mfu(text, lowered.removesuffix(_MFU_WORD))
    return parse_step_time(text)


def parse_step_time(text: str) -> Seconds:
    """Parse a step time such as `4.2 s` or `850ms`; raises InputError unless it is a time above zero."""
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError:
        raise InputError(f"{format_value(text)} is not the time of a step; {_HINT}") from None
    if not 0.0 < seconds < math.inf:
        raise InputError(f"{format_value(text)} is not a time that a step can take; {_HINT}")
    return seconds


def _parse_mfu(text: str, share_text: str) -> MeasuredMfu:
    try:
        share = parse_share(share_text)
    except ValueError:
        share = 0.0
    if share <= 0.0:
        raise InputError(
            f"{format_value(text)} is not an MFU that a step can have; write one above 0% and below 100%, such as '38%'"
        )
    return MeasuredMfu(share)
