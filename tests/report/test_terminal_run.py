"""What the terminal says of a run: in which order, in which words, and in colour only where there are colours."""

import io

import numpy as np
import pytest
from rich.console import Console

from clustersim.common.units import format_seconds, format_step_time
from clustersim.report.panels.verdict import verdict_panel
from clustersim.report.step_breakdown import StepBreakdown
from clustersim.report.terminal.run import breakdown_table
from clustersim.results.time_categories import TIME_CATEGORIES
from tests.small_pipeline import printed, said, simulated


def parts(*seconds: float) -> dict[str, str]:
    """Lines of a breakdown whose first parts take so long, by name."""
    step = np.zeros(len(TIME_CATEGORIES))
    step[: len(seconds)] = seconds
    console = Console(file=io.StringIO(), width=100)
    console.print(breakdown_table(StepBreakdown(step, np.zeros_like(step), step[None, :])))
    assert isinstance(console.file, io.StringIO)
    names = [*(part.value for part in TIME_CATEGORIES), "step"]
    lines = console.file.getvalue().splitlines()
    return {name: line for line in lines for name in names if line.startswith(f"{name} ")}


def test_the_step_time_comes_first() -> None:
    result = simulated()
    assert printed(result).startswith(f"step time {format_step_time(result.step_time)}")


@pytest.mark.parametrize(("seconds", "words"), [(7.0, "7.000 s"), (6.98, "6.980 s"), (0.12, "120.0 ms")])
def test_step_times_have_four_digits(seconds: float, words: str) -> None:
    first = printed(said(simulated(), step_time=seconds)).splitlines()[0]
    assert first.startswith(f"step time {words} ")


def test_parts_are_printed_with_their_sum() -> None:
    result = simulated()
    lines = printed(result).splitlines()
    compute = format_seconds(result.breakdown.mean_seconds()["compute"])
    assert any(line.startswith("compute ") and compute in line for line in lines)
    whole = format_step_time(result.step_time)
    assert any(line.startswith("step ") and whole in line and "100.0%" in line for line in lines)


def test_what_does_not_fit_is_said_in_the_first_line() -> None:
    assert "DOES NOT FIT" in printed(said(simulated(), fits=False)).splitlines()[0]


@pytest.mark.parametrize(("terminal", "escapes"), [(False, False), (True, True)])
def test_colours_are_for_terminals_only(*, terminal: bool, escapes: bool) -> None:
    assert ("\x1b[" in printed(simulated(), terminal=terminal)) is escapes


def test_brackets_in_names_are_not_markup() -> None:
    assert "[red]name[/red]" in printed(simulated("name='[red]name[/red]'"))


def test_bars_are_in_proportion_and_empty_where_there_is_nothing_to_see() -> None:
    lines = parts(1.0, 0.5, 0.03, 0.0001)
    assert lines["compute"].count("█") == 20
    assert lines["recompute"].count("█") == 10
    assert lines["optimizer"].rstrip()[-1] == "▋"  # 0.03 · 20 = 0.6 of a character
    assert lines["kernel launch"].rstrip()[-1] == "%"


def test_what_is_only_rounding_is_no_part() -> None:
    assert parts(1.0, 1e-12, 0.5).keys() == {"compute", "optimizer", "step"}


def test_suggestions_and_experience_are_apart() -> None:
    text = printed(said(simulated(), suggestions=("tp 8 would fit",), experience="as fast as others"))
    assert "suggestion: tp 8 would fit" in text
    assert "trust: as fast as others" in text


def test_what_is_not_modelled_is_one_line() -> None:
    text = printed(said(simulated(), not_modelled=("jitter between GPUs", "b", "c")))
    assert "3 effects are not modelled, see --json or the page" in text
    assert "jitter" not in text


def test_large_rates_have_no_exponent() -> None:
    result = simulated()
    assert "82,580 per GPU" in printed(said(result, tokens_per_second=82_583.4 * result.rank_count))


def test_mfu_is_told_twice_where_causal_attention_makes_a_difference() -> None:
    """At long contexts by convention most of it is keys that no query sees."""
    long = said(simulated(), mfu=0.782, mfu_causal=0.441)
    short = said(simulated(), mfu=0.413, mfu_causal=0.409)
    assert "78.2% (causal 44.1%)" in printed(long)
    assert "causal" not in printed(short)
    assert "<dt>MFU, causal</dt><dd>44.1%</dd>" in verdict_panel(long).html
    assert "MFU, causal" not in verdict_panel(short).html
