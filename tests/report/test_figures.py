"""Figures outside the page are those of the page, with colours in place of the page's names for them."""

import json

from clustersim import Scenario, simulate
from clustersim.report.run_page import run_panels
from tests.benchmarks.cases import EXAMPLE


def test_figures_are_the_page_s_but_for_those_that_its_scripts_draw() -> None:
    result = simulate(Scenario.load(EXAMPLE.parent / "mixtral_8x22b.yaml"))
    found = result.figures()
    every = [figure for card in run_panels(result) for figure in card.figures]
    assert [*found] == [figure.name for figure in every if not figure.client_script]
    assert {"waterfall", "peaks", "critical-path"} <= found.keys()
    for figure in every:
        if figure.name not in found:
            continue
        drawn = json.loads(found[figure.name].to_json())
        assert len(drawn["data"]) == len(figure.choices[0][1] if figure.choices else figure.traces)
        assert '"@' not in found[figure.name].to_json()
        assert drawn["layout"]["height"] == figure.height
