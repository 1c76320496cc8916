"""`SimulationResult.figures()` are the page's figures, with theme variables replaced by colours."""

import json

from clustersim import Scenario, simulate
from clustersim.report.run_page import run_panels
from tests.benchmarks.cases import EXAMPLE


def test_figures_are_the_pages_except_scripted_ones() -> None:
    result = simulate(Scenario.load(EXAMPLE.parent / "mixtral_8x22b.yaml"))
    exported = result.figures()
    page_figures = [figure for card in run_panels(result) for figure in card.figures]
    assert [*exported] == [figure.name for figure in page_figures if not figure.client_script]
    assert {"waterfall", "peaks", "critical-path"} <= exported.keys()
    for figure in page_figures:
        if figure.name not in exported:
            continue
        drawn = json.loads(exported[figure.name].to_json())
        assert len(drawn["data"]) == len(figure.choices[0][1] if figure.choices else figure.traces)
        assert '"@' not in exported[figure.name].to_json()
        assert drawn["layout"]["height"] == figure.height
