"""Search labels: the best layout against the scenario's."""

from dataclasses import replace

import pytest

from clustersim.report.search_page import best_by_pair_figure
from clustersim.report.terminal.search import headline, layout_label, shown_keys
from clustersim.results.search_result import BoundedLayout
from tests.results.test_search_result import BATCH, FAST, PLAIN, search_result, with_overrides
from tests.sentences import parts


@pytest.mark.parametrize(
    ("objective", "score", "description"),
    [
        ("step-time", 2.0, "1.000 s a step, -50.0% against the file's own layout"),
        ("tokens-per-gpu", 2.0, "1.000 s a step ... 1 tokens/s/GPU ... +100.0% tokens/s/GPU"),
        ("days", 2.0, "1.000 s a step ... 1.0 days ... -50.0% days"),
        ("step-time", 1.0, "1.000 s a step, the file's own layout"),
        ("step-time", 1.0004, "1.000 s a step, as good as the file's own layout"),
    ],
)
def test_search_headline(objective: str, score: float, description: str) -> None:
    first = replace(PLAIN, overrides=(), score=score)
    found = replace(search_result(), objective=objective, first_guess=first)
    assert parts(f"best layout: {description}").match(headline(found))


def test_headline_if_the_scenario_does_not_fit() -> None:
    first = replace(PLAIN, overrides=(), score=2.0, peak_memory=100.0)
    assert parts("file's own layout does not fit ... 100 B of 80 B").search(
        headline(replace(search_result(), first_guess=first))
    )


def test_varied_global_batch_is_in_the_layout_label() -> None:
    several = replace(
        search_result(),
        simulated=(with_overrides(FAST, f"{BATCH}=64"), with_overrides(PLAIN, f"{BATCH}=128")),
        preferred=0,
    )
    assert [layout_label(candidate, several) for candidate in several.simulated] == [
        "tp 2, global_batch 64",
        "tp 1, global_batch 128",
    ]
    assert shown_keys(
        with_overrides(FAST, f"{BATCH}=64"), replace(several, simulated=(with_overrides(FAST, f"{BATCH}=64"),))
    ) == {"layout.tp": "2"}


@pytest.mark.parametrize(
    ("objective", "bound", "label"), [("step-time", 2.0, "≥ 2.000 s"), ("tokens-per-gpu", 0.002, "≤ 500 tokens/s/GPU")]
)
def test_bound_labels_have_a_direction(objective: str, bound: float, label: str) -> None:
    """At least two GPU milliseconds per token are at most 500 tokens a second."""
    bounded = (BoundedLayout(("layout.tp=8", "layout.pp=1"), 0, bound),)
    simulated = (with_overrides(PLAIN, "layout.pp=2"),)
    result = replace(search_result(), objective=objective, bounded=bounded, simulated=simulated, preferred=0)
    ((_, (trace,)),) = best_by_pair_figure(result, {"layout.tp": ["1", "8"], "layout.pp": ["1", "2"]}).choices
    assert label in {text for row in trace["text"] for text in row}
