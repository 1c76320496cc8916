"""Terminal output of a run: order, labels and colours."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from clustersim.common.units import format_seconds, format_step_time
from clustersim.report.panels.verdict import verdict_panel
from clustersim.report.step_breakdown import StepBreakdown
from clustersim.report.terminal.run import breakdown_table
from clustersim.report.terminal.what_helps import what_helps_lines
from clustersim.results.oom_suggestions import MemorySuggestion
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario.changes.step_losses import StepLoss
from tests.small_pipeline import override_result, render_terminal, simulate_pipeline


def breakdown_lines(*seconds: float) -> dict[str, str]:
    """Lines of a breakdown table whose first categories take the given seconds, by category name."""
    step = np.zeros(len(TIME_CATEGORIES))
    step[: len(seconds)] = seconds
    console = Console(file=io.StringIO(), width=100)
    console.print(breakdown_table(StepBreakdown(step, np.zeros_like(step), step[None, :])))
    assert isinstance(console.file, io.StringIO)
    names = [*(category.value for category in TIME_CATEGORIES), "step"]
    lines = console.file.getvalue().splitlines()
    return {name: line for line in lines for name in names if line.startswith(f"{name} ")}


def test_the_step_time_comes_first() -> None:
    result = simulate_pipeline()
    assert render_terminal(result).startswith(f"step time {format_step_time(result.step_time)}")


@pytest.mark.parametrize(("seconds", "text"), [(7.0, "7.000 s"), (6.98, "6.980 s"), (0.12, "120.0 ms")])
def test_step_times_have_four_digits(seconds: float, text: str) -> None:
    first = render_terminal(override_result(simulate_pipeline(), step_time=seconds)).splitlines()[0]
    assert first.startswith(f"step time {text} ")


def test_breakdown_is_printed_with_its_sum() -> None:
    result = simulate_pipeline()
    lines = render_terminal(result).splitlines()
    compute = format_seconds(result.breakdown.mean_seconds()["compute"])
    assert any(line.startswith("compute ") and compute in line for line in lines)
    step_time = format_step_time(result.step_time)
    assert any(line.startswith("step ") and step_time in line and "100.0%" in line for line in lines)


def test_oom_is_in_the_first_line() -> None:
    assert "DOES NOT FIT" in render_terminal(override_result(simulate_pipeline(), fits_in_memory=False)).splitlines()[0]


@pytest.mark.parametrize(("terminal", "escapes"), [(False, False), (True, True)])
def test_colours_are_for_terminals_only(*, terminal: bool, escapes: bool) -> None:
    assert ("\x1b[" in render_terminal(simulate_pipeline(), terminal=terminal)) is escapes


def test_brackets_in_names_are_not_markup() -> None:
    assert "[red]name[/red]" in render_terminal(simulate_pipeline("name='[red]name[/red]'"))


def test_bars_are_proportional() -> None:
    lines = breakdown_lines(1.0, 0.5, 0.03, 0.0001)
    assert lines["compute"].count("█") == 20
    assert lines["recompute"].count("█") == 10
    assert lines["optimizer"].rstrip()[-1] == "▋"  # 0.03 · 20 = 0.6 of a character
    assert lines["kernel launch"].rstrip()[-1] == "%"


def test_rounding_errors_have_no_line() -> None:
    assert breakdown_lines(1.0, 1e-12, 0.5).keys() == {"compute", "optimizer", "step"}


def test_suggestions_and_prediction_interval_lines() -> None:
    suggestion = MemorySuggestion(("layout.tp=8",), "would fit")
    result = override_result(
        simulate_pipeline(), oom_suggestions=(suggestion,), interval_description="as fast as others"
    )
    text = render_terminal(result)
    assert "suggestion: --set layout.tp=8 would fit" in text
    assert "as fast as others" in text.splitlines()


def test_a_chaotic_step_has_a_row_of_its_spread() -> None:
    quiet = simulate_pipeline()
    chaotic = replace(quiet, perturbed_step_times=(0.99 * quiet.step_time, 1.02 * quiet.step_time))
    (row,) = (line for line in render_terminal(chaotic).splitlines() if line.startswith("chaotic "))
    assert "-1.00% to +2.00%" in row
    assert "chaotic" not in render_terminal(quiet)


def test_limitations_are_one_line() -> None:
    text = render_terminal(override_result(simulate_pipeline(), model_limitations=("jitter between GPUs", "b", "c")))
    assert "3 effects are not modelled, see --json or the page" in text
    assert "jitter" not in text


def test_large_rates_have_no_exponent() -> None:
    result = simulate_pipeline()
    assert "82,580 per GPU" in render_terminal(override_result(result, tokens_per_second=82_583.4 * result.rank_count))


def test_causal_mfu_is_shown_where_it_differs() -> None:
    """At long contexts most FLOP of the conventional count are for keys masked by causality."""
    long_context = override_result(simulate_pipeline(), mfu=0.782, mfu_causal=0.441)
    short_context = override_result(simulate_pipeline(), mfu=0.413, mfu_causal=0.409)
    (row,) = (line for line in render_terminal(long_context, 160).splitlines() if line.startswith("MFU"))
    name, value, meaning = row.split(None, 2)
    assert (name, value) == ("MFU", "44.1%")
    assert meaning.index("causal attention") < meaning.index("78.2% with attention as a full matrix")
    assert "causal" not in render_terminal(short_context)
    card = verdict_panel(long_context).html
    assert "<b>44.1%<small>&nbsp;MFU</small></b>" in card
    assert card.index("<dt>MFU, causal</dt><dd>44.1%</dd>") < card.index("<dt>MFU, full matrix</dt><dd>78.2%</dd>")
    assert "MFU, causal" not in verdict_panel(short_context).html


def test_what_helps_is_printed_with_its_arguments_and_what_was_not_tried() -> None:
    outcome = WhatIfOutcome(9.0, 10.0, 1.0, 1.0, 2.0**30, True, 0.95, 0.0, dict.fromkeys(StepLoss, 0.0))
    losses = frozenset({StepLoss.LAUNCH})
    graphs = WhatIf("graphs", "CUDA graphs", outcome, addresses=losses, overrides=("framework.cuda_graphs=true",))
    illegal = WhatIf("chunks", "more chunks", None, "illegal", losses)
    lines = [str(line) for line in what_helps_lines(WhatIfReport(10.0, 1.0, True, 0.95, (graphs, illegal)))]
    assert "-10.0%  CUDA graphs" in lines[0] and "95%" in lines[0]
    assert lines[1].strip() == "--set framework.cuda_graphs=true"
    assert "1 change of settings tried" in lines[2] and lines[2].endswith("more chunks")
