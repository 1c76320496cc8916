"""What does `simulate` return to users of Python?

A result that can render itself: as a page, as figures, in notebooks.

The simulator does not depend on this: it returns a `SimulationResult`, as do all packages that simulate
themselves (planning, validation). Only here does it gain rendering methods.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustersim.common.table import Table
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIfReport
from clustersim.scenario import Scenario
from clustersim.simulation import simulate_with_spread

if TYPE_CHECKING:
    import plotly.graph_objects as plotly


class RenderedResult(SimulationResult):
    """A simulation result with rendering methods. Page modules are slow to import, so each method imports its own."""

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
        """The page's plotly figures by name: `waterfall`, `stages`, `peaks`, `topology`, `critical-path` ...

        Figures that the page's scripts draw depending on the zoom (timeline, memory over time, all ranks) are not
        included.
        """
        from clustersim.report.run_page import run_panels

        static_figures = (figure for panel in run_panels(self) for figure in panel.figures if not figure.client_script)
        return {figure.name: figure.to_plotly() for figure in static_figures}

    def spans(self, *ranks: int | str) -> Table:
        """Every kernel, collective, message, forward and backward of some ranks: a row each, rank by rank, by start.

        ranks: numbers, or selections as of `--ranks` ("0:8", "stage:3", "slowest:4", "all"); without any, those that
        `--spans` writes: each simulated rank if they are few. Columns are those of `--spans` (`spans().schema`): times
        in seconds from the start of the run, sizes in bytes. Raises InputError for ranks that do not exist, and for
        too many spans.
        """
        from clustersim.report.export.rank_selection import select_ranks_by_terms
        from clustersim.report.export.table import span_rows

        return span_rows(self, select_ranks_by_terms(self, ",".join(map(str, ranks))))

    def changed(self, mapping: Mapping[str, Any] | None = None, /, **keywords: Any) -> "RenderedResult":
        """The result of the same scenario with changes, as `Scenario.changed` takes them, simulated anew."""
        return simulate(self.scenario.changed(mapping, **keywords))

    def _repr_html_(self) -> str:
        from clustersim.report.run_page import notebook_html

        return notebook_html(self)


def simulate(scenario: Scenario) -> RenderedResult:
    """Simulate training steps."""
    result = simulate_with_spread(scenario)
    return RenderedResult(**{field.name: getattr(result, field.name) for field in fields(result)})
