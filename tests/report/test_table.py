import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from clustersim.report.table import render_table
from clustersim.report.view import PageView


def printed(view: PageView, *, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=terminal, color_system="truecolor" if terminal else "auto"
    )
    console.print(render_table(view.subject, view.verdict, view.breakdown, view.trust))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_step_time_comes_first(make_view: Callable[..., PageView]) -> None:
    assert printed(make_view()).startswith("step time 352.4 ms")


def test_parts_are_printed_with_their_sum(make_view: Callable[..., PageView]) -> None:
    lines = printed(make_view()).splitlines()
    assert any(line.startswith("forward") and "80 ms" in line for line in lines)
    assert any(line.startswith("step ") and "352.4 ms" in line and "100.0%" in line for line in lines)


def test_what_does_not_fit_is_said_in_the_first_line(make_view: Callable[..., PageView]) -> None:
    view = make_view()
    assert "DOES NOT FIT" in printed(replace(view, verdict=replace(view.verdict, fits=False))).splitlines()[0]


@pytest.mark.parametrize(("terminal", "escapes"), [(False, False), (True, True)])
def test_colours_are_for_terminals_only(make_view: Callable[..., PageView], *, terminal: bool, escapes: bool) -> None:
    assert ("\x1b[" in printed(make_view(), terminal=terminal)) is escapes


def test_brackets_in_names_are_not_markup(make_view: Callable[..., PageView]) -> None:
    assert "[red]name[/red]" in printed(make_view(model="[red]name[/red]", warning="[bold]"))
