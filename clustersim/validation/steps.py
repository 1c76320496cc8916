"""Do predicted training steps take as long as published ones took?"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.processes import usable_cpu_count, worker_pool
from clustersim.common.units import Seconds
from clustersim.parallel.mesh import DISPLAY_AXES
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.comparison import CaseComparison, PredictionInterval
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.training_precision import is_low_precision

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "steps.csv"
REQUIRED_COLUMNS: Final = (
    *("case_id", "source", "gpu", "n_gpus", "layers", "hidden", "ffn_hidden", "heads", "vocab", "seq", "global_batch"),
    *("micro_batch", "tp", "pp", "dp", "precision", "step_time_s"),
)
DENSE_LABEL: Final = "dense"
MOE_LABEL: Final = "MoE"
LOW_PRECISION_LABEL: Final = "low precision"
_SCALE_BINS: Final = ((8, "one node (8 or fewer)"), (64, "9 to 64"), (512, "65 to 512"), (math.inf, "more than 512"))
_CHUNK_SIZE: Final = 8  # cases per task of the process pool


def read_steps(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of steps."""
    return read_cases(path, REQUIRED_COLUMNS)


def build_scenario(case: ValidationCase, overrides: Sequence[str] = (), *, states_software: bool = True) -> Scenario:
    """The scenario of a run, with overrides (`key=value`); raises CannotPredictError if there is none.

    states_software: False: as a user writes it who says nothing of the software.
    """
    mapping = scenario_mapping(case, states_software=states_software)
    try:
        return Scenario.from_mapping(mapping, overrides, default_name=case.text("case_id"))
    except InputError as error:
        reason = "; ".join(str(error).splitlines()).removeprefix(f"{case.text('case_id')}: ")
        raise CannotPredictError(f"line {case.line_number}: {reason}", is_expressible=False) from error


def predicted_step_seconds(result: SimulationResult) -> Seconds:
    """Predicted step time: the last simulated step's, which is in steady state."""
    return float(result.step_times[-1])


def step_time_interval(result: SimulationResult) -> PredictionInterval:
    """90 % prediction interval of a run's step time, in seconds, as if it had never been published."""
    predicted, relative_interval = predicted_step_seconds(result), result.uncertainty.interval_without_reference
    return PredictionInterval(
        predicted * relative_interval.low, predicted * relative_interval.high, relative_interval.strata
    )


def compare_step(case: ValidationCase, overrides: Sequence[str] = ()) -> CaseComparison:
    """Predict one run, with overrides of its scenario, and compare it with the measured step time."""
    identity, measured, groupings = (case.text("case_id"), _source_label(case)), float("nan"), error_groupings(case)
    try:
        measured = case.positive_float("step_time_s")
        result = simulate(build_scenario(case, overrides))
    except CannotPredictError as error:
        return CaseComparison(*identity, measured, None, str(error), error.is_expressible, groupings)
    except InputError as error:
        return CaseComparison(
            *identity, measured, None, f"line {case.line_number}: {error}", is_expressible=False, groupings=groupings
        )
    return CaseComparison(
        *identity,
        measured,
        predicted_step_seconds(result),
        groupings=groupings,
        fits_in_memory=result.fits_in_memory,
        interval=step_time_interval(result),
    )


def _source_label(case: ValidationCase) -> str:
    """Source label; a source's MoE runs and low-precision runs count as sources of their own."""
    suffixes = ((MOE_LABEL, has_experts(case)), (LOW_PRECISION_LABEL, is_low_precision(case)))
    return ", ".join((case.text("source"), *(suffix for suffix, applies in suffixes if applies)))


def compare_steps(
    cases: Sequence[ValidationCase],
    overrides: Sequence[str] = (),
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[CaseComparison]:
    """Predict runs in parallel, with the same overrides for all scenarios.

    workers: number of processes, None: one per CPU; progress: called with the number of finished runs. Raises
    InputError if the overrides leave no run that can be predicted.
    """
    comparisons = _compare_parallel(cases, partial(compare_step, overrides=tuple(overrides)), workers, progress)
    if overrides and comparisons and not any(comparison.predicted is not None for comparison in comparisons):
        raise InputError(f"--set {' '.join(overrides)}: leaves no case to predict: {comparisons[0].skip_reason}")
    return comparisons


def _compare_parallel(
    cases: Sequence[ValidationCase],
    compare: Callable[[ValidationCase], CaseComparison],
    workers: int | None,
    progress: Callable[[int], None] | None,
) -> list[CaseComparison]:
    workers = min(workers or usable_cpu_count(), max(1, len(cases) // _CHUNK_SIZE))
    if workers == 1:
        results = map(compare, cases)
        return _collect(results, progress)
    with worker_pool(workers) as pool:
        return _collect(pool.map(compare, cases, chunksize=_CHUNK_SIZE), progress)


def _collect(results: Iterable[CaseComparison], progress: Callable[[int], None] | None) -> list[CaseComparison]:
    collected: list[CaseComparison] = []
    for result in results:
        collected.append(result)
        if progress is not None:
            progress(len(collected))
    return collected


def error_groupings(case: ValidationCase) -> dict[str, str]:
    """Labels by which a run's error is grouped."""
    return {
        "layers": (MOE_LABEL if has_experts(case) else DENSE_LABEL)
        + (f", {LOW_PRECISION_LABEL}" if is_low_precision(case) else ""),
        "format": case.text("precision") or "not stated",
        "gpu": case.text("gpu"),
        "scale": _scale_label(case),
        "axes": _parallelism_label(case),
        "recompute": case.text("recompute") or "not stated",
        "software": case.text("framework") or "not stated",
        "quality": case.text("quality") or "not stated",
    }


def _scale_label(case: ValidationCase) -> str:
    """Label of the bin of the GPU count."""
    gpus = case.text("n_gpus")
    return (
        next(label for max_gpus, label in _SCALE_BINS if float(gpus) <= max_gpus) if gpus.isdecimal() else "not stated"
    )


def _parallelism_label(case: ValidationCase) -> str:
    """Parallel axes with a degree above one, and the ZeRO stage: `tp+pp`, `dp (ZeRO-3)`."""
    axes = [axis.name for axis in DISPLAY_AXES if case.text(axis.name) not in ("", "1")]
    stage = case.text("zero_stage")
    return ("+".join(axes) or "none") + (f" (ZeRO-{stage})" if stage not in ("", "0") else "")
