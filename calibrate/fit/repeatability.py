"""By how much do equal steps differ? Published rows that state the same run, in all that a prediction depends on.

Versions of software, machines and days differ between them, which no scenario says.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Final

from clustersim.validation.cases import ValidationCase

IGNORED_COLUMNS: Final = frozenset(
    ("case_id", "locator", "year", "framework", "step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct")
) | {"flop_convention", "quality"}
"""Columns in which rows of equal runs may differ. Notes are not one: they say what other columns cannot."""


def repeat_deviation(cases: Sequence[ValidationCase]) -> float:
    """Standard deviation of the logarithm of equal runs' times, sources counted alike; 0 where no run comes twice."""
    runs: dict[tuple[str, ...], list[float]] = {}
    for case in cases:
        key = tuple(text for column, text in case.cells.items() if column not in IGNORED_COLUMNS)
        runs.setdefault((case.text("source"), *key), []).append(math.log(case.positive_float("step_time_s")))
    variances_by_source: dict[str, list[float]] = {}
    for key, log_times in runs.items():
        if len(log_times) > 1:
            variances_by_source.setdefault(key[0], []).append(
                pvariance(log_times) * len(log_times) / (len(log_times) - 1)
            )
    return math.sqrt(fmean(map(fmean, variances_by_source.values()))) if variances_by_source else 0.0
