"""What is the answer, before any figure? The panel at the top of the page, and the one at its foot.

What decides is visible without scrolling: tiles (step time, speed, memory fit, training run), and next to
each other the largest losses with the changes that reduce them, and the confidence. All other numbers, and
the conventions that they follow, are below.
"""

from collections.abc import Iterator
from typing import Final

from clustersim.common.units import format_number
from clustersim.report import economics_labels, labels
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.legend_markup import colour_swatch
from clustersim.report.placement_labels import describe_placement
from clustersim.report.result_labels import format_percentiles, nonzero_provenance
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.economics import Economics
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_losses import LossRemedies, TimeLoss, find_remedies
from clustersim.results.utilization import CONVENTION, bubble_fraction, exposed_fraction, shows_causal_mfu
from clustersim.results.what_if import WhatIfReport
from clustersim.uncertainty.memory_error import fits_surely

_MAX_LOSSES: Final = 3  # maximum number shown


def verdict_panel(
    result: SimulationResult, what_ifs: WhatIfReport | None = None, nearest: NearestRun | None = None
) -> Panel:
    """Panel of the verdict; what_ifs: simulated changes; nearest: the most similar published run."""
    scenario = result.scenario
    return render_panel(
        "verdict.html",
        result=result,
        wording=labels,
        placement=describe_placement(scenario.cluster),
        spread=format_percentiles(result.step_time_percentiles),
        run=economics_labels.training_run_rows(result.economics, result.gpu_hours_per_trillion_tokens),
        losses=largest_losses(result, what_ifs),
        what_ifs=what_ifs,
        nearest=nearest,
        fits_surely=fits_surely(result.fit_probability),
        masked=shows_causal_mfu(result.mfu, result.mfu_causal),
        leading=result.leading_mfu,
        prices=list(_price_rows(result.economics)),
        bubble=bubble_fraction(result.breakdown),
        exposed=exposed_fraction(result.breakdown),
        convention=CONVENTION,
        provenance=nonzero_provenance(result),
        styles=TIME_CATEGORY_STYLES,
        key=colour_swatch,
        rate=format_token_rate,
    )


def confidence_panel(result: SimulationResult) -> Panel:
    """Panel of the provenance of durations, and of the simulation's extent."""
    return render_panel("foot.html", result=result, provenance=nonzero_provenance(result), wording=labels)


def largest_losses(
    result: SimulationResult, what_ifs: WhatIfReport | None
) -> list[tuple[TimeLoss, LossRemedies | None]]:
    """The largest losses, and for each the simulated changes that reduce it."""
    largest = result.losses.significant[:_MAX_LOSSES]
    return [(loss, find_remedies(loss, what_ifs) if what_ifs else None) for loss in largest]


def format_token_rate(tokens: float) -> str:
    """Tokens per second, as an integer from 1000 on."""
    return f"{tokens:,.0f}" if tokens >= 1000 else format_number(tokens)


def _price_rows(result_economics: Economics) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of cost and energy for a trillion tokens; the meaning of unknown ones is the reason."""
    for (name, value, meaning), source in (
        (economics_labels.cost_row(result_economics), economics_labels.describe_price(result_economics)),
        (economics_labels.energy_row(result_economics), economics_labels.describe_power(result_economics)),
    ):
        yield f"{name}/T tokens", value, ". ".join(filter(None, (meaning, source)))
