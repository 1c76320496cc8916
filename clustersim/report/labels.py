"""How are layouts, pipeline ranks, degradations and provenance labelled, wherever they are shown?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes, format_flops, format_seconds, format_step_time
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.cost.timing import Provenance
from clustersim.hardware.degradation import DeadLinkEffect, Degradations, LinkDegradation, format_id_ranges
from clustersim.hardware.topology import Fabric, LinkKind
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.lora import Lora
from clustersim.model.offload import ActivationOffload, Offload, OptimizerOffload, ShardOffload
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import (
    DotsSaveableRecompute,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
)
from clustersim.model.transformer import Encoder, TransformerModel
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    Zero1,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DISPLAY_AXES, EXPERT, EXPERT_TENSOR
from clustersim.results.natural_routing import NaturalRouting
from clustersim.results.number_formats import FormatUsage
from clustersim.results.software import software_of
from clustersim.results.timing_sensitivity import RUN_COUNT, TimingSensitivity
from clustersim.results.utilization import LeadingMfu, shows_causal_mfu

if TYPE_CHECKING:
    from clustersim.scenario import Scenario


_MAX_ENTRIES: Final = 3  # of one kind of degradation
CRITICAL_PATH_NOTE: Final = (
    "The critical path is the longest chain of dependent tasks; shortening tasks that are not on it does not shorten "
    "the "
    "step."
)
NATURAL_ROUTING_MEANING: Final = "if tokens choose their experts freely"
TIMING_SENSITIVITY_MEANING: Final = (
    f"over {RUN_COUNT} runs with kernels slower by a few parts in 10^12: smaller differences mean nothing"
)
PROVENANCE_LABELS: Final[Mapping[Provenance, str]] = {
    Provenance.MEASURED: "measured here",
    Provenance.INTERPOLATED: "interpolated between measured shapes",
    Provenance.FITTED: "model fitted to measurements of this hardware",
    Provenance.DERIVED: "scaled from measurements of other hardware",
    Provenance.PUBLISHED: "model fitted to published measurements of this hardware",
    Provenance.ROOFLINE: "model from datasheets",
}
LINK_KIND_LABELS: Final[Mapping[LinkKind, str]] = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.PCIE: "PCIe",
    LinkKind.HOST: "host",
    LinkKind.NIC: "NIC",
    LinkKind.LEAF: "leaf to spine",
    LinkKind.SPINE: "spine to core",
    LinkKind.WAN: "between sites",
}
"""Labels of link kinds: what the links of a tier connect, or belong to."""


def format_dtype_shares(formats: FormatUsage) -> str:
    """Shares of matmul FLOP by format."""
    return ", ".join(f"{share:.0%} {dtype.value}" for dtype, share in formats.flop_shares.items())


def format_natural_range(natural: NaturalRouting) -> str:
    """The range of the step with natural routing."""
    low, high = map(format_step_time, natural.step_times)
    return low if low == high else f"{low} to {high}"


def format_natural_ratios(natural: NaturalRouting) -> str:
    """The range as multiples of the balanced step."""
    low, high = natural.ratios
    return f"{low:.2f} to {high:.2f} times the balanced step"


def format_timing_sensitivity(sensitivity: TimingSensitivity) -> str:
    """How far a chaotic step moves."""
    return f"{sensitivity.low - 1.0:+.2%} to {sensitivity.high - 1.0:+.2%}"


def peak_reference_suffix(formats: FormatUsage | None) -> str:
    """Peak that the FLOP rate is relative to; empty with a single format."""
    return "" if formats is None else f", of {format_flops(formats.peak_flops)} {formats.peak_format.value}"


def pipeline_row_type(scenario: "Scenario") -> str:
    """Name of a holder of layers: stage, or pipeline rank if each holds several stages (chunks)."""
    return "pipeline rank" if scenario.placement.max_chunks > 1 else "stage"


def stage_name(scenario: "Scenario", pipeline_rank: int) -> str:
    """Name of a pipeline rank."""
    return f"{pipeline_row_type(scenario)} {pipeline_rank}"


@dataclass(frozen=True, slots=True)
class PipelineRowLabels:
    """Names of the distinct programs. labels, short: [programs]; singular: name of the kind."""

    labels: tuple[str, ...]
    short: tuple[str, ...]
    singular: str


def pipeline_row_labels(scenario: "Scenario", program_count: int) -> PipelineRowLabels:
    """Names of pipeline ranks; for torch.nn.DataParallel, whose first GPU does extra work, of its two kinds of GPU."""
    if program_count > scenario.layout.pp:
        return PipelineRowLabels(("first GPU", "other GPUs"), ("first", "others"), "kind of GPU")
    indices = range(program_count)
    return PipelineRowLabels(
        tuple(stage_name(scenario, index) for index in indices), tuple(map(str, indices)), pipeline_row_type(scenario)
    )


def describe_layout(scenario: "Scenario") -> str:
    """Parallelism degrees, strategies and batch, in the usual order."""
    layout, training, chunks = scenario.layout, scenario.training, scenario.placement.max_chunks
    degrees = layout.as_configured.degrees
    stops_early = training.early_stop and training.recompute != NoRecompute()
    labels = [
        *(f"{axis.name} {degrees[axis.name]:,}" for axis in DISPLAY_AXES if degrees[axis.name] > 1),
        *(_expert_degree_labels(layout) if layout.has_expert_mesh else ()),
        _describe_encoder_ranks(layout),
        _describe_data_parallel(layout.data) if layout.dp > 1 else "",
        scenario.schedule.name + (f", {chunks} chunks" if chunks > 1 else "") if layout.pp > 1 else "",
        _describe_recompute(training.recompute) + (", stopped early" if stops_early else ""),
        "" if training.lora is None else _describe_lora(training.lora),
        _describe_offload(training.offload),
        training.recipe.name,
        f"{training.global_batch:,} sequences of {training.sequence:,} tokens a step",
        f"{'2 x ' * layout.mirrored}{scenario.microbatch_count:,} microbatch{'es' * (scenario.microbatch_count > 1)} "
        f"of {training.microbatch}",
    ]
    return " · ".join(filter(None, labels))


def _describe_encoder_ranks(layout: Layout) -> str:
    """Degrees of an encoder that has some of its own; empty where it has none."""
    if layout.encoder_dp is not None:
        return f"encoder tp {layout.effective_encoder_tp} x dp {layout.encoder_dp}"
    return f"encoder tp {layout.encoder_tp}" if layout.has_encoder_mesh else ""


def describe_model(model: TransformerModel) -> str:
    """A model's name, and how many layers have which mixer if not all have attention.

    An MLP that is a layer of its own (Nemotron-H) is one of them.
    """
    encoder = "" if model.encoder is None else f" behind {_describe_encoder(model.encoder)}"
    return f"{_describe_layers(model)}{encoder}"


def _describe_encoder(encoder: Encoder) -> str:
    """An encoder, whether it is trained, and its tokens."""
    frozen = " (frozen)" if encoder.model.gradients.layers is GradientFlow.NONE else ""
    mean = "" if encoder.counts is None else "on average "
    images = f"{mean}{encoder.samples:.4g} image{'s' * (encoder.samples != 1)}"
    sizes = sorted({min(encoder.image_tokens), max(encoder.image_tokens)})
    tokens, projected = (
        " to ".join(f"{size:,}" for size in ends) for ends in (sizes, map(encoder.projector.projected_tokens, sizes))
    )
    return f"{encoder.model.name}{frozen}, {images} of {tokens} tokens a sequence, {projected} of them projected"


def _describe_layers(model: TransformerModel) -> str:
    """A model's name, and its mixers if not all are attention."""
    counts: dict[str, int] = {}
    for group in model.stack:
        for label in [mixer.label for mixer in group.spec.mixers] or ["MLP"]:
            counts[label] = counts.get(label, 0) + group.count
    if not model.has_other_mixers:
        return model.name
    return f"{model.name} ({', '.join(f'{count:,} {label}' for label, count in counts.items())})"


def describe_software(scenario: "Scenario") -> str:
    """The framework that the step is simulated with, its kernels, and whether the file names it at all."""
    software = software_of(scenario)
    recipe = f"{software.recipe} recipe" if software.recipe else ""
    name = " ".join(filter(None, (software.framework, software.version, recipe)))
    if not software.unfused:
        fusion = "fused kernels"
    elif not software.fused:
        fusion = "unfused kernels"
    else:
        fusion = f"unfused {', '.join(kind.value for kind in software.unfused)}"
    labels = [
        f"{name}, compiled" if software.is_compiled else name,
        fusion,
        f"{software.attention} attention",
        f"{software.loss} loss",
    ]
    assumed = " (assumed: the file names no framework)" if software.is_assumed else ""
    return " · ".join(labels) + assumed


def _expert_degree_labels(layout: Layout) -> list[str]:
    """Expert-parallel and expert-tensor-parallel degrees, and the token dispatcher."""
    etp_labels = [] if layout.effective_etp == layout.tp else [f"{EXPERT_TENSOR.name} {layout.effective_etp:,}"]
    return [f"{EXPERT.name} {layout.ep:,}", *etp_labels, f"{layout.dispatcher.value} dispatcher"]


def describe_degradations(scenario: "Scenario") -> str:
    """Degradations of the cluster and background load in one line; empty if there are none."""
    labels = list(_degradation_labels(scenario.degradations, scenario.cluster.fabric))
    labels += _truncate_entries([f"co-scheduled with {job.resolved.name}" for job in scenario.co_scheduled_jobs])
    labels += _truncate_entries([_describe_traffic(job) for job in scenario.background_traffic])
    if (jitter := scenario.jitter) is not None:
        labels.append(f"jitter {_format_percent(jitter.std)} ({jitter.distribution.value}, seed {jitter.seed})")
    return "; ".join(labels)


def describe_gpus(scenario: "Scenario") -> str:
    """The accelerator; if there are several kinds, the count of each."""
    accelerators, accelerator_index = scenario.cluster.accelerator_kinds()
    counts = np.bincount(accelerator_index[: scenario.layout.world_size], minlength=len(accelerators)).tolist()
    used_kinds = [(accelerator.name, count) for accelerator, count in zip(accelerators, counts, strict=True) if count]
    return (
        used_kinds[0][0]
        if len(used_kinds) == 1
        else f"({' + '.join(f'{count:,} {name}' for name, count in used_kinds)})"
    )


def _degradation_labels(degradations: Degradations, fabric: Fabric) -> Iterator[str]:
    """Slow GPUs, degraded NICs and links, and background load."""
    yield from _truncate_entries(
        [
            f"{_format_gpu_ids(slow_gpus.gpu_ids)} at {_format_percent(slow_gpus.speed)} speed"
            for slow_gpus in degradations.slow_gpus
        ]
    )
    yield from _truncate_entries(
        [
            f"NICs of {_format_gpu_ids(nic.gpu_ids)} "
            f"{f'at {_format_percent(nic.bandwidth_fraction)}' if nic.bandwidth_fraction else 'dead'}"
            for nic in degradations.nics
        ]
    )
    yield from _truncate_entries([_describe_link_degradation(link, fabric) for link in degradations.links])
    for kind, load in degradations.background_load.items():
        yield f"{_format_percent(load)} of every {kind.value} link loaded by others"


def _truncate_entries(entries: Sequence[str]) -> list[str]:
    """The first entries, and how many are omitted."""
    omitted = [f"{len(entries) - _MAX_ENTRIES} more of the kind"] if len(entries) > _MAX_ENTRIES else []
    return [*entries[:_MAX_ENTRIES], *omitted]


def _format_gpu_ids(gpu_ids: Sequence[int]) -> str:
    return format_id_ranges(np.unique(np.array(gpu_ids, dtype=np.int64)))


def _format_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _describe_link_degradation(change: LinkDegradation, fabric: Fabric) -> str:
    """A degraded link; of parallel links, how many of them."""
    ends = f"{change.source} {'-' if change.both_directions else '->'} {change.target}"
    members = _parallel_link_count(change, fabric)
    if isinstance(change.effect, DeadLinkEffect):
        return f"link {ends} dead" if members == 1 else f"{change.effect.lost_count} of {members} links {ends} dead"
    period = "" if change.active_period is None else f" from {' to '.join(map(format_seconds, change.active_period))}"
    return (
        f"{'link' if members == 1 else f'{members} links'} {ends} at "
        f"{_format_percent(change.effect.bandwidth_fraction)}{period}"
    )


def _describe_traffic(traffic: TrafficPattern) -> str:
    """A background traffic pattern, and its period."""
    repetition = "once" if isinf(traffic.period_seconds) else f"every {format_seconds(traffic.period_seconds)}"
    operation = f"others' {traffic.collective.value} of {format_bytes(traffic.payload)}"
    return f"{operation} among {len(traffic.gpu_ids):,} GPUs {repetition}"


def _parallel_link_count(change: LinkDegradation, fabric: Fabric) -> int:
    """Number of parallel links between the ends; 1 if not found, as graphs of single links drop dead ones."""
    try:
        return fabric.parallel_link_count(fabric.find_link(change.source, change.target))
    except InputError:
        return 1


def _describe_data_parallel(strategy: DataParallelStrategy) -> str:
    match strategy:
        case DdpStrategy():
            return "DDP"
        case FullyShard(shard=int() as shard):
            return f"HSDP over {shard}"
        case FullyShard(zero_hpz_partition_size=int() as secondary):
            return f"ZeRO-3 (FSDP), secondary shards over {secondary}"
        case FullyShard(single_parameters=is_single):
            is_single = is_single or strategy.gathers_single_parameters
            return "ZeRO-3" + (", parameter by parameter" if is_single else " (FSDP)")
        case Zero1(zero_stage=stage, shard=shard):
            return f"ZeRO-{stage}" + (f" over {shard}" if shard else "")
        case NaiveDataParallel():
            return "torch.nn.DataParallel"


def _describe_offload(offload: Offload) -> str:
    """What is offloaded to the host; empty if nothing is."""
    items = [] if offload.activations is None else [f"activations of {_describe_offloaded_layers(offload.activations)}"]
    match offload.states:
        case ShardOffload():
            items.append("parameters and optimizer")
        case OptimizerOffload(gradients=True):
            items.append("gradients and optimizer")
        case OptimizerOffload(share=share):
            items.append("optimizer" if share == 1.0 else f"{_format_percent(share)} of the optimizer")
    return f"{' and '.join(items)} on the host" if items else ""


def _describe_offloaded_layers(activations: ActivationOffload) -> str:
    if activations.layers is None:
        return "all layers" if activations.share == 1.0 else f"{_format_percent(activations.share)} of layers"
    return f"{activations.layers} layer{'s' * (activations.layers > 1)} a stage"


def _describe_lora(lora: Lora) -> str:
    """The adapters, and the layers they adapt."""
    targets = ", ".join(target.value for target in lora.targets)
    name = "LoRA" if lora.base is None else f"QLoRA ({lora.base.value})"
    return f"{name} of rank {lora.rank} on {targets}"


_RECOMPUTE_LABELS: Final[Mapping[Recompute, str]] = {
    NoRecompute(): "no recompute",
    SelectiveRecompute(): "selective recompute",
    SelectiveOpRecompute(): "selective recompute by operations",
    DotsSaveableRecompute(): "recompute of all but products with weights",
    FullRecompute(): "full recompute",
}


def _describe_recompute(policy: Recompute) -> str:
    match policy:
        case SelectiveRecompute(modules) if policy not in _RECOMPUTE_LABELS:
            recomputed = [module.value for module in RecomputeModule if module in modules]
            return f"recompute of {', '.join(recomputed)}"
        case FullRecompute(int() as layers):
            return f"recompute of {layers} layer{'' if layers == 1 else 's'} a stage"
    return _RECOMPUTE_LABELS[policy]


def format_mfu(convention: float, causal: float) -> str:
    """MFU by the usual convention, and with causal attention if they differ; the leading one is first.

    >>> format_mfu(0.412, 0.405), format_mfu(0.412, 0.395), format_mfu(0.782, 0.441)
    ('41.2%', '41.2% (causal 39.5%)', '44.1% causal (full matrix 78.2%)')
    """
    if LeadingMfu.select(convention, causal).is_causal:
        return f"{causal:.1%} causal (full matrix {convention:.1%})"
    return f"{convention:.1%} (causal {causal:.1%})" if shows_causal_mfu(convention, causal) else f"{convention:.1%}"
