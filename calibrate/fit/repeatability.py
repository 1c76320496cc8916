"""Repeatability: standard deviation between published rows that state the same run.

The rows agree in all that a prediction depends on. Software versions, machines and dates, which no scenario
states, differ.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Final

from clustersim.validation.cases import ValidationCase

IGNORED_COLUMNS: Final = frozenset(
    ("case_id", "locator", "year", "framework", "step_time_s", "step_time_origin", "model_tflops_per_gpu", "mfu_pct")
) | {"flop_convention", "quality"}
"""Columns that may differ between equal runs. Notes are not included: they state what other columns cannot."""


def repeat_deviation(cases: Sequence[ValidationCase]) -> float:
    """Standard deviation of the log step time of equal runs, equal source weights; 0 if no run is repeated."""
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
