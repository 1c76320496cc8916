"""Which parts of a result does the page show, and under which names and colours?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.analysis.losses import Help, Loss, losses, what_helps
from clustersim.analysis.nearest import NearestRun
from clustersim.analysis.parts import EXPOSED, PARTS, Part
from clustersim.analysis.what_if import WhatIfs
from clustersim.answer import Answer
from clustersim.arrays import FloatArray
from clustersim.assembly import plan_of
from clustersim.cost.timing import Provenance
from clustersim.fitting import footprint_of
from clustersim.memory.footprint import Category as Use
from clustersim.memory.ledger import Ledger
from clustersim.report.answer_critical_path import critical_path_of
from clustersim.report.answer_dominant import dominant_of
from clustersim.report.answer_kernels import kernels_of
from clustersim.report.answer_network import network_of, topology_of
from clustersim.report.answer_overlap import overlap_of
from clustersim.report.answer_timeline import shown_ranks, shown_rows_of, timeline_of
from clustersim.report.placement_words import placement_line
from clustersim.report.rows import MOST_ROWS, shown_rows
from clustersim.report.theme import AXIS_LOOKS, Category
from clustersim.report.view import (
    ROUNDING,
    Breakdown,
    Memory,
    PageView,
    ShownLoss,
    StageMemory,
    Steps,
    Subject,
    Timeline,
    Trust,
    Verdict,
    Waiting,
)
from clustersim.report.waiting import nobody_slow
from clustersim.report.wording import disturbed_line, gpu_line, layout_line, row_names, stage_name
from clustersim.units import Seconds, format_seconds
from clustersim.workload.operators import EXPERTS

_LOSSES: Final = 3  # that are shown
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
USE_LOOKS: Final[Mapping[Use, Category]] = MappingProxyType(
    {
        Use.PARAMETERS: Category.PARAMETERS,
        Use.COPIES: Category.COPIES,
        Use.GRADIENTS: Category.GRADIENTS,
        Use.OPTIMIZER: Category.OPTIMIZER_STATE,
        Use.GATHERED: Category.GATHERED,
        Use.ACTIVATIONS: Category.ACTIVATIONS,
        Use.OFFLOAD: Category.OFFLOAD,
        Use.MESSAGES: Category.MESSAGES,
        Use.WORKSPACE: Category.WORKSPACE,
        Use.COMMUNICATION: Category.BUFFERS,
        Use.CONTEXT: Category.CUDA_CONTEXT,
        Use.FRAGMENTATION: Category.FRAGMENTATION,
    }
)


def page_view(result: Answer, what_ifs: WhatIfs | None = None, nearest: NearestRun | None = None) -> PageView:
    """What the page shows of a result, too: changes that were simulated, and the published run most like it."""
    return replace(
        notebook_view(result),
        losses=losses_of(result, what_ifs),
        dominant=dominant_of(result),
        overlap=overlap_of(result),
        network=network_of(result),
        topology=topology_of(result),
        critical_path=critical_path_of(result),
        what_ifs=what_ifs,
        nearest=nearest,
    )


def notebook_view(result: Answer) -> PageView:
    """What a notebook shows: a terminal's, with the kernels inside passes."""
    view = table_view(result)
    return replace(view, timeline=with_kernels(result, view.timeline))


def table_view(result: Answer) -> PageView:
    """What a terminal shows of a result: all but what takes long and is looked at on a page only."""
    ranks = shown_ranks(result)
    return PageView(
        subject=subject_of(result),
        verdict=verdict_of(result),
        trust=trust_of(result),
        breakdown=breakdown_of(result, ranks),
        timeline=timeline_of(result, ranks),
        memory=memory_of(result),
        waiting=waiting_of(result),
        losses=losses_of(result),
        notes=(f"Simulated in {format_seconds(result.wall)}.",),
    )


def with_kernels(result: Answer, timeline: Timeline) -> Timeline:
    """A timeline of `timeline_of` with the kernels inside its passes."""
    rows = shown_rows_of(result, [row.rank for row in timeline.rows])
    return replace(timeline, kernels=kernels_of(result, rows))


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
    """The headline, from the numbers that `--json` gives."""
    answer, scenario = result.to_json(), result.scenario
    return Verdict(
        step_time=result.step_time,
        tokens_per_s=result.tokens_per_second,
        tokens_per_s_per_gpu=result.tokens_per_second / result.ranks,
        model_flops_per_gpu=result.flops.model / result.step_time / result.ranks,
        mfu=result.mfu(),
        mfu_causal=result.mfu_causal(),
        hfu=result.hfu(),
        convention=answer["flop_convention"],
        fits=result.fits,
        peak_memory=result.peak_memory,
        memory_capacity=result.memory_capacity,
        worst_stage=stage_name(scenario, result.fullest) if len(result.ledgers) > 1 else "",
        bubble_fraction=answer["bubble_fraction"],
        exposed_communication_fraction=answer["exposed_communication_fraction"],
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
        ideal=_ideal(result),
    )


def losses_of(result: Answer, what_ifs: WhatIfs | None = None) -> tuple[ShownLoss, ...]:
    """The largest losses, and what of the changes that were simulated makes them smaller."""

    def help_of(loss: Loss) -> Help | None:
        return what_helps(loss, what_ifs) if what_ifs and what_ifs.tried else None

    largest = losses(result.breakdown.mean(), _ideal(result))[:_LOSSES]
    return tuple(ShownLoss(loss, PART_LOOKS[loss.parts[0]], help_of(loss)) for loss in largest)


def _ideal(result: Answer) -> Seconds:
    """Seconds that the model's FLOP take at the peak; 0 where kernels are not longer, as they skip what is counted."""
    ideal, compute = result.mfu() * result.step_time, result.breakdown.mean()[Part.COMPUTE.value]
    return ideal if ideal < compute else 0.0


def _settled(result: Answer, parts: Mapping[str, Seconds]) -> FloatArray:
    """Seconds of parts, none where they are only rounding."""
    seconds = np.array(list(parts.values()))
    return np.where(np.abs(seconds) > ROUNDING * result.step_time, seconds, 0.0)


def memory_of(result: Answer) -> Memory:
    """The ledgers of pipeline ranks: of many some, evenly spaced, and the fullest."""
    shown = sorted({*shown_rows(len(result.ledgers), MOST_ROWS - 1).tolist(), result.fullest})
    held = [_held(stage_name(result.scenario, number), str(number), result.ledgers[number]) for number in shown]
    return Memory(
        labels=tuple(use.value for use in Use),
        categories=tuple(USE_LOOKS[use] for use in Use),
        stages=tuple(_apart(result, shown, held) if result.scenario.model.mixtures else held),
        capacity=result.memory_capacity,
        of_stages=len(result.ledgers),
    )


def _apart(result: Answer, shown: Sequence[int], held: Sequence[StageMemory]) -> Iterator[StageMemory]:
    """What pipeline ranks hold, with what experts take apart from all else."""
    footprint = footprint_of(result.scenario, plan_of(result.scenario))
    for number, stage in zip(shown, held, strict=True):
        weights = footprint.weights(number)
        others = [each for name, each in weights.items() if name != EXPERTS]
        rest = sum(count for count, _ in others), sum(size for _, size in others)
        yield replace(stage, experts=weights.get(EXPERTS, (0.0, 0.0)), others=rest)


def _held(label: str, short: str, ledger: Ledger) -> StageMemory:
    """A ledger as a matrix; before its first event no activations are held."""
    times = np.concatenate(([0.0], ledger.times))
    activations = np.concatenate(([0.0], ledger.activations))
    peak = ledger.at_peak()
    held = np.array([np.full(len(times), peak.get(use, 0.0)) for use in Use])
    missing = ledger.peak_activations - activations
    uses = list(Use)
    held[uses.index(Use.ACTIVATIONS)] -= missing
    held[uses.index(Use.FRAGMENTATION)] -= missing * (ledger.fragmentation - 1)
    return StageMemory(label, short, times, held)
