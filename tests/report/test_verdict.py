"""The top of the page: what decides stands before all else, in the words that it needs and none that are not known."""

import html
import re
from dataclasses import replace

import pytest

from clustersim.common.units import format_seconds
from clustersim.report.panels import verdict
from clustersim.report.panels.verdict import largest_losses, verdict_panel
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TimeCategory
from clustersim.results.time_losses import LossRemedies, TimeLoss
from clustersim.results.utilization import CONVENTION
from clustersim.results.what_if import WhatIf, WhatIfOutcome
from tests.small_pipeline import said, simulated

LOSS = TimeLoss("exposed tp", 0.652, 0.086, (TimeCategory("exposed tp"),))
RUN = NearestRun("<source>", "table <2>", "<Model> on 64 × GPU", ("a", "b", "c", "d", "e"), 8.0, 7.6)
SAID = ("economics.tokens=15T",)


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("\N{NO-BREAK SPACE}", " ").split())


def top(result: SimulationResult, nearest: NearestRun | None = None) -> str:
    return plain(verdict_panel(result, nearest=nearest).html)


def change(name: str, part: float) -> tuple[WhatIf, WhatIfOutcome]:
    outcome = WhatIfOutcome(10.0 * (1 + part), 10.0, 1.0, 1.0, 1.0, True, {})
    return WhatIf(name, name, outcome), outcome


def test_what_decides_comes_before_numbers_and_conventions() -> None:
    card = verdict_panel(simulated(), nearest=RUN).html
    order = ["tokens/s per GPU", "MFU", "left", "Largest losses", "How sure", "Nearest published run", "In numbers"]
    places = [card.index(words) for words in order]
    assert places == sorted(places)
    assert places[-1] < html.unescape(card).index(CONVENTION)


def test_headroom_is_what_is_left_or_lacking() -> None:
    fits = said(simulated(), peak_memory=50 * 2.0**30, memory_capacity=80 * 2.0**30, fits=True)
    assert "fits 30 GiB left" in top(fits)
    full = said(simulated(), peak_memory=90 * 2.0**30, memory_capacity=80 * 2.0**30, fits=False)
    assert "does not fit 10 GiB too much" in top(full)


def test_a_run_whose_tokens_are_said_has_its_days_and_its_cost() -> None:
    result = simulated(*SAID)
    found = result.economics
    assert found.run_seconds is not None
    assert found.run_seconds == pytest.approx(15e12 / result.tokens_per_second)
    assert format_seconds(found.run_seconds) in top(result)
    assert "for 15T tokens: steps alone, without failures" in top(result)
    assert "per trillion tokens" in top(simulated()) and "without failures" not in top(simulated())


def test_each_loss_says_what_helps_or_what_it_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(found: LossRemedies | None) -> str:
        monkeypatch.setattr(verdict, "largest_losses", lambda *_: [(LOSS, found)])
        return top(simulated())

    helped = shown(LossRemedies((change("faster links", -0.05), change("b", -0.04), change("third", -0.03))))
    assert "exposed tp" in helped and "652 ms · 8.6%" in helped
    assert "helps: faster links: -5.0%" in helped and "third" not in helped
    assert "hangs on this: slow links: +1.2%" in shown(LossRemedies((), change("slow links", 0.012)))
    assert "nothing that was tried changes it" in shown(LossRemedies(()))
    assert "tried" not in shown(None)


def test_the_nearest_run_says_how_far_off_it_was_and_in_what_it_is_unlike() -> None:
    card = verdict_panel(simulated(), nearest=RUN).html
    assert "<Model>" not in card and "<source>" not in card
    assert "8.000 s a step measured, 7.600 s predicted ( -5.0% )" in plain(card)
    assert "unlike this one in: a, b, c, d and 1 more" in plain(card)
    same = top(simulated(), replace(RUN, differences=(), predicted_step_time=None))
    assert "this one, as far as it is told apart" in same and " predicted (" not in same


def test_losses_of_a_result_are_its_three_largest() -> None:
    found = largest_losses(simulated(), None)
    assert 0 < len(found) <= 3
    seconds = [loss.seconds for loss, _ in found]
    assert seconds == sorted(seconds, reverse=True)
