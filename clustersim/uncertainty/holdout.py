"""How far were real steps from what a record had predicted of them?

Calibration ends with steps that the record was not measured for (`cost.record.StepRow`): another depth, another
microbatch. In the band the largest of their errors stands for all that rests on the record's kernels, in place of the
errors of its rows: those are of kernels alone, and whether they add up in a step or cancel they do not say.

Why the largest: of n + 1 errors that are alike, the last one is the largest once in n + 1, whatever their distribution.
So the largest of three holds the next step three times in four. What equal steps differ by, which every band has on top
(`Experience.repeat`, as many deviations as hold nine in ten), makes of it nine in ten, as long as errors deviate by no
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

from clustersim.cost.calibration_record import Origin, Record, StepRow
from clustersim.uncertainty.expected_error import Expectation
from clustersim.uncertainty.prediction_interval import Experience, Measured


@dataclass(frozen=True, slots=True)
class Tried:
    """Real steps beside their predictions, one at least. accelerator: on which."""

    accelerator: str
    steps: Sequence[StepRow]

    @property
    def largest(self) -> float:
        """The error of the step that was the furthest off by the logarithm."""
        return max((step.error for step in self.steps), key=_away)

    @property
    def bias(self) -> float:
        """The mean error."""
        return sum(step.error for step in self.steps) / len(self.steps)

    @property
    def words(self) -> str:
        """What they say, in a clause."""
        count = len(self.steps)
        many = "1 real step" if count == 1 else f"{count:,} real steps"
        bias = "" if count == 1 else f"; bias {self.bias:+.1%}"
        return f"predicted {many} that it was not measured for within {abs(self.largest):.1%} (largest error{bias})"

    def to_json(self) -> dict[str, Any]:
        """The steps as plain data: seconds, and errors as parts of what was measured."""
        steps = [
            {"what": step.what, "predicted_s": step.predicted, "measured_s": step.measured, "error": step.error}
            for step in self.steps
        ]
        return {"largest_error": self.largest, "bias": self.bias, "steps": steps}

    def measured(self, found: Expectation) -> Measured:
        """What is known of a step by them; found: what the sources of its durations say of themselves."""
        of_kernels = found.kernels * math.expm1(_away(self.largest)) + self.beyond(found)
        return Measured(max(0.0, found.error - found.of_kernels) + of_kernels, found.unknown)

    def beyond(self, found: Expectation) -> float:
        """By how much worse kernels are known than those of the steps were, as a part of the busy time."""
        return max(0.0, found.of_kernels - found.kernels * max(step.of_rows for step in self.steps))

    def added_to(self, experience: Experience) -> Experience:
        """Experience that has these steps, too."""
        kinds = frozenset(kind for step in self.steps for kind in step.kinds)
        return replace(experience, known=experience.known.beside(self.accelerator, kinds))


def tried(record: Record | None) -> Tried | None:
    """What a record's own steps say; None where it has none, or was not measured on the machine that it stands for."""
    if record is None or not record.steps or record.origin is not Origin.MEASURED:
        return None
    return Tried(record.device.accelerator, record.steps)


def _away(error: float) -> float:
    """How far an error is from none, by the logarithm of measured over predicted time."""
    return abs(math.log1p(error))
