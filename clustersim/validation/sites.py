"""Do replicas in several sites work as much of their time as published?

A row is a run of local training (DiLoCo), or of data parallelism (one inner step a round), over links between sites:
the percentage of a round in which replicas compute. Measured rows state how long their exchange took, or the bandwidth
of their slowest link. Rows that others have simulated state the last bandwidth of a grid with which their simulator
does not reach that percentage, so it is predicted for the middle of that step of the grid. That it is the last one
below follows from the source itself: its table 4 lists 0.9 Gbit/s for 80 % of the 1B model in 4 bits, its table 1 has
77 % with 1 Gbit/s (6.75 of 8.75 hours). Rows of decoupled replicas state how fast each is, or how often its chips fail
and how long it then stalls: the percentage of the time that GPUs work.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from clustersim.common.units import Seconds
from clustersim.reliability.outer_exchange import exposed_seconds
from clustersim.results.outer_rounds import OuterRounds, ReplicaRound
from clustersim.scenario.diloco import DilocoSettings, OuterSend
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.replica_goodput import FailingReplicas

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "sites.csv"
REQUIRED_COLUMNS: Final = (
    "case_id",
    "source",
    "quantity",
    "value",
    "step_s",
    "inner_steps",
    "fragments",
    "overlap",
    "send",
)
_SIMULATED: Final = "simulated"


def read_sites(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of local training."""
    return read_cases(path, REQUIRED_COLUMNS)


def compare_sites(cases: Sequence[ValidationCase]) -> list[CaseComparison]:
    """Predict the utilization of every case, in percent."""
    return [_compare_case(case) for case in cases]


def is_simulated(case: ValidationCase) -> bool:
    """Whether another simulator, and no run, is the source."""
    return case.text("origin") == _SIMULATED


def _compare_case(case: ValidationCase) -> CaseComparison:
    groupings = {"method": _method(case)}
    measured = case.positive_float("value")
    try:
        predicted = _predict(case)
    except CannotPredictError as error:
        return CaseComparison(
            case.text("case_id"), case.text("source"), measured, None, str(error), groupings=groupings
        )
    return CaseComparison(case.text("case_id"), case.text("source"), measured, predicted, groupings=groupings)


def _method(case: ValidationCase) -> str:
    if case.text("quorum"):
        return "decoupled" if case.positive_int("replicas") > 1 else "data parallel with failures"
    if case.positive_int("inner_steps") == 1:
        return "data parallel"
    if case.positive_int("fragments") == 1:
        return "DiLoCo"
    return "streaming, overlapped" if _overlap(case) else "streaming"


def _overlap(case: ValidationCase) -> int:
    return int(float(case.text("overlap") or 0))


def _predict(case: ValidationCase) -> float:
    """Percent of a round, or of the time, in which replicas compute."""
    match case.text("quantity"):
        case "utilization":
            return 100.0 * _utilization(case)
        case "utilization of GPUs":
            return 100.0 * _gpu_utilization(case)
        case "goodput":
            return 100.0 * _goodput(case)
    raise CannotPredictError(f"line {case.line_number}: {case.text('quantity')} is no utilization and no goodput")


def _settings(case: ValidationCase) -> DilocoSettings:
    return DilocoSettings(
        case.positive_int("inner_steps"),
        case.positive_int("fragments"),
        _overlap(case),
        send=OuterSend(case.text("send")),
        quorum=case.positive_int("quorum") if case.text("quorum") else None,
    )


def _utilization(case: ValidationCase) -> float:
    """Of replicas of one speed."""
    step, settings = case.positive_float("step_s"), _settings(case)
    waiting = exposed_seconds(settings, step, case.positive_int("layers"), _exchange_seconds(case), 0.0)
    return settings.inner_steps * step / (settings.inner_steps * step + waiting)


def _gpu_utilization(case: ValidationCase) -> float:
    """Mean of replicas of several speeds whose exchange takes no time."""
    steps = sorted(float(step) for step in case.text("replica_steps_s").split())
    quorum = case.positive_int("quorum")
    replicas = tuple(
        ReplicaRound(str(index), (), 1, 1, step, step, 0.0, is_waited_for=index < quorum)
        for index, step in enumerate(steps)
    )
    return OuterRounds("", _settings(case), replicas, (), 0.0, 0.0, 0.0, 0.0, 0.0, "", 1.0, 0.0, 0.0).gpu_utilization


def _goodput(case: ValidationCase) -> float:
    """Of replicas whose chips fail."""
    rate = case.positive_float("chips") / case.positive_float("mtbi_s")
    count, quorum = case.positive_int("replicas"), case.positive_int("quorum")
    return FailingReplicas(count, rate, case.positive_float("stall_s"), quorum).goodput()


def _exchange_seconds(case: ValidationCase) -> Seconds:
    """All layers at once: as measured, or an all-reduce of the parameters over the bandwidth.

    Each of n replicas (2 if left out) sends 2 (n - 1) / n times what it holds.
    """
    if case.text("exchange_s"):
        return case.positive_float("exchange_s")
    count = case.positive_int("replicas") if case.text("replicas") else 2
    sent_bits = case.positive_float("parameters") * case.positive_float("bits") * 2 * (count - 1) / count
    seconds = sent_bits / (_gbit_per_second(case) * 1e9)
    return seconds if math.isfinite(seconds) else 0.0


def _gbit_per_second(case: ValidationCase) -> float:
    """The bandwidth; on a grid the (geometric) middle between the listed point and the next."""
    listed = case.positive_float("gbit_per_s")
    return listed * math.sqrt(case.positive_float("grid_step")) if case.text("grid_step") else listed
