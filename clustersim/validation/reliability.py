"""Are predicted failure rates, and the training time that they cost, what clusters published?

The failure rate of a cluster is that of its own row (`basis`). Other rows are predicted with the geometric
mean of all *other* clusters' rates (`rates` others), as in planning a new cluster, or with their own
(`own`), which tests whether failures are proportional to nodes and, for ETTR, the model of restarts and
checkpoints; where a source's figure follows from its own rate, `notes` call it circular. ETTR (effective
training time ratio) is that of a job over 30 days, with restarts and checkpoints of the default preset
unless the row says otherwise, and with enough spares. If a figure is only bounded (relation `>`), the error
is the shortfall of the prediction.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

from clustersim.common.units import Seconds
from clustersim.hardware.failures import DurationDistribution, FailureComponent, FailureDomain, FailureMode, FailureRate
from clustersim.reliability.checkpoint_cost import daly_interval
from clustersim.reliability.checkpoint_timeline import CheckpointTimeline
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.job_simulation import HEALTHY, JobParameters, JobSimulation
from clustersim.scenario.config.reliability import load_reliability
from clustersim.scenario.reliability import DEFAULT_PRESET
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.comparison import CaseComparison

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "reliability.csv"
REQUIRED_COLUMNS: Final = (
    "case_id",
    "source",
    "cluster",
    "gpus",
    "gpus_per_node",
    "quantity",
    "relation",
    "value",
    "rates",
)
QUANTITIES: Final = ("rate", "interruptions", "mttf_h", "ettr")
_SECONDS_PER_DAY: Final = 86400.0
_MONTE_CARLO_RUNS: Final = 24
_JOB_SECONDS: Final = 30.0 * _SECONDS_PER_DAY
_REFERENCE_NODE_GPUS: Final = 8.0  # GPUs of the node that rates refer to; other nodes are converted


def read_reliability(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of failures."""
    return read_cases(path, REQUIRED_COLUMNS)


def compare_reliability(cases: Sequence[ValidationCase]) -> list[CaseComparison]:
    """Predict every case, in the unit of its quantity."""
    rates = interruption_rates(read_reliability()) | interruption_rates(cases)
    return [_compare_case(case, rates) for case in cases]


def interruption_rates(cases: Sequence[ValidationCase]) -> dict[str, float]:
    """Interruptions per 1,000 days of a node of 8 GPUs, by cluster, of the rows that define a cluster's rate.

    Rows that do not say it are left out here; their comparison names what they lack.
    """
    rates: dict[str, float] = {}
    for case in cases:
        with suppress(CannotPredictError):
            if case.boolean("basis"):
                rates[case.text("cluster")] = _interruption_rate(case)
    return rates


def geometric_mean_rate(rates: Mapping[str, float]) -> tuple[float, float]:
    """Geometric mean and geometric standard deviation of the clusters' rates."""
    logs = [math.log(rate) for rate in rates.values()]
    return math.exp(fmean(logs)), math.exp(stdev(logs))


def describe_rates() -> list[str]:
    """Sentences about the rates of the published clusters, on which the default preset is based."""
    rates = interruption_rates(read_reliability())
    mean, deviation = geometric_mean_rate(rates)
    rate_list = ", ".join(f"{name} {rate:.2f}" for name, rate in sorted(rates.items()))
    return [
        f"interruptions per 1,000 days of a node of 8 GPUs: {rate_list}",
        f"their geometric mean is {mean:.2f}, their geometric standard deviation {deviation:.2f}",
    ]


def _interruption_rate(case: ValidationCase) -> float:
    """The rate that a row states, from any of its quantities."""
    nodes = case.positive_float("gpus") / _REFERENCE_NODE_GPUS
    match case.text("quantity"):
        case "interruptions":
            return 1000.0 * case.positive_float("value") / (nodes * case.positive_float("days"))
        case "mttf_h":
            return 1000.0 * 24.0 / (case.positive_float("value") * nodes)
        case "rate":
            return case.positive_float("value") * _REFERENCE_NODE_GPUS / case.positive_float("gpus_per_node")
    raise CannotPredictError(
        f"line {case.line_number}: {case.text('quantity')} is no basis of a rate", is_expressible=False
    )


def _compare_case(case: ValidationCase, rates: Mapping[str, float]) -> CaseComparison:
    quantity, is_lower_bound = case.text("quantity"), case.text("relation") == ">"
    groupings = {"quantity": quantity, "rates": case.text("rates")}
    measured = math.nan
    try:
        measured = case.positive_float("value")
        if case.boolean("basis"):
            _interruption_rate(case)
        predicted = _predict(case, _prediction_rate(case, rates))
    except CannotPredictError as error:
        return CaseComparison(
            case.text("case_id"), case.text("source"), measured, None, str(error), groupings=groupings
        )
    reported = min(predicted, measured) if is_lower_bound else predicted  # any value above a lower bound is correct
    return CaseComparison(case.text("case_id"), case.text("source"), measured, reported, groupings=groupings)


def _prediction_rate(case: ValidationCase, rates: Mapping[str, float]) -> float:
    """The rate with which a row is predicted."""
    name = case.text("cluster")
    if case.text("rates") == "own":
        if name not in rates:
            raise CannotPredictError(f"line {case.line_number}: no row says the rate of {name}")
        return rates[name]
    other_rates = {cluster: rate for cluster, rate in rates.items() if cluster != name}
    return geometric_mean_rate(other_rates)[0]


def _predict(case: ValidationCase, rate: float) -> float:
    nodes = case.positive_float("gpus") / _REFERENCE_NODE_GPUS
    interruptions_per_day = rate / 1000.0 * nodes
    match case.text("quantity"):
        case "rate":
            return rate
        case "interruptions":
            return interruptions_per_day * case.positive_float("days")
        case "mttf_h":
            return 24.0 / interruptions_per_day
        case "ettr":
            return _simulate_ettr(case, interruptions_per_day / _SECONDS_PER_DAY)
    raise CannotPredictError(
        f"line {case.line_number}: quantity is none of {', '.join(QUANTITIES)}", is_expressible=False
    )


def _simulate_ettr(case: ValidationCase, interruptions_per_second: float) -> float:
    """Effective training time ratio of a job, by Monte Carlo simulation."""
    typical = load_reliability(DEFAULT_PRESET)
    blocking_seconds = case.positive_float("block_s", typical.checkpoint.snapshot)
    drain_seconds = 0.0 if case.text("block_s") else typical.checkpoint.overhead
    interval = case.positive_float("interval_s", daly_interval(blocking_seconds, 1.0 / interruptions_per_second))
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, interruptions_per_second),
        failure_domain=FailureDomain.NOTHING,
        detection_time=_default_detection(),
    )
    model = replace(typical, failures=(failure,), rate_factor=1.0, rate_geometric_std=1.0, restart=typical.restart)
    gpus = case.positive_int("gpus")
    nodes = max(1, gpus // case.positive_int("gpus_per_node"))
    site = FailureDomains(gpus, nodes, 1, False, (0,) * nodes, gpus, 1, case.positive_int("gpus_per_node"))
    terms = JobParameters(
        model,
        site,
        CheckpointTimeline(interval, blocking_seconds, drain_seconds),
        _JOB_SECONDS,
        0.0,
        blocking_seconds,
        _constant_state,
        1e3 * _JOB_SECONDS,
    )
    runs = [
        JobSimulation(terms, generate_failures(model, site, 0, run_index, _JOB_SECONDS)).run(run_index)
        for run_index in range(_MONTE_CARLO_RUNS)
    ]
    return sum(run.work for run in runs) / sum(run.wall for run in runs)


def _default_detection() -> DurationDistribution:
    return load_reliability(DEFAULT_PRESET).failures[0].detection_time


def _constant_state(_missing: int, _slower: object) -> tuple[str, Seconds]:
    return HEALTHY, 1.0
