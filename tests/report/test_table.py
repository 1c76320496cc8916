import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from clustersim.report.table import render_table
from clustersim.report.verdict import verdict_card
from clustersim.report.view import PageView

View = Callable[..., PageView]


def printed(view: PageView, *, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=terminal, color_system="truecolor" if terminal else "auto"
    )
    console.print(render_table(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_step_time_comes_first(make_view: View) -> None:
    assert printed(make_view()).startswith("step time 352.4 ms")


@pytest.mark.parametrize(("seconds", "words"), [(7.0, "7.000 s"), (6.98, "6.980 s"), (0.12, "120.0 ms")])
def test_step_times_have_four_digits(make_view: View, seconds: float, words: str) -> None:
    view = make_view()
    first = printed(replace(view, verdict=replace(view.verdict, step_time=seconds))).splitlines()[0]
    assert first.startswith(f"step time {words} ")


def test_parts_are_printed_with_their_sum(make_view: View) -> None:
    lines = printed(make_view()).splitlines()
    assert any(line.startswith("forward") and "80 ms" in line for line in lines)
    assert any(line.startswith("step ") and "352.4 ms" in line and "100.0%" in line for line in lines)


def test_what_does_not_fit_is_said_in_the_first_line(make_view: View) -> None:
    view = make_view()
    assert "DOES NOT FIT" in printed(replace(view, verdict=replace(view.verdict, fits=False))).splitlines()[0]


@pytest.mark.parametrize(("terminal", "escapes"), [(False, False), (True, True)])
def test_colours_are_for_terminals_only(make_view: View, *, terminal: bool, escapes: bool) -> None:
    assert ("\x1b[" in printed(make_view(), terminal=terminal)) is escapes


def test_brackets_in_names_are_not_markup(make_view: View) -> None:
    assert "[red]name[/red]" in printed(make_view(model="[red]name[/red]", warning="[bold]"))


def test_bars_are_in_proportion_and_empty_where_there_is_nothing_to_see(make_view: View) -> None:
    view = make_view()
    step = np.zeros_like(view.breakdown.step)
    step[:4] = [1.0, 0.5, 0.03, 0.0001]
    text = printed(replace(view, breakdown=replace(view.breakdown, step=step, stages=step[None, :])))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["forward"].count("█") == 20
    assert lines["backward"].count("█") == 10
    assert lines["recompute"].rstrip()[-1] == "▋"  # 0.03 · 20 = 0.6 of a character
    assert lines["optimizer"].rstrip()[-1] == "%"


def test_warnings_suggestions_and_experience_are_apart(make_view: View) -> None:
    text = printed(make_view(warning="odd batch", suggestion="tp 8 would fit"))
    assert "warning: odd batch" in text
    assert "suggestion: tp 8 would fit" in text
    assert "trust: as fast as others" in text


def test_what_is_not_modelled_is_one_line(make_view: View) -> None:
    text = printed(make_view())
    assert "3 effects are not modelled, see --json or the page" in text
    assert "jitter" not in text


def test_what_is_only_rounding_is_no_part(make_view: View) -> None:
    view = make_view()
    step, stages = view.breakdown.step.copy(), view.breakdown.stages.copy()
    step[2] = stages[:, 2] = 1e-16 * view.verdict.step_time
    assert "recompute" not in printed(replace(view, breakdown=replace(view.breakdown, step=step, stages=stages)))


def test_large_rates_have_no_exponent(make_view: View) -> None:
    view = make_view()
    assert "82,580 per GPU" in printed(replace(view, verdict=replace(view.verdict, tokens_per_s_per_gpu=82_583.4)))


def test_mfu_is_told_twice_where_causal_attention_makes_a_difference(make_view: View) -> None:
    """At long contexts by convention most of it is keys that no query sees."""
    view = make_view()
    long = replace(view, verdict=replace(view.verdict, mfu=0.782, mfu_causal=0.441))
    short = replace(view, verdict=replace(view.verdict, mfu=0.413, mfu_causal=0.409))
    assert "78.2% (causal 44.1%)" in printed(long)
    assert "causal" not in printed(short)
    assert "<dt>MFU, causal</dt><dd>44.1%</dd>" in verdict_card(long)
    assert "MFU, causal" not in verdict_card(short)
