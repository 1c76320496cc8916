"""The top of the page: what decides stands before all else, in the words that it needs and none that are not known."""

import html
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from clustersim.analysis.losses import Help, Loss
from clustersim.analysis.nearest import NearestRun
from clustersim.analysis.parts import Part
from clustersim.analysis.what_if import Outcome, WhatIf
from clustersim.report.answer import page_view
from clustersim.report.deciding import losses_part, tiles, trust_part
from clustersim.report.theme import Category
from clustersim.report.verdict import verdict_card
from clustersim.report.view import PageView, ShownLoss
from clustersim.units import format_seconds
from tests.simulated import simulated

View = Callable[..., PageView]
LOSS = Loss("exposed tp", 0.652, 0.086, (Part("exposed tp"),))
RUN = NearestRun("<source>", "table <2>", "<Model> on 64 × GPU", ("a", "b", "c", "d", "e"), 8.0, 7.6)
SAID = ("economics.tokens=15T",)


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("\N{NO-BREAK SPACE}", " ")


def change(name: str, part: float) -> tuple[WhatIf, Outcome]:
    outcome = Outcome(10.0 * (1 + part), 10.0, 1.0, 1.0, 1.0, True, {})
    return WhatIf(name, name, outcome), outcome


def shown(make_view: View, found: Help | None) -> str:
    return plain(losses_part(replace(make_view(), losses=(ShownLoss(LOSS, Category.TENSOR, found),))))


def test_what_decides_comes_before_numbers_and_conventions(make_view: View) -> None:
    view = replace(make_view(), losses=(ShownLoss(LOSS, Category.TENSOR),), nearest=RUN)
    card = verdict_card(view)
    order = ["tokens/s per GPU", "MFU", "left", "Largest losses", "How sure", "Nearest published run", "In numbers"]
    places = [card.index(words) for words in order]
    assert places == sorted(places)
    assert places[-1] < card.index(html.escape(view.verdict.convention))


def test_headroom_is_what_is_left_or_lacking(make_view: View) -> None:
    verdict = make_view().verdict
    fits = replace(verdict, peak_memory=50 * 2.0**30, memory_capacity=80 * 2.0**30, fits=True)
    assert "fits 30 GiB left" in " ".join(plain(tiles(fits)).split())
    full = replace(fits, peak_memory=90 * 2.0**30, fits=False)
    assert "does not fit 10 GiB too much" in " ".join(plain(tiles(full)).split())


def test_a_run_whose_tokens_are_said_has_its_days_and_its_cost() -> None:
    result = simulated(*SAID)
    found = result.economics
    assert found.time_of_run is not None
    assert found.time_of_run == pytest.approx(15e12 / result.tokens_per_second)
    words = " ".join(plain(tiles(page_view(result).verdict)).split())
    assert format_seconds(found.time_of_run) in words
    assert "for 15T tokens: steps alone, without failures" in words
    without = " ".join(plain(tiles(page_view(simulated()).verdict)).split())
    assert "per trillion tokens" in without and "without failures" not in without


def test_each_loss_says_what_helps_or_what_it_hangs_on(make_view: View) -> None:
    helped = shown(make_view, Help((change("faster links", -0.05), change("b", -0.04), change("third", -0.03))))
    assert "exposed tp" in helped and "652 ms · 8.6%" in helped
    assert "helps: faster links:  -5.0%" in helped and "third" not in helped
    assert "hangs on this: slow links:  +1.2%" in shown(make_view, Help((), change("slow links", 0.012)))
    assert "nothing that was tried changes it" in shown(make_view, Help(()))
    assert "tried" not in shown(make_view, None)


def test_the_nearest_run_says_how_far_off_it_was_and_in_what_it_is_unlike(make_view: View) -> None:
    words = trust_part(replace(make_view(), nearest=RUN))
    assert "<Model>" not in words and "<source>" not in words
    assert "8.000 s a step measured, 7.600 s predicted ( -5.0% )" in plain(words)
    assert "unlike this one in: a, b, c, d and 1 more" in plain(words)
    same = trust_part(replace(make_view(), nearest=replace(RUN, differs=(), predicted=None)))
    assert "this one, as far as it is told apart" in same and "predicted" not in same


def test_losses_of_a_result_are_its_three_largest() -> None:
    view = page_view(simulated())
    assert 0 < len(view.losses) <= 3
    seconds = [each.loss.seconds for each in view.losses]
    assert seconds == sorted(seconds, reverse=True)
