"""What is the answer, before any picture? The card at the top of the page, and the lines at its foot.

What decides stands before one must scroll: tiles (how long a step takes, how fast that is, whether it fits, what the
run takes), and side by side the largest losses, with what was found to make them smaller, and how far this is to be
trusted. All other numbers, and the conventions that they follow, stand below.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from clustersim.common.units import format_number
from clustersim.cost.timing import Provenance
from clustersim.report import economics_labels, labels
from clustersim.report.html_document import Card, drawn
from clustersim.report.legend_markup import key
from clustersim.report.panels.step_times import spread_words
from clustersim.report.placement_labels import placement_line
from clustersim.report.step_breakdown import ideal_of
from clustersim.report.theme import PART_LOOKS
from clustersim.results.economics import Economics
from clustersim.results.nearest_run import NearestRun
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_losses import Help, Loss, losses, what_helps
from clustersim.results.utilization import CONVENTION, bubble_fraction, exposed_fraction, masked
from clustersim.results.what_if import WhatIfs

_LOSSES: Final = 3  # that are shown


def verdict_card(result: SimulationResult, what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None) -> Card:
    """The answer; what_ifs: changes that were simulated; nearest: the published run that is most like it."""
    scenario = result.scenario
    return drawn(
        "verdict.html",
        result=result,
        wording=labels,
        placement=placement_line(scenario.cluster),
        spread=spread_words(result.step_time_percentiles),
        run=economics_labels.run_lines(result.economics, result.gpu_hours_per_trillion_tokens),
        losses=losses_of(result, what_ifs),
        what_ifs=what_ifs,
        nearest=nearest,
        masked=masked(result.mfu(), result.mfu_causal()),
        prices=list(_prices(result.economics)),
        bubble=bubble_fraction(result.breakdown),
        exposed=exposed_fraction(result.breakdown),
        convention=CONVENTION,
        provenance=provenance_of(result),
        looks=PART_LOOKS,
        key=key,
        rate=rate_words,
    )


def foot_card(result: SimulationResult) -> Card:
    """Where the durations come from, and how much was simulated."""
    return drawn("foot.html", result=result, provenance=provenance_of(result), wording=labels)


def provenance_of(result: SimulationResult) -> Mapping[Provenance, float]:
    """Share of busy time by source of its durations, those that there are."""
    return {Provenance(source): share for source, share in result.provenance_shares.items() if share > 0}


def losses_of(result: SimulationResult, what_ifs: WhatIfs | None) -> list[tuple[Loss, Help | None]]:
    """The largest losses, and what of the changes that were simulated makes them smaller."""
    tried = what_ifs if what_ifs and what_ifs.tried else None
    largest = losses(result.breakdown.mean(), ideal_of(result))[:_LOSSES]
    return [(loss, what_helps(loss, tried) if tried else None) for loss in largest]


def rate_words(tokens: float) -> str:
    """Tokens per second: whole ones where there are many."""
    return f"{tokens:,.0f}" if tokens >= 1000 else format_number(tokens)


def _prices(found: Economics) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of money and energy for a trillion tokens, as far as they are known."""
    for (name, value, meaning), further in (
        (economics_labels.cost_line(found), economics_labels.price_words(found)),
        (economics_labels.energy_line(found), economics_labels.power_words(found)),
    ):
        if value != economics_labels.UNKNOWN:
            yield f"{name}/T tokens", value, ". ".join(filter(None, (meaning, further)))
