"""The verdict panel: key figures, largest losses, uncertainty and the nearest published run."""

import html
import re
from dataclasses import replace

import pytest

from clustersim.common.units import format_seconds
from clustersim.report.panels import verdict
from clustersim.report.panels.verdict import largest_losses, verdict_panel
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_losses import LossRemedies, TimeLoss
from clustersim.results.utilization import CONVENTION
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario.changes.step_losses import StepLoss
from tests.sentences import parts
from tests.small_pipeline import override_result, simulate_pipeline

TP_LOSS = TimeLoss(StepLoss("exposed tp"), 0.652, 0.086)
NEAREST_RUN = NearestRun("<source>", "table <2>", "<Model> on 64 × GPU", ("a", "b", "c", "d", "e"), 8.0, 7.6)
TOKENS_OVERRIDE = ("economics.tokens=15T",)


def text_of_html(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("\N{NO-BREAK SPACE}", " ").split())


def verdict_text(result: SimulationResult, nearest: NearestRun | None = None) -> str:
    return text_of_html(verdict_panel(result, nearest=nearest).html)


def what_if_outcome(name: str, relative_change: float) -> tuple[WhatIf, WhatIfOutcome]:
    outcome = WhatIfOutcome(
        10.0 * (1 + relative_change), 10.0, 1.0, 1.0, 1.0, True, 0.95, 0.0, dict.fromkeys(StepLoss, 0.0)
    )
    return WhatIf(name, name, outcome), outcome


def test_verdict_precedes_figures_and_conventions() -> None:
    card = verdict_panel(simulate_pipeline(), nearest=NEAREST_RUN).html
    order = [
        "tokens/s per GPU",
        "MFU",
        "left",
        "Largest losses",
        "Prediction interval",
        "Nearest published run",
        "Key metrics",
    ]
    positions = [card.index(heading) for heading in order]
    assert positions == sorted(positions)
    assert positions[-1] < html.unescape(card).index(CONVENTION)


def test_memory_headroom_is_left_or_exceeded() -> None:
    fits = override_result(
        simulate_pipeline(), peak_memory=50 * 2.0**30, memory_capacity=80 * 2.0**30, fits_in_memory=True
    )
    assert "fits 30 GiB left" in verdict_text(fits)
    full = override_result(
        simulate_pipeline(), peak_memory=90 * 2.0**30, memory_capacity=80 * 2.0**30, fits_in_memory=False
    )
    assert "does not fit 10 GiB too much" in verdict_text(full)


def test_run_with_tokens_has_duration_and_cost() -> None:
    result = simulate_pipeline(*TOKENS_OVERRIDE)
    economics = result.economics
    assert economics.run_seconds is not None
    assert economics.run_seconds == pytest.approx(15e12 / result.tokens_per_second)
    assert format_seconds(economics.run_seconds) in verdict_text(result)
    assert "for 15T tokens: steps only, without failures" in verdict_text(result)
    assert "per trillion tokens" in verdict_text(simulate_pipeline()) and "without failures" not in verdict_text(
        simulate_pipeline()
    )


def test_a_chaotic_step_has_its_spread_among_the_key_figures() -> None:
    quiet = simulate_pipeline()
    chaotic = replace(quiet, perturbed_step_times=(0.99 * quiet.step_time, 1.02 * quiet.step_time))
    assert "chaotic step -1.00% to +2.00%" in verdict_text(chaotic)
    assert "chaotic" not in verdict_text(quiet)


def test_losses_list_improvements_or_sensitivities(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict_with_help(loss_help: LossRemedies | None) -> str:
        monkeypatch.setattr(verdict, "largest_losses", lambda *_: [(TP_LOSS, loss_help)])
        return verdict_text(simulate_pipeline())

    text = verdict_with_help(
        LossRemedies(
            (what_if_outcome("faster links", -0.05), what_if_outcome("b", -0.04), what_if_outcome("third", -0.03))
        )
    )
    assert "exposed tp" in text and "652 ms · 8.6%" in text
    assert "helps: faster links: -5.0%" in text and "third" not in text and "does not fit" not in text
    links, outcome = what_if_outcome("faster links", -0.05)
    too_much = verdict_with_help(LossRemedies(((links, replace(outcome, fits_in_memory=False)),)))
    assert "helps: faster links: -5.0% (does not fit)" in too_much
    assert "most sensitive to: slow links: +1.2%" in verdict_with_help(
        LossRemedies((), what_if_outcome("slow links", 0.012))
    )
    illegal = WhatIf("chunks", "more chunks", None, "126 layers do not divide", frozenset({TP_LOSS.loss}))
    nothing = verdict_with_help(LossRemedies((), None, ("user buffers",), (illegal,)))
    assert "none reduces it in a shorter step that fits: user buffers" in nothing
    assert "not tried: more chunks" in nothing
    many = verdict_with_help(LossRemedies((), None, ("user buffers", "b", "c", "d")))
    assert parts("user buffers; b; 2 more").search(many)
    assert "nothing that addresses it was tried" in verdict_with_help(LossRemedies(()))
    assert "tried" not in verdict_with_help(None)


def advice_text(*cases: WhatIf, combined: WhatIf | None = None) -> str:
    report = WhatIfReport(10.0, 1.0, True, 0.95, cases, combined)
    return text_of_html(verdict_panel(simulate_pipeline(), report).html)


def test_what_helps_names_the_arguments_the_memory_and_other_numerics() -> None:
    graphs = replace(what_if_outcome("CUDA graphs", -0.4)[0], overrides=("framework.cuda_graphs=true",))
    formats = replace(
        what_if_outcome("FP8", -0.2)[0], overrides=("training.precision.compute=fp8",), changes_numerics=True
    )
    text = advice_text(formats, graphs, combined=replace(graphs, description="both"))
    assert text.index("CUDA graphs -40.0%") < text.index("FP8 -20.0%")
    assert "--set framework.cuda_graphs=true" in text and "fits with a probability of 95%" in text
    assert "check convergence" in text[text.index("FP8 -20.0%") :]
    assert "check convergence" not in text[: text.index("FP8 -20.0%")]
    assert "together: both -40.0%" in text


def test_nothing_helps_is_said_only_of_what_was_tried() -> None:
    slower = replace(what_if_outcome("zb-v", 0.1)[0], overrides=("schedule=zb-v",))
    assert "None of the 1 changes of settings that were tried" in advice_text(slower)


def test_formats_of_the_matmuls_are_shown() -> None:
    """The page of a step in FP8 did not open once."""
    card = verdict_panel(simulate_pipeline("training.precision=fp8")).html
    assert "of matmuls: " in html.unescape(card) and "bf16 peaks" in text_of_html(card)


def test_nearest_run_shows_error_and_differences() -> None:
    card = verdict_panel(simulate_pipeline(), nearest=NEAREST_RUN).html
    assert "<Model>" not in card and "<source>" not in card
    assert "8.000 s a step measured, 7.600 s predicted ( -5.0% )" in text_of_html(card)
    assert "differs in: a, b, c, d and 1 more" in text_of_html(card)
    same = verdict_text(simulate_pipeline(), replace(NEAREST_RUN, differences=(), predicted_step_time=None))
    assert "equal in all compared features" in same and " predicted (" not in same


def test_losses_of_a_result_are_its_three_largest() -> None:
    losses = largest_losses(simulate_pipeline(), None)
    assert 0 < len(losses) <= 3
    seconds = [loss.seconds for loss, _ in losses]
    assert seconds == sorted(seconds, reverse=True)


def test_a_job_that_fits_by_prediction_alone_may_fit() -> None:
    """A hair below the capacity: published errors of predicted memory say that it is no certain thing."""
    plan = simulate_pipeline()
    capacity = plan.peak_memory * 1.001
    tight = override_result(plan, memory_capacity=capacity, fit_probability=0.44, fits_in_memory=True)
    assert "may fit" in verdict_text(tight) and "44%" in verdict_text(tight)
    assert "may fit" not in verdict_text(override_result(plan, fit_probability=0.95, fits_in_memory=True))
