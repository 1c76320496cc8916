"""How accurate were a record's predictions of real steps on this machine (holdout validation)?

Calibration ends with steps that the record was not measured for (`cost.calibration_record.HoldoutStep`):
another depth, another microbatch size. In the prediction interval the largest of their errors replaces the
contribution of the record's kernels, instead of the errors of its samples: those are of isolated kernels,
and do not tell whether errors add up or cancel in a step.

Why the largest: of n + 1 exchangeable errors, the last one is the largest with probability 1 / (n + 1),
whatever their distribution. So the largest of three covers the next step with probability 3/4. The
deviation between equal steps, which every interval adds (`UncertaintyModel.repeat_deviation`, times the
quantiles), raises this to about 90 %, as long as the errors' deviation is at most n times that (a test draws
them): three steps by 7 %.

Two rules limit the transfer to other scenarios. Where the samples of a scenario's kernels are less certain
than those of the steps were (the record is of another model, and its kernels are fitted; a larger job runs
at the speed of its slowest GPU), the difference is added. And only the software, formats and layers of
those steps extend the validated domain: networks, strategies and larger jobs do not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clustersim.cost.record_kinds import RecordOrigin
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.prediction_interval import LocalEvidence, UncertaintyModel

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord, HoldoutStep


@dataclass(frozen=True, slots=True)
class HoldoutResult:
    """Real steps with their predictions, at least one. accelerator: on which they ran."""

    accelerator: str
    steps: "Sequence[HoldoutStep]"

    @property
    def max_error(self) -> float:
        """The error of the step with the largest absolute log error."""
        return max((step.error for step in self.steps), key=_abs_log_error)

    @property
    def bias(self) -> float:
        """The mean error."""
        return sum(step.error for step in self.steps) / len(self.steps)

    @property
    def description(self) -> str:
        """Summary as a clause of a sentence."""
        count = len(self.steps)
        step_label = "1 real step" if count == 1 else f"{count:,} real steps"
        bias = "" if count == 1 else f"; bias {self.bias:+.1%}"
        return (
            f"predicted {step_label} that it was not measured for within {abs(self.max_error):.1%} (largest "
            f"error{bias})"
        )

    def to_json(self) -> dict[str, Any]:
        """The steps as JSON data: seconds, and errors relative to the measured time."""
        steps = [
            {
                "description": step.description,
                "predicted_s": step.predicted,
                "measured_s": step.measured,
                "error": step.error,
            }
            for step in self.steps
        ]
        return {"largest_error": self.max_error, "bias": self.bias, "steps": steps}

    def local_evidence(self, expectation: ExpectedError) -> LocalEvidence:
        """Evidence on a step from these. expectation: expected error by the sources of its durations."""
        kernel_error = expectation.kernel_share * math.expm1(_abs_log_error(self.max_error)) + self.excess_kernel_error(
            expectation
        )
        return LocalEvidence(
            max(0.0, expectation.error - expectation.kernel_error) + kernel_error, expectation.unknown_share
        )

    def excess_kernel_error(self, expectation: ExpectedError) -> float:
        """Excess of the step's expected kernel error over that of the holdout steps, as a fraction of the busy time."""
        return max(
            0.0, expectation.kernel_error - expectation.kernel_share * max(step.propagated_error for step in self.steps)
        )

    def extend(self, model: UncertaintyModel) -> UncertaintyModel:
        """The uncertainty model with its domain extended by these steps."""
        categories = frozenset(category for step in self.steps for category in step.categories)
        return replace(model, domain=model.domain.with_steps(self.accelerator, categories))


def holdout_result(record: "CalibrationRecord | None") -> HoldoutResult | None:
    """Holdout result of a record; None where it has no steps, or was not measured on the machine that it represents."""
    if record is None or not record.holdout_steps or record.origin is not RecordOrigin.MEASURED:
        return None
    return HoldoutResult(record.device.accelerator, record.holdout_steps)


def _abs_log_error(error: float) -> float:
    """Absolute log of measured over predicted time."""
    return abs(math.log1p(error))
