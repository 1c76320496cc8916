"""Remedies of the pipeline: another partition of layers, more chunks, another schedule.

Layers are moved between pipeline ranks by what each rank's step showed: the time of a pipeline rank is that of its
layers, all taken to be equal, and of what else it has (embedding, logits, further-token layers, dense layers). Every
layer then goes to the pipeline rank that ends first. For example, ranks that take 9 s and 6 s for 3 layers each, of
2 s a layer, get 2 and 4 layers: 7 s and 8 s.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from clustersim.common.units import Seconds
from clustersim.parallel.layer_partition import PipelineLayoutString, partition_layers
from clustersim.program.placement import Placement
from clustersim.scenario.changes.catalogue.remedy import Alternative, remedy
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangeSubject,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.scenario import Scenario
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.registry import SCHEDULE_NAMES

_MAX_CHUNKS: Final = 16


def _balanced_stages(baseline: Baseline) -> Iterator[Alternative]:
    scenario, work, placement = baseline.scenario, baseline.work_seconds, baseline.scenario.placement
    if work is None:
        raise InapplicableChangeError("the work of each pipeline rank is not known")
    partition = scenario.layout.layers_per_stage
    if isinstance(partition, PipelineLayoutString) and any(partition.mtp_layer_counts):
        raise InapplicableChangeError("a layout string says where further-token layers are")
    counts = partition_layers(partition, scenario.model.layer_count, placement)
    most = max(rank_layer_counts(counts, placement))
    partitions = [balanced_layer_counts(counts, work, placement, max_layers) for max_layers in (sum(counts), most)]
    partitions = [balanced for balanced in dict.fromkeys(partitions) if balanced != tuple(counts)]
    if not partitions:
        raise InapplicableChangeError("no other partition is more even")
    for balanced in partitions:  # with no more layers than a rank has now if more do not fit
        yield Alternative((f"layout.layers_per_stage={list(balanced)}",), f": {_describe_counts(balanced)}")


def rank_layer_counts(counts: Sequence[int], placement: Placement) -> list[int]:
    """Layers of each pipeline rank. counts: of each stage."""
    layers = np.bincount(placement.stage_ranks, counts, minlength=placement.pipeline_size)
    return [int(rank_layers) for rank_layers in layers]


def balanced_layer_counts(
    counts: Sequence[int], work: Sequence[Seconds], placement: Placement, max_layers: int
) -> tuple[int, ...]:
    """Layers of each stage with which the pipeline rank with the most work has the least.

    counts: layers of each stage as they are; work: seconds of each pipeline rank with them; max_layers: that a
    pipeline rank may have.
    """
    ranks = range(placement.pipeline_size)
    layers = rank_layer_counts(counts, placement)
    layer_seconds = _layer_seconds(layers, work)
    extra = [seconds - layer_seconds * rank_layers for seconds, rank_layers in zip(work, layers, strict=True)]
    new_layers = [0] * len(ranks)
    for _ in range(sum(counts)):
        open_ranks = [rank for rank in ranks if new_layers[rank] < max_layers]
        first = min(open_ranks, key=lambda rank: (extra[rank] + layer_seconds * (new_layers[rank] + 1), rank))
        new_layers[first] += 1
    new_counts = [0] * len(counts)
    for rank in ranks:
        stages = placement.stages_on_rank(rank)
        share, remainder = divmod(new_layers[rank], len(stages))
        # the stages at the ends of the model have more than layers, so others get what does not divide
        for position, stage in enumerate(sorted(stages, key=lambda stage: stage in (0, len(counts) - 1))):
            new_counts[stage] = share + (position < remainder)
    return tuple(new_counts)


def _layer_seconds(layers: Sequence[int], work: Sequence[Seconds]) -> Seconds:
    """Seconds of a layer: the median over pipeline ranks of their time over their layers.

    Ranks at the ends, which have more than layers, are few.
    """
    per_layer = [seconds / rank_layers for seconds, rank_layers in zip(work, layers, strict=True) if rank_layers]
    return float(np.median(per_layer)) if per_layer else 0.0


def _describe_counts(counts: Sequence[int]) -> str:
    """Layers by stage, ends apart where only they differ: `7, then 8 each, then 7`."""
    inner = set(counts[1:-1])
    if len(counts) > 3 and len(inner) == 1:
        return f"{counts[0]} layers, then {counts[1]} each, then {counts[-1]}"
    return ", ".join(map(str, counts)) + " layers" if len(counts) <= 8 else "by their measured work"


def _can_interleave(scenario: Scenario) -> bool:
    is_supported = Interleaved.name in scenario.framework.supported_layouts.schedules
    schedule = scenario.schedule
    is_1f1b = schedule.has_whole_backwards and schedule.is_periodic
    return scenario.layout.is_pipelined and is_supported and is_1f1b


def _more_chunks(baseline: Baseline) -> Iterator[Alternative]:
    """About twice the chunks, then other numbers that are more than now, the nearest first."""
    scenario = baseline.scenario
    now, layers = scenario.placement.max_chunks, scenario.model.layer_count
    most = min(_MAX_CHUNKS, layers // scenario.layout.pp)
    even_partition = ("layout.layers_per_stage=even",) if scenario.layout.layers_per_stage else ()
    for chunks in sorted(range(now + 1, most + 1), key=lambda chunks: abs(chunks - 2 * now)):
        overrides = (f"schedule.interleaved.chunks={chunks}", *even_partition)
        yield Alternative(overrides, f": {chunks} of a pipeline rank, not {now}")


def _other_schedule(name: str) -> Callable[[Baseline], Iterator[Alternative]]:
    def find_alternatives(baseline: Baseline) -> Iterator[Alternative]:
        yield Alternative((f"schedule={name}",))
        if baseline.scenario.layout.layers_per_stage:
            yield Alternative((f"schedule={name}", "layout.layers_per_stage=even"), ", layers evenly")

    return find_alternatives


def _schedule_remedy(name: str) -> ScenarioChange:
    return remedy(
        f"schedule_{name.replace('-', '_')}",
        f"schedule {name}",
        ChangeSubject.SCHEDULE,
        frozenset({StepLoss.BUBBLE, StepLoss.WAIT}),
        _other_schedule(name),
        is_relevant=lambda scenario: (
            scenario.layout.is_pipelined
            and scenario.schedule.name != name
            and name in scenario.framework.supported_layouts.schedules
        ),
    )


PIPELINE_REMEDIES: Final = (
    remedy(
        "balanced_stages",
        "layers partitioned by the work of each pipeline rank",
        ChangeSubject.LAYOUT,
        frozenset({StepLoss.IMBALANCE}),
        _balanced_stages,
        is_relevant=lambda scenario: scenario.layout.is_pipelined,
    ),
    remedy(
        "more_chunks",
        "more model chunks (interleaved)",
        ChangeSubject.SCHEDULE,
        frozenset({StepLoss.BUBBLE}),
        _more_chunks,
        is_relevant=_can_interleave,
    ),
    *map(_schedule_remedy, (name for name in SCHEDULE_NAMES if name not in (Interleaved.name, "bfs"))),
)
