"""What is one published case? Its scenario as a file would hold it, and the prediction beside what was measured."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import waiting_for
from clustersim.cli.validation_kinds import KINDS, Choice, Kind, is_table, kind_of, load_kind, near_ids
from clustersim.cli.validation_table import WORDS
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.units import format_seconds, format_step_time
from clustersim.validation.case_scenario import is_measured
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.comparison import Comparison
from clustersim.validation.summary import finite

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def show_case(which: Sequence[str], case_id: str, choice: Choice, outputs: Outputs) -> None:
    """Print the case; a step with where its predicted time goes. which: nothing, or [kind,] file of the case."""
    if choice.only:
        raise InputError(f"--only {choice.only}: is for tables of cases; validate show takes one id")
    kind, cases = _in_file(which, case_id, choice) if which else _find(case_id, choice)
    outputs.require([Path(which[-1]) if which else kind.shipped])
    if kind.name == KINDS[0]:
        _show_step(cases[0], outputs)
        return
    _show_rows(kind, cases, outputs)


def _find(case_id: str, choice: Choice) -> tuple[Kind, list[Case]]:
    """The shipped rows with that id, of the first kind that has them; raise InputError with the nearest ids."""
    if is_table(case_id):
        raise InputError(
            f"validate show {case_id}: say which of its cases, as in clustersim validate show {case_id} CASE_ID"
        )
    every: list[Case] = []
    for name in KINDS:
        kind = load_kind(name, choice)
        cases = kind.read(kind.shipped)
        found = [case for case in cases if case.text("case_id") == case_id]
        if found:
            return kind, found
        every += cases
    raise InputError(f"there is no published case {format_value(case_id)}; {near_ids(case_id, every)}")


def _in_file(which: Sequence[str], case_id: str, choice: Choice) -> tuple[Kind, list[Case]]:
    """The rows of a file with that id, and what the file holds; raise InputError with the nearest ids."""
    *kinds, name = which
    if any(kind not in KINDS for kind in kinds):
        raise InputError(
            f"validate show {format_value(kinds[0])}: there is no such kind; {suggest_nearest(kinds[0], KINDS)}"
        )
    if is_table(case_id) and not is_table(name):
        raise InputError(f"validate show: the file comes first, as in clustersim validate show {case_id} {name}")
    path = Path(name)
    kind = load_kind(kinds[0], choice) if kinds else kind_of(path, choice)
    cases = kind.read(path)
    found = [case for case in cases if case.text("case_id") == case_id]
    if not found:
        listed = f"clustersim validate {kind.name} {path} --json -"
        raise InputError(f"{path}: has no case {format_value(case_id)}; {near_ids(case_id, cases, listed)}")
    return kind, found


def _show_step(case: Case, outputs: Outputs) -> None:
    """A step: why there is no prediction, or all that there is to it."""
    from clustersim.validation.steps import band_of, factors_of, predicted_seconds

    mapping, result, reason = _simulated(case)
    predicted = None if result is None else predicted_seconds(result)
    measured, name, source = case.number("step_time_s"), case.text("case_id"), case.text("source")
    band = None if result is None else band_of(result)
    comparison = Comparison(name, source, measured, predicted, reason, factors=factors_of(case), band=band)
    if outputs.json is not None:
        whole = None if result is None else result.to_json()
        content = {"kind": "steps", **comparison.to_json(), "scenario": mapping, "prediction": whole}
        write_json(finite(content), outputs.json)
    if outputs.html is not None:
        _write_page(result, reason, outputs.html)
    if outputs.table:
        _print_step(case, comparison, mapping, result)
        for path in outputs.files.values():
            announce(path)


def _simulated(case: Case) -> "tuple[dict[str, Any] | None, SimulationResult | None, str | None]":
    """What a scenario file would hold, the answer, and why there is none; as many of them as there are."""
    from clustersim.simulation import simulate
    from clustersim.validation.case_scenario import scenario_mapping
    from clustersim.validation.steps import scenario_of

    mapping = None
    try:
        mapping = scenario_mapping(case)
        with waiting_for("simulating"):
            return mapping, simulate(scenario_of(case)), None
    except CannotPredictError as refusal:
        return mapping, None, str(refusal)


def _write_page(result: "SimulationResult | None", reason: str | None, path: str) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.run_page import run_page

    if result is None:
        raise InputError(f"--html: there is no prediction to draw: {reason}")
    write_text_atomically(path, run_page(result))


def _print_step(
    case: Case, comparison: Comparison, mapping: "dict[str, Any] | None", result: "SimulationResult | None"
) -> None:
    from rich.console import Console

    from clustersim.report.terminal.run import render_run

    if mapping is not None:
        print(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True))
    if result is not None:
        Console().print(render_run(result))
        print()
    print("\n".join(_lines(case, comparison, format_step_time)))


def _lines(case: Case, comparison: Comparison, words: Callable[[float], str]) -> Iterator[str]:
    """Measured and predicted, and where the measurement is from."""
    yield f"{comparison.case_id}"
    word = "measured" if is_measured(case) else "simulated"
    yield f"  {word:<10} {words(comparison.measured) if math.isfinite(comparison.measured) else 'not stated'}"
    if comparison.predicted is None or comparison.error is None:
        yield f"  skipped    {comparison.skipped}"
    else:
        yield f"  predicted  {words(comparison.predicted)}"
        yield f"  error      {comparison.error:+.1%}"
    if comparison.band is not None:
        judged = f": measured is {'inside' if comparison.inside else 'outside'}" if is_measured(case) else ""
        yield f"  expected   {words(comparison.band.low)} to {words(comparison.band.high)}{judged}"
    which = ("collective", "bytes") if case.text("collective") else ("quantity", "rank")  # of several rows of one case
    origin = () if is_measured(case) else ("step_time_origin",)
    stated = (name for name in (*which, "source", "locator", *origin, "quality", "notes") if case.text(name))
    yield from (f"  {name:<10} {case.text(name)}" for name in stated)


def _show_rows(kind: Kind, cases: Sequence[Case], outputs: Outputs) -> None:
    """All rows of a case of another kind."""
    if outputs.html is not None:
        raise InputError(f"--html: cases of {kind.name} have no page of their own; clustersim validate {kind.name} has")
    comparisons = kind.summarize(cases).comparisons
    if outputs.json is not None:
        write_json(finite({"kind": kind.name, "cases": [item.to_json() for item in comparisons]}), outputs.json)
    words = WORDS.get(kind.name, format_seconds)
    if outputs.table:
        for case, comparison in zip(cases, comparisons, strict=True):
            print("\n".join(_lines(case, comparison, words)))
