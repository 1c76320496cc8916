"""What does a user of Python get who simulates? An answer that shows itself: as a page, as figures, in notebooks.

What simulates knows nothing of this: it gives an `Answer`, and so do all who simulate for themselves (planning,
validation). Only here is it given the means to draw.
"""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIfReport
from clustersim.scenario import Scenario
from clustersim.simulation import simulate as _answer

if TYPE_CHECKING:
    import plotly.graph_objects as plotly


class RenderedResult(SimulationResult):
    """An answer that can be looked at. Pages take a while to import, so each method imports what it draws with."""

    def to_html(self, what_ifs: WhatIfReport | None = None) -> str:
        """A self-contained page that works offline; what_ifs: changes to show, as `planning.what_if` simulates them."""
        from clustersim.report.run_page import run_page

        return run_page(self, what_ifs)

    def save_html(self, path: str | Path, what_ifs: WhatIfReport | None = None) -> Path:
        """Write the page of `to_html`; return its path."""
        from clustersim.common.files import write_text_atomically

        target = Path(path)
        write_text_atomically(target, self.to_html(what_ifs))
        return target

    def figures(self) -> "dict[str, plotly.Figure]":
        """The page's figures as plotly's own, by name: `waterfall_figure`, `stages`, `peaks`, `topology`, `critical-path` ...

        Those that the page's scripts draw as the reader zooms (timeline, memory over time, all ranks) are not among
        them.
        """
        from clustersim.report.run_page import run_panels

        static_figures = (figure for panel in run_panels(self) for figure in panel.figures if not figure.client_script)
        return {figure.name: figure.to_plotly() for figure in static_figures}

    def _repr_html_(self) -> str:
        from clustersim.report.run_page import notebook_html

        return notebook_html(self)


def simulate(scenario: Scenario) -> RenderedResult:
    """Simulate training steps."""
    result = _answer(scenario)
    return RenderedResult(**{field.name: getattr(result, field.name) for field in fields(result)})
