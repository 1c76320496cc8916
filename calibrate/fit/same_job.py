"""How far are the errors of two runs of one job apart?

Pairs of runs of one job (`clustersim.uncertainty.reference_runs`) of quality A and B. All pairs of a source have the
weight of one source. The quantile of their absolute differences is taken as that of single errors is
(`prediction_interval`): macro-averaged over sources, widened by the ratio of Student's t to the normal quantile.
`covered_share` is that of the differences of each source by the quantile of all others.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from calibrate.fit.student_t import student_t_ratio
from calibrate.fit.weighted_quantile import group_weights, weighted_quantile
from clustersim.uncertainty.prediction_interval import INTERVAL_COVERAGE
from clustersim.uncertainty.reference_runs import ReferenceRun, SameJobErrors, group_by_job

MIN_SOURCES: Final = 4


class JobPair(NamedTuple):
    """Two runs of one job: their sources, joined, and the absolute difference of their log errors."""

    source: str
    difference: float


def same_job_pairs(runs: Sequence[ReferenceRun]) -> list[JobPair]:
    """All pairs of runs of one job whose settings are known."""
    specified = [run for run in runs if run.quality in ("A", "B")]
    return [
        JobPair(" + ".join(sorted({one.source, other.source})), abs(one.log_error - other.log_error))
        for job_runs in group_by_job(specified).values()
        for one, other in combinations(job_runs, 2)
    ]


def fit_same_job(pairs: Sequence[JobPair]) -> SameJobErrors | None:
    """Quantile and out-of-sample coverage of the differences; None from fewer than `MIN_SOURCES` sources."""
    sources = tuple(dict.fromkeys(pair.source for pair in pairs))
    if len(sources) <= MIN_SOURCES:
        return None
    coverages = [
        fmean(
            pair.difference <= same_job_quantile([other for other in pairs if other.source != source])
            for pair in pairs
            if pair.source == source
        )
        for source in sources
    ]
    return SameJobErrors(len(pairs), len(sources), round(same_job_quantile(pairs), 4), round(fmean(coverages), 3))


def same_job_quantile(pairs: Sequence[JobPair]) -> float:
    """The difference that 90 % of pairs stay below, all sources with equal weight."""
    sources = [pair.source for pair in pairs]
    differences = np.array([pair.difference for pair in pairs])
    quantile = weighted_quantile(differences, group_weights(sources), INTERVAL_COVERAGE)
    return student_t_ratio(len(set(sources)) - 1) * quantile
