"""What does `clustersim explain` do? Say whether a measured step time is reasonable, and what explains the gap."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.outputs import Outputs, write_json
from clustersim.cli.progress import show_activity
from clustersim.cli.what_if import simulate_what_ifs, what_ifs_to_json
from clustersim.common.errors import InputError
from clustersim.common.units import format_step_time
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from rich.table import Table

    from clustersim.results.what_if import WhatIfReport
    from clustersim.validation.explain import GapExplanation
    from clustersim.validation.explain_causes import CandidateCause

_RATIO_THRESHOLD: Final = 2.0  # shares of the gap from here on are printed as a ratio, not in percent


def explain_step(file: Path, measured: str, overrides: Sequence[str], outputs: Outputs) -> None:
    """Simulate the scenario unchanged and with each possible cause, and print (or write) the explanation."""
    from clustersim.validation.explain import explain_gap
    from clustersim.validation.explain_measurement import parse_measurement

    try:
        measurement = parse_measurement(measured)
    except InputError as error:
        raise InputError(f"--measured: {error}") from error
    scenario = Scenario.load(file, overrides)
    outputs.check_writable((file, *scenario.files))
    with show_activity("simulating causes"):
        explanation = explain_gap(scenario, measurement)
        what_ifs = simulate_what_ifs(explanation.result, requested=outputs.what_if)
    if outputs.json is not None:
        write_json(explanation.to_json() | what_ifs_to_json(what_ifs), outputs.json)
    if outputs.table:
        _print_explanation(explanation, what_ifs)


def _print_explanation(explanation: "GapExplanation", what_ifs: "WhatIfReport | None") -> None:
    from rich.console import Group
    from rich.text import Text

    from clustersim.cli.terminal import new_console
    from clustersim.report.labels import CRITICAL_PATH_NOTE
    from clustersim.report.step_breakdown import step_breakdown
    from clustersim.report.terminal.run import breakdown_table
    from clustersim.report.terminal.table import build_table, warning_lines
    from clustersim.report.terminal.what_helps import what_helps_lines

    result = explanation.result
    expected, measured = map(explanation.mfu_of, (explanation.expected, explanation.measured))
    lines: list[Text | Table] = [
        Text(explanation.verdict, style="bold"),
        Text(f"{result.scenario.name}: {result.leading_mfu.name} {expected:.1%} expected, {measured:.1%} measured"),
        *([Text(explanation.conversion)] if explanation.conversion else []),
        build_table(("", "", ""), explanation.interval_rows),
        Text(result.interval_description, style="dim"),
        Text(),
        Text("where the expected time goes"),
        breakdown_table(step_breakdown(result)),
        Text(CRITICAL_PATH_NOTE, style="dim"),
        Text(),
    ]
    if any(cause.is_visible for cause in explanation.causes):
        lines += [Text(f"what would explain {_format_gap(explanation)}, each in isolation"), _cause_table(explanation)]
    lines += [Text(line) for line in (*_hidden_cause_lines(explanation.causes), *explanation.notes)]
    lines += [*what_helps_lines(what_ifs, "the scenario"), *warning_lines(result.scenario.warnings)]
    new_console().print(Group(*lines), crop=False)  # arguments are on one line, to be copied


def _format_gap(explanation: "GapExplanation") -> str:
    seconds = explanation.measured - explanation.expected
    return f"{format_step_time(abs(seconds))} {'more' if seconds > 0 else 'less'}"


def _cause_table(explanation: "GapExplanation") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(head, style="dim") for head in ("", "step", "change", "of the gap")))
    for cause in explanation.causes:
        if cause.is_visible:
            change = f"{cause.step_time / explanation.expected - 1.0:+.1%}"
            label = Text(cause.description, style="" if cause.explains else "dim")
            table.add_row(label, format_step_time(cause.step_time), change, _format_share(cause.gap_share))
    return table


def _format_share(share: float) -> str:
    return f"{share:.1f} x" if abs(share) >= _RATIO_THRESHOLD else f"{share:.0%}"


def _hidden_cause_lines(causes: "Sequence[CandidateCause]") -> list[str]:
    """One line for causes with a negligible effect, one for causes that would widen the gap."""
    opposite = [f"{cause.description} ({format_step_time(cause.step_time)})" for cause in causes if cause.widens_gap]
    negligible = [
        cause.description.removeprefix("even with ") for cause in causes if not (cause.is_visible or cause.widens_gap)
    ]
    candidate_lines = [
        (f"negligible effect: {'; '.join(negligible)}", negligible),
        (f"would widen the gap: {'; '.join(opposite)}", opposite),
    ]
    return [line for line, items in candidate_lines if items]
