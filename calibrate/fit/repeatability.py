"""By how much do equal steps differ? Published rows that state the same run, in all that a prediction depends on.

Versions of software, machines and days differ between them, which no scenario says.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Final

from clustersim.validation.cases import Case

OF_A_PUBLICATION: Final = frozenset(
    ("case_id", "locator", "year", "framework", "step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct")
) | {"flop_convention", "quality"}
"""Columns in which rows of equal runs may differ. Notes are not one: they say what other columns cannot."""


def repeat_deviation(cases: Sequence[Case]) -> float:
    """Standard deviation of the logarithm of equal runs' times, sources counted alike; 0 where no run comes twice."""
    runs: dict[tuple[str, ...], list[float]] = {}
    for case in cases:
        key = tuple(text for column, text in case.cells.items() if column not in OF_A_PUBLICATION)
        runs.setdefault((case.text("source"), *key), []).append(math.log(case.number("step_time_s")))
    by_source: dict[str, list[float]] = {}
    for key, times in runs.items():
        if len(times) > 1:
            by_source.setdefault(key[0], []).append(pvariance(times) * len(times) / (len(times) - 1))
    return math.sqrt(fmean(map(fmean, by_source.values()))) if by_source else 0.0
