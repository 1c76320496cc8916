"""What are a layout, a pipeline rank and the source of a duration called, everywhere that they are shown?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes, format_flops, format_seconds
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.cost.timing import Provenance
from clustersim.hardware.degradation import DeadLinkEffect, Degradations, LinkDegradation, format_id_ranges
from clustersim.hardware.topology import Fabric, LinkKind
from clustersim.model.lora import Lora
from clustersim.model.offload import ActivationOffload, Offload, OptimizerOffload, ShardOffload
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveOpRecompute, SelectiveRecompute
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    DeepspeedZero3Strategy,
    FullyShard,
    NaiveDataParallel,
    Zero1,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DISPLAY_AXES, EXPERT, EXPERT_TENSOR
from clustersim.results.number_formats import Formats
from clustersim.results.utilization import masked

if TYPE_CHECKING:
    from clustersim.scenario import Scenario


_MOST_ENTRIES: Final = 3  # of one kind of disturbance
CRITICAL_PATH: Final = (
    "The critical path is the chain of tasks that makes the step as long as it is; to shorten what is not on it does "
    "not help."
)
PROVENANCE_NAMES: Final[Mapping[Provenance, str]] = {
    Provenance.MEASURED: "measured here",
    Provenance.INTERPOLATED: "interpolated between measured shapes",
    Provenance.FITTED: "model fitted to measurements of this hardware",
    Provenance.DERIVED: "scaled from measurements of other hardware",
    Provenance.PUBLISHED: "model fitted to published measurements of this hardware",
    Provenance.ROOFLINE: "model from datasheets",
}
LINK_WORDS: Final[Mapping[LinkKind, str]] = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.PCIE: "PCIe",
    LinkKind.HOST: "host",
    LinkKind.NIC: "NIC",
    LinkKind.LEAF: "leaf to spine",
    LinkKind.SPINE: "spine to core",
}
"""What the links of a tier join, or belong to."""


def formats_words(formats: Formats) -> str:
    """Shares of products' FLOP by format."""
    return ", ".join(f"{share:.0%} {dtype.value}" for dtype, share in formats.shares.items())


def narrow_peak_words(formats: Formats | None) -> str:
    """Against which peak FLOP are compared; empty where there is one format."""
    return "" if formats is None else f", of {format_flops(formats.peak_flops)} {formats.peak.value}"


def row_word(scenario: "Scenario") -> str:
    """What holds a share of the layers: a stage, or a pipeline rank where each holds several stages (chunks)."""
    return "pipeline rank" if scenario.placement.max_chunks > 1 else "stage"


def stage_name(scenario: "Scenario", number: int) -> str:
    """What a pipeline rank is called."""
    return f"{row_word(scenario)} {number}"


@dataclass(frozen=True, slots=True)
class RowNames:
    """What the kinds of a program are called. labels, short: [kinds]; word: for one of them."""

    labels: tuple[str, ...]
    short: tuple[str, ...]
    word: str


def row_names(scenario: "Scenario", kinds: int) -> RowNames:
    """The names of pipeline ranks; of torch.nn.DataParallel, whose first GPU does more, of its kinds of GPU."""
    if kinds > scenario.layout.pp:
        return RowNames(("first GPU", "other GPUs"), ("first", "others"), "kind of GPU")
    numbers = range(kinds)
    return RowNames(
        tuple(stage_name(scenario, number) for number in numbers), tuple(map(str, numbers)), row_word(scenario)
    )


def layout_line(scenario: "Scenario") -> str:
    """Degrees, strategies and batch, in the order in which people give them."""
    layout, training, chunks = scenario.layout, scenario.training, scenario.placement.max_chunks
    degrees = layout.as_configured.degrees
    stops = training.early_stop and training.recompute != NoRecompute()
    words = [
        *(f"{axis.name} {degrees[axis.name]:,}" for axis in DISPLAY_AXES if degrees[axis.name] > 1),
        *(_experts(layout) if layout.has_expert_mesh else ()),
        _data(layout.data) if layout.dp > 1 else "",
        scenario.schedule.name + (f", {chunks} chunks" if chunks > 1 else "") if layout.pp > 1 else "",
        _recompute(training.recompute) + (", stopped early" if stops else ""),
        "" if training.lora is None else _lora(training.lora),
        _offload(training.offload),
        training.recipe.name,
        f"{training.global_batch:,} sequences of {training.sequence:,} tokens a step",
        f"{'2 x ' * layout.mirrored}{scenario.microbatch_count:,} microbatch{'es' * (scenario.microbatch_count > 1)} "
        f"of {training.microbatch}",
    ]
    return " · ".join(filter(None, words))


def _experts(layout: Layout) -> list[str]:
    """Over how many ranks experts are spread and cut, and how tokens reach them."""
    cut = [] if layout.effective_etp == layout.tp else [f"{EXPERT_TENSOR.name} {layout.effective_etp:,}"]
    return [f"{EXPERT.name} {layout.ep:,}", *cut, f"{layout.dispatcher.value} dispatcher"]


def disturbed_line(scenario: "Scenario") -> str:
    """What is wrong with the cluster, in one line; empty if nothing is."""
    words = list(_wrong(scenario.degradations, scenario.cluster.fabric))
    words += _few([f"beside {co_scheduled_job.resolved.name}" for co_scheduled_job in scenario.co_scheduled_jobs])
    words += _few([_traffic(traffic_pattern) for traffic_pattern in scenario.background_traffic])
    if (jitter := scenario.jitter) is not None:
        words.append(f"jitter {_percent(jitter.std)} ({jitter.distribution.value}, seed {jitter.seed})")
    return "; ".join(words)


def gpu_line(scenario: "Scenario") -> str:
    """The accelerator; where there are several, the number of each."""
    accelerators, kind = scenario.cluster.accelerator_kinds()
    counts = np.bincount(kind[: scenario.layout.world_size], minlength=len(accelerators)).tolist()
    used = [(accelerator.name, count) for accelerator, count in zip(accelerators, counts, strict=True) if count]
    return used[0][0] if len(used) == 1 else f"({' + '.join(f'{count:,} {name}' for name, count in used)})"


def _wrong(disturbances: Degradations, fabric: Fabric) -> Iterator[str]:
    """Slow GPUs, NICs and links, and what others load."""
    yield from _few(
        [f"{_gpus(slow_gpus.gpu_ids)} at {_percent(slow_gpus.speed)} speed" for slow_gpus in disturbances.slow_gpus]
    )
    yield from _few(
        [
            f"NICs of {_gpus(nic.gpu_ids)} {f'at {_percent(nic.bandwidth_fraction)}' if nic.bandwidth_fraction else 'dead'}"
            for nic in disturbances.nics
        ]
    )
    yield from _few([_link(link, fabric) for link in disturbances.links])
    for kind, load in disturbances.background_load.items():
        yield f"{_percent(load)} of every {kind.value} link loaded by others"


def _few(words: Sequence[str]) -> list[str]:
    """The first entries, and how many more there are."""
    more = [f"{len(words) - _MOST_ENTRIES} more of the kind"] if len(words) > _MOST_ENTRIES else []
    return [*words[:_MOST_ENTRIES], *more]


def _gpus(gpus: Sequence[int]) -> str:
    return format_id_ranges(np.unique(np.array(gpus, dtype=np.int64)))


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _link(change: LinkDegradation, fabric: Fabric) -> str:
    """A link or, of a bundle, how many of its members."""
    ends = f"{change.source} {'-' if change.both_directions else '->'} {change.target}"
    members = _members(change, fabric)
    if isinstance(change.effect, DeadLinkEffect):
        return f"link {ends} dead" if members == 1 else f"{change.effect.lost_count} of {members} links {ends} dead"
    when = "" if change.active_period is None else f" from {' to '.join(map(format_seconds, change.active_period))}"
    return (
        f"{'link' if members == 1 else f'{members} links'} {ends} at {_percent(change.effect.bandwidth_fraction)}{when}"
    )


def _traffic(sent: TrafficPattern) -> str:
    """What others send, and how often."""
    again = "once" if isinf(sent.period_seconds) else f"every {format_seconds(sent.period_seconds)}"
    what = f"others' {sent.collective.value} of {format_bytes(sent.payload)}"
    return f"{what} among {len(sent.gpu_ids):,} GPUs {again}"


def _members(change: LinkDegradation, fabric: Fabric) -> int:
    """How many parallel links are between the ends; a graph, where each link is one, forgets those that are dead."""
    try:
        return fabric.parallel_link_count(fabric.find_link(change.source, change.target))
    except InputError:
        return 1


def _data(strategy: DataParallelStrategy) -> str:
    match strategy:
        case DdpStrategy():
            return "DDP"
        case FullyShard(shard=int() as shard):
            return f"HSDP over {shard}"
        case FullyShard(secondary=int() as secondary):
            return f"ZeRO-3 (FSDP), secondary shards over {secondary}"
        case FullyShard():
            return "ZeRO-3" + (
                ", parameter by parameter" if isinstance(strategy, DeepspeedZero3Strategy) else " (FSDP)"
            )
        case Zero1(zero_stage=stage, shard=shard):
            return f"ZeRO-{stage}" + (f" over {shard}" if shard else "")
        case NaiveDataParallel():
            return "torch.nn.DataParallel"


def _offload(offload: Offload) -> str:
    """What is on the host; empty if nothing is."""
    words = [] if offload.activations is None else [f"activations of {_offloaded(offload.activations)}"]
    match offload.states:
        case ShardOffload():
            words.append("parameters and optimizer")
        case OptimizerOffload(gradients=True):
            words.append("gradients and optimizer")
        case OptimizerOffload(share=share):
            words.append("optimizer" if share == 1.0 else f"{_percent(share)} of the optimizer")
    return f"{' and '.join(words)} on the host" if words else ""


def _offloaded(activations: ActivationOffload) -> str:
    if activations.layers is None:
        return "all layers" if activations.share == 1.0 else f"{_percent(activations.share)} of layers"
    return f"{activations.layers} layer{'s' * (activations.layers > 1)} a stage"


def _lora(lora: Lora) -> str:
    """The adapters, and what is frozen beside them."""
    beside = ", ".join(target.value for target in lora.targets)
    name = "LoRA" if lora.base is None else f"QLoRA ({lora.base.value})"
    return f"{name} of rank {lora.rank} beside {beside}"


def _recompute(policy: Recompute) -> str:
    match policy:
        case NoRecompute():
            return "no recompute"
        case SelectiveRecompute(modules) if policy != SelectiveRecompute():
            return f"recompute of {', '.join(recompute_module.value for recompute_module in RecomputeModule if recompute_module in modules)}"
        case SelectiveRecompute():
            return "selective recompute"
        case SelectiveOpRecompute():
            return "selective recompute by operations"
        case FullRecompute(layers=None):
            return "full recompute"
        case FullRecompute(layers=layers):
            return f"recompute of {layers} layer{'' if layers == 1 else 's'} a stage"


def mfu_words(convention: float, causal: float) -> str:
    """MFU by the convention, and with causal attention where the two part.

    >>> mfu_words(0.412, 0.405), mfu_words(0.782, 0.441)
    ('41.2%', '78.2% (causal 44.1%)')
    """
    return f"{convention:.1%} (causal {causal:.1%})" if masked(convention, causal) else f"{convention:.1%}"
