"""What does `clustersim explain` do? Say whether a measured step time is reasonable, and what would explain the gap."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.outputs import STDOUT, Outputs, write_json
from clustersim.cli.progress import waiting_for
from clustersim.common.errors import InputError
from clustersim.common.units import format_step_time
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from rich.table import Table

    from clustersim.validation.explain import Cause, Explanation

_MUCH: Final = 2.0  # of the gap: from here on times, not per cent


def explain_step(file: Path, measured: str, overrides: Sequence[str], json: str | None) -> None:
    """Simulate the scenario as it stands and with each cause, and print (or write) the answer."""
    from clustersim.validation.explain import explain, measured_time

    try:
        seconds = measured_time(measured)
    except InputError as error:
        raise InputError(f"--measured: {error}") from error
    scenario = Scenario.load(file, overrides)
    Outputs(json=json).require((file, *scenario.files))
    with waiting_for("simulating causes"):
        explanation = explain(scenario, seconds)
    if json is not None:
        write_json(explanation.to_json(), json)
    if json != STDOUT:
        _print(explanation)


def _print(explanation: "Explanation") -> None:
    from rich.console import Console, Group
    from rich.text import Text

    from clustersim.report.labels import CRITICAL_PATH
    from clustersim.report.step_breakdown import times_of
    from clustersim.report.terminal.run import breakdown_table

    result = explanation.result
    lines: list[Text | Table] = [
        Text(explanation.verdict, style="bold"),
        Text(f"{result.scenario.name}: MFU {result.mfu():.1%} expected, {_measured_mfu(explanation):.1%} measured"),
        Text(f"trust: {result.interval_description}", style="dim"),
        Text(),
        Text("where the expected time goes"),
        breakdown_table(times_of(result)),
        Text(CRITICAL_PATH, style="dim"),
        Text(),
    ]
    if any(cause.visible for cause in explanation.causes):
        lines += [Text(f"what would explain {_gap(explanation)}, each alone"), _table(explanation)]
    lines += [Text(line) for line in (*_invisible(explanation.causes), *explanation.notes)]
    Console().print(Group(*lines))


def _measured_mfu(explanation: "Explanation") -> float:
    return explanation.result.mfu() * explanation.expected / explanation.measured


def _gap(explanation: "Explanation") -> str:
    seconds = explanation.measured - explanation.expected
    return f"{format_step_time(abs(seconds))} {'more' if seconds > 0 else 'less'}"


def _table(explanation: "Explanation") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(head, style="dim") for head in ("", "step", "change", "of the gap")))
    for cause in explanation.causes:
        if cause.visible:
            change = f"{cause.step_time / explanation.expected - 1.0:+.1%}"
            what = Text(cause.what, style="" if cause.explains else "dim")
            table.add_row(what, format_step_time(cause.step_time), change, _share(cause.share))
    return table


def _share(share: float) -> str:
    return f"{share:.1f} x" if abs(share) >= _MUCH else f"{share:.0%}"


def _invisible(causes: "Sequence[Cause]") -> list[str]:
    """What changes next to nothing, and what would widen the gap, in a line each."""
    away = [f"{cause.what} ({format_step_time(cause.step_time)})" for cause in causes if cause.opposite]
    rest = [cause.what.removeprefix("even with ") for cause in causes if not (cause.visible or cause.opposite)]
    told = [(f"no visible part of the gap: {'; '.join(rest)}", rest), (f"the other way: {'; '.join(away)}", away)]
    return [line for line, there in told if there]
