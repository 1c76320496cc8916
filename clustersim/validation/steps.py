"""Do predicted training steps take as long as published ones took?"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.parallel.mesh import DISPLAY_AXES
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import PUBLISHED, CannotPredictError, Case, read_cases
from clustersim.validation.comparison import Band, Comparison
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.training_precision import is_narrow

SHIPPED: Final = PUBLISHED / "steps.csv"
NEEDED: Final = (
    *("case_id", "source", "gpu", "n_gpus", "layers", "hidden", "ffn_hidden", "heads", "vocab", "seq", "global_batch"),
    *("micro_batch", "tp", "pp", "dp", "precision", "step_time_s"),
)
DENSE: Final = "dense"
MIXTURES: Final = "mixtures of experts"
NARROW: Final = "narrow formats"
_SCALES: Final = ((8, "one node (8 or fewer)"), (64, "9 to 64"), (512, "65 to 512"), (math.inf, "more than 512"))
_CHUNK: Final = 8  # cases that a process takes at a time


def read_steps(path: Path = SHIPPED) -> list[Case]:
    """The rows of a table of steps."""
    return read_cases(path, NEEDED)


def scenario_of(case: Case, changes: Sequence[str] = ()) -> Scenario:
    """The scenario of a run, with some keys changed (`key=value`); raise CannotPredictError where there is none."""
    mapping = scenario_mapping(case)
    try:
        return Scenario.from_mapping(mapping, changes, default_name=case.text("case_id"))
    except InputError as error:
        reason = "; ".join(str(error).splitlines()).removeprefix(f"{case.text('case_id')}: ")
        raise CannotPredictError(f"line {case.line}: {reason}", owed=False) from error


def predicted_seconds(result: SimulationResult) -> Seconds:
    """What a run is predicted to report: of several simulated steps the last, which is a steady one."""
    return float(result.step_times[-1])


def band_of(result: SimulationResult) -> Band:
    """Between what and what a run is expected."""
    predicted, expected = predicted_seconds(result), result.relative_interval
    return Band(predicted * expected.low, predicted * expected.high, expected.strata)


def compare_step(case: Case, changes: Sequence[str] = ()) -> Comparison:
    """Predict one run, with some keys of its scenario changed."""
    known, measured, factors = (case.text("case_id"), _source(case)), float("nan"), factors_of(case)
    try:
        measured = case.number("step_time_s")
        result = simulate(scenario_of(case, changes))
    except CannotPredictError as refusal:
        return Comparison(*known, measured, None, str(refusal), refusal.owed, factors)
    except InputError as refusal:
        return Comparison(*known, measured, None, f"line {case.line}: {refusal}", expressible=False, factors=factors)
    return Comparison(
        *known, measured, predicted_seconds(result), factors=factors, fits=result.fits_in_memory, band=band_of(result)
    )


def _source(case: Case) -> str:
    """Who published a run; mixtures of experts count as a source of their own, and so do runs in narrow formats."""
    kinds = (("mixtures", has_experts(case)), (NARROW, is_narrow(case)))
    return ", ".join((case.text("source"), *(kind for kind, applies in kinds if applies)))


def compare_steps(
    cases: Sequence[Case],
    changes: Sequence[str] = (),
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Comparison]:
    """Predict many runs, in parallel, with the same keys of all scenarios changed.

    progress: called with how many are done. Raises InputError where a change leaves none to be predicted.
    """
    found = _compared(cases, partial(compare_step, changes=tuple(changes)), workers, progress)
    if changes and found and not any(comparison.predicted is not None for comparison in found):
        raise InputError(f"--set {' '.join(changes)}: leaves no case to predict: {found[0].skipped}")
    return found


def _compared(
    cases: Sequence[Case],
    compare: Callable[[Case], Comparison],
    workers: int | None,
    progress: Callable[[int], None] | None,
) -> list[Comparison]:
    workers = min(workers or os.cpu_count() or 1, max(1, len(cases) // _CHUNK))
    if workers == 1:
        done = map(compare, cases)
        return _counted(done, progress)
    with ProcessPoolExecutor(workers) as pool:
        return _counted(pool.map(compare, cases, chunksize=_CHUNK), progress)


def _counted(done: Iterable[Comparison], progress: Callable[[int], None] | None) -> list[Comparison]:
    found: list[Comparison] = []
    for comparison in done:
        found.append(comparison)
        if progress is not None:
            progress(len(found))
    return found


def factors_of(case: Case) -> dict[str, str]:
    """By what a run's error is grouped."""
    return {
        "layers": (MIXTURES if has_experts(case) else DENSE) + (f", {NARROW}" if is_narrow(case) else ""),
        "format": case.text("precision") or "not stated",
        "gpu": case.text("gpu"),
        "scale": _scale(case),
        "axes": _axes(case),
        "recompute": case.text("recompute") or "not stated",
        "software": case.text("framework") or "not stated",
        "quality": case.text("quality") or "not stated",
    }


def _scale(case: Case) -> str:
    gpus = case.text("n_gpus")
    return next(name for most, name in _SCALES if float(gpus) <= most) if gpus.isdecimal() else "not stated"


def _axes(case: Case) -> str:
    """Parallel axes with a degree above one, and ZeRO: `tp+pp`, `dp (ZeRO-3)`."""
    used = [axis.name for axis in DISPLAY_AXES if case.text(axis.name) not in ("", "1")]
    stage = case.text("zero_stage")
    return ("+".join(used) or "none") + (f" (ZeRO-{stage})" if stage not in ("", "0") else "")
