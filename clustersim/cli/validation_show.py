"""What is one published case? Its scenario as a file would hold it, and the prediction next to the measurement."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import show_activity
from clustersim.cli.validation_kinds import (
    KINDS,
    ValidationKind,
    ValidationOptions,
    detect_kind,
    is_csv_name,
    load_kind,
    suggest_case_ids,
)
from clustersim.cli.validation_table import VALUE_FORMATS
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.units import format_seconds, format_step_time
from clustersim.validation.case_scenario import is_measured
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.summary import replace_non_finite

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def show_case(location: Sequence[str], case_id: str, options: ValidationOptions, outputs: Outputs) -> None:
    """Print one case; for a step, also where its predicted time goes. location: empty, or [kind,] file of the case."""
    if options.only:
        raise InputError(f"--only {options.only}: is for tables of cases; validate show takes one id")
    kind, cases = _find_case_in_file(location, case_id, options) if location else _find_published_case(case_id, options)
    outputs.check_writable([Path(location[-1]) if location else kind.data_file])
    if kind.name == KINDS[0]:
        _show_step(cases[0], outputs)
        return
    _show_measurements(kind, cases, outputs)


def _find_published_case(case_id: str, options: ValidationOptions) -> tuple[ValidationKind, list[ValidationCase]]:
    """The packaged measurements with that id, of the first kind that has them; raise InputError with similar ids."""
    if is_csv_name(case_id):
        raise InputError(
            f"validate show {case_id}: say which of its cases, as in clustersim validate show {case_id} CASE_ID"
        )
    all_cases: list[ValidationCase] = []
    for name in KINDS:
        kind = load_kind(name, options)
        cases = kind.read(kind.data_file)
        matches = [case for case in cases if case.text("case_id") == case_id]
        if matches:
            return kind, matches
        all_cases += cases
    raise InputError(f"there is no published case {format_value(case_id)}; {suggest_case_ids(case_id, all_cases)}")


def _find_case_in_file(
    location: Sequence[str], case_id: str, options: ValidationOptions
) -> tuple[ValidationKind, list[ValidationCase]]:
    """The measurements with that id in a file, and the file's kind; raise InputError with similar ids."""
    *kinds, name = location
    if any(kind not in KINDS for kind in kinds):
        raise InputError(
            f"validate show {format_value(kinds[0])}: there is no such kind; {suggest_nearest(kinds[0], KINDS)}"
        )
    if is_csv_name(case_id) and not is_csv_name(name):
        raise InputError(f"validate show: the file comes first, as in clustersim validate show {case_id} {name}")
    path = Path(name)
    kind = load_kind(kinds[0], options) if kinds else detect_kind(path, options)
    cases = kind.read(path)
    matches = [case for case in cases if case.text("case_id") == case_id]
    if not matches:
        list_command = f"clustersim validate {kind.name} {path} --json -"
        raise InputError(
            f"{path}: has no case {format_value(case_id)}; {suggest_case_ids(case_id, cases, list_command)}"
        )
    return kind, matches


def _show_step(case: ValidationCase, outputs: Outputs) -> None:
    """Print and write a step: its prediction, or why there is none."""
    from clustersim.validation.steps import error_groupings, predicted_step_seconds, step_time_interval

    mapping, result, reason = _simulate_case(case)
    predicted = None if result is None else predicted_step_seconds(result)
    measured, name, source = case.positive_float("step_time_s"), case.text("case_id"), case.text("source")
    interval = None if result is None else step_time_interval(result)
    comparison = CaseComparison(
        name, source, measured, predicted, reason, groupings=error_groupings(case), interval=interval
    )
    if outputs.json is not None:
        prediction = None if result is None else result.to_json()
        content = {"kind": "steps", **comparison.to_json(), "scenario": mapping, "prediction": prediction}
        write_json(replace_non_finite(content), outputs.json)
    if outputs.html is not None:
        _write_page(result, reason, outputs.html)
    if outputs.table:
        _print_step(case, comparison, mapping, result)
        for path in outputs.file_paths.values():
            announce_file(path)


def _simulate_case(case: ValidationCase) -> "tuple[dict[str, Any] | None, SimulationResult | None, str | None]":
    """The scenario mapping, the result, and why there is no result; None for what is missing."""
    from clustersim.simulation import simulate
    from clustersim.validation.case_scenario import scenario_mapping
    from clustersim.validation.steps import build_scenario

    mapping = None
    try:
        mapping = scenario_mapping(case)
        with show_activity("simulating"):
            return mapping, simulate(build_scenario(case)), None
    except CannotPredictError as refusal:
        return mapping, None, str(refusal)


def _write_page(result: "SimulationResult | None", reason: str | None, path: str) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.run_page import run_page

    if result is None:
        raise InputError(f"--html: there is no prediction to draw: {reason}")
    write_text_atomically(path, run_page(result))


def _print_step(
    case: ValidationCase,
    comparison: CaseComparison,
    mapping: "dict[str, Any] | None",
    result: "SimulationResult | None",
) -> None:
    from clustersim.cli.terminal import new_console
    from clustersim.report.terminal.run import render_run

    if mapping is not None:
        print(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True))
    if result is not None:
        new_console().print(render_run(result))
        print()
    print("\n".join(_comparison_lines(case, comparison, format_step_time)))


def _comparison_lines(
    case: ValidationCase, comparison: CaseComparison, formatter: Callable[[float], str]
) -> Iterator[str]:
    """Measured and predicted values, and the source of the measurement."""
    yield f"{comparison.case_id}"
    label = "measured" if is_measured(case) else "simulated"
    yield f"  {label:<10} {formatter(comparison.measured) if math.isfinite(comparison.measured) else 'not stated'}"
    if comparison.predicted is None or comparison.error is None:
        yield f"  skipped    {comparison.skip_reason}"
    else:
        yield f"  predicted  {formatter(comparison.predicted)}"
        yield f"  error      {comparison.error:+.1%}"
    if comparison.interval is not None:
        verdict = (
            f": measured is {'inside' if comparison.is_inside_interval else 'outside'}" if is_measured(case) else ""
        )
        yield f"  interval   {formatter(comparison.interval.low)} to {formatter(comparison.interval.high)}{verdict}"
    key_columns = (
        ("collective", "bytes") if case.text("collective") else ("quantity", "rank")
    )  # distinguish several measurements of one case
    origin = () if is_measured(case) else ("step_time_origin",)
    present_columns = (
        name for name in (*key_columns, "source", "locator", *origin, "quality", "notes") if case.text(name)
    )
    yield from (f"  {name:<10} {case.text(name)}" for name in present_columns)


def _show_measurements(kind: ValidationKind, cases: Sequence[ValidationCase], outputs: Outputs) -> None:
    """Print and write all measurements of a case that is not a step."""
    if outputs.html is not None:
        raise InputError(f"--html: cases of {kind.name} have no page of their own; clustersim validate {kind.name} has")
    comparisons = kind.summarize(cases).comparisons
    if outputs.json is not None:
        write_json(
            replace_non_finite({"kind": kind.name, "cases": [comparison.to_json() for comparison in comparisons]}),
            outputs.json,
        )
    formatter = VALUE_FORMATS.get(kind.name, format_seconds)
    if outputs.table:
        for case, comparison in zip(cases, comparisons, strict=True):
            print("\n".join(_comparison_lines(case, comparison, formatter)))
