"""What does a terminal show of a result? The numbers of its table, of which pages are made, too."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.analysis.parts import EXPOSED, PARTS, Part
from clustersim.analysis.utilization import CONVENTION, bubble_fraction, exposed_fraction
from clustersim.answer import Answer
from clustersim.arrays import FloatArray
from clustersim.cost.timing import Provenance
from clustersim.report.placement_words import placement_line
from clustersim.report.rows import shown_ranks
from clustersim.report.theme import AXIS_LOOKS, Category
from clustersim.report.view import ROUNDING, Breakdown, Steps, Subject, TableView, Trust, Verdict, Waiting
from clustersim.report.waiting import nobody_slow
from clustersim.report.wording import disturbed_line, gpu_line, layout_line, row_names, stage_name
from clustersim.units import Seconds

_VISIBLE: Final = 1e-3  # of the step: the least difference of waiting that is shown
PART_LOOKS: Final[Mapping[Part, Category]] = MappingProxyType(
    {
        Part.COMPUTE: Category.COMPUTE,
        Part.RECOMPUTE: Category.RECOMPUTE,
        Part.OPTIMIZER: Category.OPTIMIZER,
        Part.LAUNCH: Category.LAUNCH,
        Part.SLOWED: Category.SLOWED,
        **{part: AXIS_LOOKS[axis] for axis, part in EXPOSED.items()},
        Part.BUBBLE_WARMUP: Category.BUBBLE_WARM_UP,
        Part.BUBBLE_STEADY: Category.BUBBLE_STEADY,
        Part.BUBBLE_COOLDOWN: Category.BUBBLE_COOL_DOWN,
        Part.WAIT: Category.WAIT,
    }
)


def table_view(result: Answer) -> TableView:
    """What a terminal shows of a result."""
    return TableView(
        subject=subject_of(result),
        verdict=verdict_of(result),
        trust=trust_of(result),
        breakdown=breakdown_of(result, shown_ranks(result)),
        waiting=waiting_of(result),
    )


def subject_of(result: Answer) -> Subject:
    """What was simulated."""
    scenario = result.scenario
    return Subject(
        title=scenario.name,
        model=scenario.model.name,
        cluster=scenario.cluster.name,
        gpu=gpu_line(scenario),
        layout=layout_line(scenario),
        placement=placement_line(scenario.cluster),
        disturbed=disturbed_line(scenario),
    )


def verdict_of(result: Answer) -> Verdict:
    """The headline."""
    scenario = result.scenario
    return Verdict(
        step_time=result.step_time,
        tokens_per_s=result.tokens_per_second,
        tokens_per_s_per_gpu=result.tokens_per_second / result.ranks,
        model_flops_per_gpu=result.flops.model / result.step_time / result.ranks,
        mfu=result.mfu(),
        mfu_causal=result.mfu_causal(),
        hfu=result.hfu(),
        convention=CONVENTION,
        fits=result.fits,
        peak_memory=result.peak_memory,
        memory_capacity=result.memory_capacity,
        worst_stage=stage_name(scenario, result.fullest) if len(result.ledgers) > 1 else "",
        bubble_fraction=bubble_fraction(result.breakdown),
        exposed_communication_fraction=exposed_fraction(result.breakdown),
        steps=steps_of(result),
        band=result.band,
        host=None if result.host is None else (result.host.memory, result.host.capacity),
        experts=result.fullest_experts,
        formats=result.formats,
        economics=result.economics,
    )


def steps_of(result: Answer) -> Steps | None:
    """The times of several steps; None where there is one."""
    return Steps(result.step_times, result.step_time_distribution) if result.scenario.steps > 1 else None


def waiting_of(result: Answer) -> Waiting | None:
    """Who waits for whom; None where nothing is disturbed and the ranks of each pipeline rank wait equally long."""
    scenario, waits, stragglers = result.scenario, result.waits, result.stragglers
    disturbed = disturbed_line(scenario)
    differ = float((waits.most - waits.least).max()) >= _VISIBLE * result.step_time
    if not (disturbed or stragglers.ranks or differ):
        return None
    otherwise = nobody_slow(disturbed, jittered=scenario.jitter is not None)
    names = row_names(scenario, len(waits.mean))
    return Waiting(names.labels, names.short, waits, stragglers, otherwise)


def trust_of(result: Answer) -> Trust:
    """How far the answer carries."""
    return Trust(
        ranks=result.ranks,
        simulated_ranks=result.simulated_ranks,
        spans=result.spans,
        provenance={Provenance(source): share for source, share in result.provenance.items() if share > 0},
        experience=result.experience,
        steps=() if result.tried is None else result.tried.steps,
        warnings=result.scenario.warnings,
        suggestions=result.suggestions,
        not_modelled=result.not_modelled,
    )


def breakdown_of(result: Answer, ranks: Sequence[int]) -> Breakdown:
    """The mean over all ranks, and some ranks."""
    return Breakdown(
        labels=tuple(part.value for part in PARTS),
        categories=tuple(PART_LOOKS[part] for part in PARTS),
        step=_settled(result, result.breakdown.mean()),
        stages=np.array([_settled(result, result.breakdown.of(rank)) for rank in ranks]),
        path=_settled(result, result.path_parts),
        ideal=ideal_of(result),
    )


def ideal_of(result: Answer) -> Seconds:
    """Seconds that the model's FLOP take at the peak; 0 where kernels are not longer, as they skip what is counted."""
    ideal, compute = result.mfu() * result.step_time, result.breakdown.mean()[Part.COMPUTE.value]
    return ideal if ideal < compute else 0.0


def _settled(result: Answer, parts: Mapping[str, Seconds]) -> FloatArray:
    """Seconds of parts, none where they are only rounding."""
    seconds = np.array(list(parts.values()))
    return np.where(np.abs(seconds) > ROUNDING * result.step_time, seconds, 0.0)
