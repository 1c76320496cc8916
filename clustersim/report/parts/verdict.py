"""What is the answer, before any picture? The card at the top of the page, and the lines at its foot.

What decides stands before one must scroll: tiles (how long a step takes, how fast that is, whether it fits, what the
run takes), and side by side the largest losses, with what was found to make them smaller, and how far this is to be
trusted. All other numbers, and the conventions that they follow, stand below.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from clustersim.analysis.losses import Help, Loss, losses, what_helps
from clustersim.analysis.nearest import NearestRun
from clustersim.analysis.utilization import CONVENTION, bubble_fraction, exposed_fraction, masked
from clustersim.analysis.what_if import WhatIfs
from clustersim.cost.timing import Provenance
from clustersim.report.document import Card, drawn
from clustersim.report.economics import (
    UNKNOWN,
    cost_line,
    energy_line,
    power_words,
    price_words,
    run_lines,
    trillion_lines,
)
from clustersim.report.keys import key
from clustersim.report.parts.steps import spread_words
from clustersim.report.placement_words import placement_line
from clustersim.report.theme import PART_LOOKS
from clustersim.report.times import ideal_of
from clustersim.report.wording import (
    PROVENANCE_MEANINGS,
    PROVENANCE_NAMES,
    disturbed_line,
    formats_words,
    gpu_line,
    layout_line,
    narrow_peak_words,
    stage_name,
)
from clustersim.units import format_flops, format_number, format_seconds

if TYPE_CHECKING:
    from clustersim.answer import Answer

_LOSSES: Final = 3  # that are shown
Number = tuple[str, str, str]
"""Name, value and meaning."""


def verdict_card(result: "Answer", what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None) -> Card:
    """The answer; what_ifs: changes that were simulated; nearest: the published run that is most like it."""
    scenario, capacity = result.scenario, result.memory_capacity
    return drawn(
        "verdict.html",
        result=result,
        gpu=gpu_line(scenario),
        layout=layout_line(scenario),
        placement=placement_line(scenario.cluster),
        disturbed=disturbed_line(scenario),
        spread=spread_words(result.step_time_distribution),
        per_gpu=result.tokens_per_second / result.ranks,
        left=capacity - result.peak_memory,
        full=result.peak_memory / capacity if capacity else 0.0,
        fullest=stage_name(scenario, result.fullest) if len(result.ledgers) > 1 else "",
        run=run_lines(result.economics) or trillion_lines(result.economics, result.gpu_hours),
        losses=losses_of(result, what_ifs),
        tried=_tried(what_ifs),
        nearest=nearest,
        rows=list(_numbers(result)),
        convention=CONVENTION,
        provenance=provenance_of(result),
        names=PROVENANCE_NAMES,
        looks=PART_LOOKS,
        key=key,
        rate=rate_words,
        large=_large,
    )


def foot_card(result: "Answer") -> Card:
    """Where the durations come from, and how much was simulated."""
    provenance = provenance_of(result)
    return drawn(
        "foot.html", result=result, provenance=provenance, names=PROVENANCE_NAMES, meanings=PROVENANCE_MEANINGS
    )


def provenance_of(result: "Answer") -> Mapping[Provenance, float]:
    """Share of busy time by source of its durations, those that there are."""
    return {Provenance(source): share for source, share in result.provenance.items() if share > 0}


def losses_of(result: "Answer", what_ifs: WhatIfs | None) -> list[tuple[Loss, Help | None]]:
    """The largest losses, and what of the changes that were simulated makes them smaller."""
    tried = what_ifs if what_ifs and what_ifs.tried else None
    largest = losses(result.breakdown.mean(), ideal_of(result))[:_LOSSES]
    return [(loss, what_helps(loss, tried) if tried else None) for loss in largest]


def rate_words(tokens: float) -> str:
    """Tokens per second: whole ones where there are many."""
    return f"{tokens:,.0f}" if tokens >= 1000 else format_number(tokens)


def _large(words: str) -> Markup:
    """A quantity with its units small beside its numbers."""
    parts = words.split(" ")
    pair = Markup("{}<small>&nbsp;{}</small>").format
    return Markup(" ").join(pair(*each) for each in zip(parts[::2], parts[1::2], strict=True))


def _tried(found: WhatIfs | None) -> str:
    """How much was tried of what might help: what was left out may help more."""
    if found is None or not found.tried:
        return ""
    tried = f"{len(found.tried)} of {len(found.cases)} changes"
    some = f"What helps was simulated: {tried}, each alone; percentages are of the time for the same work"
    return f"{some}. What if says why not the others." if found.untried else f"{some}."


def _numbers(result: "Answer") -> Iterator[Number]:
    mfu, causal = result.mfu(), result.mfu_causal()
    rate, unit = format_flops(result.flops_per_gpu).split()
    peak = narrow_peak_words(result.formats)
    yield "MFU", f"{mfu:.1%}", f"model FLOP utilisation, attention as a full matrix{peak}"
    if masked(mfu, causal):
        yield "MFU, causal", f"{causal:.1%}", "model FLOP utilisation, attention as its causal mask leaves it"
    yield from _formats(result)
    yield "HFU", f"{result.hfu():.1%}", "hardware FLOP utilisation: recomputation counts"
    yield f"{unit} per GPU", rate, "model FLOP per second and GPU"
    yield "tokens/s", rate_words(result.tokens_per_second), "of the whole cluster"
    yield "tokens/s/GPU", rate_words(result.tokens_per_second / result.ranks), "of one GPU"
    yield "GPU hours", f"{result.gpu_hours:,.0f}", "of all GPUs, for a trillion tokens"
    yield from _economics(result)
    bubble, exposed = bubble_fraction(result.breakdown), exposed_fraction(result.breakdown)
    yield "bubble", f"{bubble:.1%}", "share of the step in which a stage waits for the pipeline"
    yield "exposed comm", f"{exposed:.1%}", "share of the step spent in communication alone"
    if (fullest := result.fullest_experts) is not None:
        over = f"over all its layers rank {fullest.rank:,} is the fullest, {fullest.rows:.2f}x"
        yield "fullest experts", f"{fullest.layer:.2f}x", f"rows of a layer's fullest rank over the mean; {over}"


def _economics(result: "Answer") -> Iterator[Number]:
    """Money and energy of a trillion tokens, as far as they are known."""
    found = result.economics
    for (name, value, meaning), further in (
        (cost_line(found), price_words(found)),
        (energy_line(found), power_words(found)),
    ):
        if value != UNKNOWN:
            yield f"{name}/T tokens", value, ". ".join(filter(None, (meaning, further)))


def _formats(result: "Answer") -> Iterator[Number]:
    """Of products, and what casts cost, where there are several."""
    if (found := result.formats) is None:
        return
    wide, casts = found.wide.value, f"share of the step in which operands are cast, {format_seconds(found.casts)}"
    of = f"of {format_flops(found.wide_flops)}, as tables for {wide} have it"
    yield f"MFU, {wide} peak", f"{found.of_wide(result.mfu()):.1%}", of
    yield "casts", f"{found.casts / result.step_time:.1%}", casts
    yield f"FLOP in {found.peak.value}", f"{found.shares[found.peak]:.0%}", f"of products: {formats_words(found)}"
