"""Are failures, and what they leave of a job's time, what clusters published?

The rate of a cluster is what its own row says (`basis`). Another row's prediction uses the geometric mean of all
*other* clusters' rates (`rates` others), as a planner's of a new cluster does, or its own (`own`), which tells whether
failures are proportional to nodes and, of effective training time, what restarts and checkpoints make of them; where a
source's figure follows from its own rate, `notes` say that it is circular. Effective time is that of a job over 30
days, with restarts and checkpoints as the typical preset has them unless the row says otherwise, and enough spares. Of
a figure that is only bounded (relation `>`), the error is what the prediction lacks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

from clustersim.common.units import Seconds
from clustersim.hardware.failures import DurationDistribution, FailureComponent, FailureDomain, FailureMode, FailureRate
from clustersim.reliability.checkpoint_cost import daly
from clustersim.reliability.checkpoint_timeline import Saving
from clustersim.reliability.failure_domains import Site
from clustersim.reliability.failure_events import events_of
from clustersim.reliability.job_simulation import HEALTHY, Job, Terms
from clustersim.scenario.config.reliability import load_reliability
from clustersim.scenario.reliability import DEFAULT_PRESET
from clustersim.validation.cases import PUBLISHED, CannotPredictError, Case, read_cases
from clustersim.validation.comparison import Comparison

SHIPPED: Final = PUBLISHED / "reliability.csv"
NEEDED: Final = ("case_id", "source", "cluster", "gpus", "gpus_per_node", "quantity", "relation", "value", "rates")
QUANTITIES: Final = ("rate", "interruptions", "mttf_h", "ettr")
_DAY: Final = 86400.0
_RUNS: Final = 24
_LENGTH: Final = 30.0 * _DAY
_OF_GPUS: Final = 8.0  # that rates are told for: nodes of other sizes count as so many


def read_reliability(path: Path = SHIPPED) -> list[Case]:
    """The rows of a table of failures."""
    return read_cases(path, NEEDED)


def compare_reliability(cases: Sequence[Case]) -> list[Comparison]:
    """Predict every row, in the unit of its quantity."""
    known = rates_of(read_reliability()) | rates_of(cases)
    return [_compared(case, known) for case in cases]


def rates_of(cases: Sequence[Case]) -> dict[str, float]:
    """Interruptions per 1,000 days of a node of 8 GPUs, by cluster, of the rows that are the basis of their cluster."""
    return {case.text("cluster"): _rate(case) for case in cases if case.is_yes("basis")}


def mean_rate(rates: Mapping[str, float]) -> tuple[float, float]:
    """The geometric mean of clusters' rates and their geometric standard deviation."""
    logs = [math.log(rate) for rate in rates.values()]
    return math.exp(fmean(logs)), math.exp(stdev(logs))


def rate_notes() -> list[str]:
    """The rates of shipped clusters and what they have in common, in sentences; the typical preset is made of them."""
    rates = rates_of(read_reliability())
    middle, spread = mean_rate(rates)
    listed = ", ".join(f"{name} {rate:.2f}" for name, rate in sorted(rates.items()))
    return [
        f"interruptions per 1,000 days of a node of 8 GPUs: {listed}",
        f"their geometric mean is {middle:.2f}, their geometric standard deviation {spread:.2f}",
    ]


def _rate(case: Case) -> float:
    """The rate that a row says, by whatever quantity."""
    nodes = case.number("gpus") / _OF_GPUS
    match case.text("quantity"):
        case "interruptions":
            return 1000.0 * case.number("value") / (nodes * case.number("days"))
        case "mttf_h":
            return 1000.0 * 24.0 / (case.number("value") * nodes)
        case "rate":
            return case.number("value") * _OF_GPUS / case.number("gpus_per_node")
    raise CannotPredictError(f"line {case.line}: {case.text('quantity')} is no basis of a rate", owed=False)


def _compared(case: Case, known: Mapping[str, float]) -> Comparison:
    quantity, bound = case.text("quantity"), case.text("relation") == ">"
    factors = {"quantity": quantity, "rates": case.text("rates")}
    measured = case.number("value")
    try:
        predicted = _predicted(case, _of_cluster(case, known))
    except CannotPredictError as refusal:
        return Comparison(case.text("case_id"), case.text("source"), measured, None, str(refusal), factors=factors)
    told = min(predicted, measured) if bound else predicted  # above a lower bound is right
    return Comparison(case.text("case_id"), case.text("source"), measured, told, factors=factors)


def _of_cluster(case: Case, known: Mapping[str, float]) -> float:
    """The rate that a row is predicted with."""
    name = case.text("cluster")
    if case.text("rates") == "own":
        if name not in known:
            raise CannotPredictError(f"line {case.line}: no row says the rate of {name}")
        return known[name]
    others = {cluster: rate for cluster, rate in known.items() if cluster != name}
    return mean_rate(others)[0]


def _predicted(case: Case, rate: float) -> float:
    nodes = case.number("gpus") / _OF_GPUS
    a_day = rate / 1000.0 * nodes
    match case.text("quantity"):
        case "rate":
            return rate
        case "interruptions":
            return a_day * case.number("days")
        case "mttf_h":
            return 24.0 / a_day
        case "ettr":
            return _ettr(case, a_day / _DAY)
    raise CannotPredictError(f"line {case.line}: quantity is none of {', '.join(QUANTITIES)}", owed=False)


def _ettr(case: Case, per_second: float) -> float:
    """Effective training time of a job, simulated."""
    typical = load_reliability(DEFAULT_PRESET)
    block = case.number("block_s", typical.checkpoint.snapshot)
    drain = 0.0 if case.text("block_s") else typical.checkpoint.overhead
    interval = case.number("interval_s", daly(block, 1.0 / per_second))
    failure = FailureMode(
        "it",
        FailureRate(FailureComponent.JOB, per_second),
        failure_domain=FailureDomain.NOTHING,
        detection_time=_detection(),
    )
    said = replace(typical, failures=(failure,), rate_factor=1.0, rate_geometric_std=1.0, restart=typical.restart)
    gpus = case.whole("gpus")
    nodes = max(1, gpus // case.whole("gpus_per_node"))
    site = Site(gpus, nodes, 1, False, (0,) * nodes, gpus, 1, case.whole("gpus_per_node"))
    terms = Terms(said, site, Saving(interval, block, drain), _LENGTH, 0.0, block, _always, 1e3 * _LENGTH)
    runs = [Job(terms, events_of(said, site, 0, number, _LENGTH)).run(number) for number in range(_RUNS)]
    return sum(run.work for run in runs) / sum(run.wall for run in runs)


def _detection() -> DurationDistribution:
    return load_reliability(DEFAULT_PRESET).failures[0].detection_time


def _always(_missing: int, _slower: object) -> tuple[str, Seconds]:
    return HEALTHY, 1.0
