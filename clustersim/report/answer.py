"""Which parts of a result does the page show, and under which names and colours?"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.analysis.parts import PARTS, Part
from clustersim.cost.timing import Provenance
from clustersim.memory.footprint import Category as Use
from clustersim.memory.ledger import Ledger
from clustersim.report.answer_timeline import representatives, timeline_of
from clustersim.report.theme import Category
from clustersim.report.view import Breakdown, Memory, PageView, StageMemory, Subject, Trust, Verdict
from clustersim.report.wording import layout_line, stage_name
from clustersim.result import EXPERIENCE, Result
from clustersim.units import format_seconds

PART_LOOKS: Final[Mapping[Part, Category]] = MappingProxyType(
    {
        Part.COMPUTE: Category.COMPUTE,
        Part.RECOMPUTE: Category.RECOMPUTE,
        Part.OPTIMIZER: Category.OPTIMIZER,
        Part.EXPOSED_TP: Category.TENSOR,
        Part.EXPOSED_CP: Category.CONTEXT,
        Part.EXPOSED_DP: Category.DATA,
        Part.EXPOSED_PP: Category.PIPELINE,
        Part.BUBBLE_WARMUP: Category.BUBBLE_WARM_UP,
        Part.BUBBLE_STEADY: Category.BUBBLE_STEADY,
        Part.BUBBLE_COOLDOWN: Category.BUBBLE_COOL_DOWN,
        Part.WAIT: Category.WAIT,
    }
)
USE_LOOKS: Final[Mapping[Use, Category]] = MappingProxyType(
    {
        Use.PARAMETERS: Category.PARAMETERS,
        Use.GRADIENTS: Category.GRADIENTS,
        Use.OPTIMIZER: Category.OPTIMIZER_STATE,
        Use.GATHERED: Category.GATHERED,
        Use.ACTIVATIONS: Category.ACTIVATIONS,
        Use.COMMUNICATION: Category.BUFFERS,
        Use.CONTEXT: Category.CUDA_CONTEXT,
        Use.FRAGMENTATION: Category.FRAGMENTATION,
    }
)


def page_view(result: Result) -> PageView:
    """What the page, the notebook and the traces show of a result."""
    return PageView(
        subject=subject_of(result),
        verdict=verdict_of(result),
        trust=trust_of(result),
        breakdown=breakdown_of(result),
        timeline=timeline_of(result, representatives(result)),
        memory=memory_of(result),
        notes=(f"Simulated in {format_seconds(result.wall)}.",),
    )


def subject_of(result: Result) -> Subject:
    """What was simulated."""
    scenario = result.scenario
    return Subject(
        title=scenario.name,
        model=scenario.model.name,
        cluster=scenario.cluster.name,
        gpu=scenario.cluster.accelerator.name,
        layout=layout_line(scenario),
    )


def verdict_of(result: Result) -> Verdict:
    """The headline, from the numbers that `--json` gives."""
    answer, scenario = result.to_json(), result.scenario
    return Verdict(
        step_time=result.step_time,
        tokens_per_s=result.tokens_per_second,
        tokens_per_s_per_gpu=result.tokens_per_second / result.ranks,
        model_flops_per_gpu=result.flops.model / result.step_time / result.ranks,
        mfu=result.mfu(),
        hfu=result.hfu(),
        convention=answer["flop_convention"],
        fits=result.fits,
        peak_memory=result.peak_memory,
        memory_capacity=result.memory_capacity,
        worst_stage=stage_name(scenario, result.fullest) if len(result.ledgers) > 1 else "",
        bubble_fraction=answer["bubble_fraction"],
        exposed_communication_fraction=answer["exposed_communication_fraction"],
    )


def trust_of(result: Result) -> Trust:
    """How far the answer carries."""
    return Trust(
        ranks=result.ranks,
        simulated_ranks=result.simulated_ranks,
        spans=result.spans,
        provenance={Provenance(source): share for source, share in result.provenance.items() if share > 0},
        experience=EXPERIENCE,
        warnings=result.scenario.warnings,
        suggestions=result.suggestions,
        not_modelled=result.not_modelled,
    )


def breakdown_of(result: Result) -> Breakdown:
    """The mean over ranks, and the rank that stands for each stage."""
    return Breakdown(
        labels=tuple(part.value for part in PARTS),
        categories=tuple(PART_LOOKS[part] for part in PARTS),
        step=np.array(list(result.breakdown.mean().values())),
        stages=np.array([list(result.breakdown.of(rank).values()) for rank in representatives(result)]),
    )


def memory_of(result: Result) -> Memory:
    """The ledgers of all pipeline ranks."""
    return Memory(
        labels=tuple(use.value for use in Use),
        categories=tuple(USE_LOOKS[use] for use in Use),
        stages=tuple(
            _held(stage_name(result.scenario, number), ledger) for number, ledger in enumerate(result.ledgers)
        ),
        capacity=result.memory_capacity,
    )


def _held(label: str, ledger: Ledger) -> StageMemory:
    """A ledger as a matrix; before its first event no activations are held."""
    times = np.concatenate(([0.0], ledger.times))
    activations = np.concatenate(([0.0], ledger.activations))
    peak = ledger.at_peak()
    held = np.array([np.full(len(times), peak.get(use, 0.0)) for use in Use])
    missing = ledger.peak_activations - activations
    uses = list(Use)
    held[uses.index(Use.ACTIVATIONS)] -= missing
    held[uses.index(Use.FRAGMENTATION)] -= missing * (ledger.fragmentation - 1)
    return StageMemory(label, times, held)
