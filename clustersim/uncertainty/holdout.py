"""How far were real steps from what a record had predicted of them?

Calibration ends with steps that the record was not measured for (`cost.record.StepRow`): another depth, another
microbatch. In the band the largest of their errors stands for all that rests on the record's kernels, in place of the
errors of its rows: those are of kernels alone, and whether they add up in a step or cancel they do not say.

Why the largest: of n + 1 errors that are alike, the last one is the largest once in n + 1, whatever their distribution.
So the largest of three holds the next step three times in four. What equal steps differ by, which every band has on top
(`UncertaintyModel.repeat_deviation`, as many deviations as hold nine in ten), makes of it nine in ten, as long as errors deviate by no
more than n times that (a test draws them): three steps by 7 %.

Two things keep it from being carried too far. Where the rows of a scenario's kernels are known worse than those of the
steps were (the record is of another model, and its kernels are fitted; a larger job keeps the pace of the slowest GPU),
it errs by the difference on top. And what those steps were like, software and formats and layers, is what counts as
measured beside what was published: networks, strategies and larger jobs do not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustersim.cost.calibration_record import CalibrationRecord, HoldoutStep, RecordOrigin
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.prediction_interval import LocalEvidence, UncertaintyModel


@dataclass(frozen=True, slots=True)
class HoldoutResult:
    """Real steps beside their predictions, one at least. accelerator: on which."""

    accelerator: str
    steps: Sequence[HoldoutStep]

    @property
    def max_error(self) -> float:
        """The error of the step that was the furthest off by the logarithm."""
        return max((step.error for step in self.steps), key=_abs_log_error)

    @property
    def bias(self) -> float:
        """The mean error."""
        return sum(step.error for step in self.steps) / len(self.steps)

    @property
    def description(self) -> str:
        """What they say, in a clause."""
        count = len(self.steps)
        step_label = "1 real step" if count == 1 else f"{count:,} real steps"
        bias = "" if count == 1 else f"; bias {self.bias:+.1%}"
        return f"predicted {step_label} that it was not measured for within {abs(self.max_error):.1%} (largest error{bias})"

    def to_json(self) -> dict[str, Any]:
        """The steps as plain data: seconds, and errors as parts of what was measured."""
        steps = [
            {"what": step.what, "predicted_s": step.predicted, "measured_s": step.measured, "error": step.error}
            for step in self.steps
        ]
        return {"largest_error": self.max_error, "bias": self.bias, "steps": steps}

    def local_evidence(self, expectation: ExpectedError) -> LocalEvidence:
        """What is known of a step by them; found: what the sources of its durations say of themselves."""
        kernel_error = expectation.kernel_share * math.expm1(_abs_log_error(self.max_error)) + self.excess_kernel_error(
            expectation
        )
        return LocalEvidence(
            max(0.0, expectation.error - expectation.kernel_error) + kernel_error, expectation.unknown_share
        )

    def excess_kernel_error(self, expectation: ExpectedError) -> float:
        """By how much worse kernels are known than those of the steps were, as a part of the busy time."""
        return max(0.0, expectation.kernel_error - expectation.kernel_share * max(step.of_rows for step in self.steps))

    def extend(self, model: UncertaintyModel) -> UncertaintyModel:
        """Experience that has these steps, too."""
        categories = frozenset(category for step in self.steps for category in step.kinds)
        return replace(model, domain=model.domain.with_steps(self.accelerator, categories))


def holdout_result(record: CalibrationRecord | None) -> HoldoutResult | None:
    """What a record's own steps say; None where it has none, or was not measured on the machine that it stands for."""
    if record is None or not record.steps or record.origin is not RecordOrigin.MEASURED:
        return None
    return HoldoutResult(record.device.accelerator, record.steps)


def _abs_log_error(error: float) -> float:
    """How far an error is from none, by the logarithm of measured over predicted time."""
    return abs(math.log1p(error))
