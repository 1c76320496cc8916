"""Which settings are legal and still likely a mistake?

Layouts that run, but hardly as intended, combinations that common frameworks do not support, and simulations
that are needlessly slow. One sentence each.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np

from clustersim.collectives.library import LinkTechnologies
from clustersim.collectives.library_files import load_library
from clustersim.collectives.nccl_overrides import ChannelLimits
from clustersim.common.dtypes import DType
from clustersim.hardware.degradation import DeadLinkEffect
from clustersim.hardware.topology import LinkKind
from clustersim.model.training import AttentionBackend
from clustersim.model.transformer import PositionEncoding
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.data_parallel_strategy import GradientSync
from clustersim.parallel.mesh import TENSOR
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.settings import Contention, Symmetry
from clustersim.scenario.validation_rules.alignment import alignment_warnings
from clustersim.scenario.validation_rules.nvlink_domains import nvlink_domain_warnings
from clustersim.scenario.validation_rules.recompute import absent_recompute_modules, useless_core_recompute
from clustersim.scenario.validation_rules.sites import site_warnings

WARN_RANKS = 2048  # simulated individually
WARN_NODES = 384  # without symmetry between nodes, on a shared network: 256 take 5 s
WARN_TASKS = 25e6  # in memory: some 2 GB, and 40 s
WARN_UNFOLDED_TASKS = 1e6  # tasks of individually simulated ranks: 20 s and more
WARN_DESYNC_TP_TASKS = 1e6  # tasks of desynchronized tensor-parallel groups with link contention: 5 s and more
TASKS_PER_PASS = 3.3  # a segment and its messages: 423 for the 128 passes of a rank of Llama 3 405B
TASKS_PER_UNIT = 2.5  # per FSDP unit: 412 for forward and backward of Llama 3 70B's 80 layers
GB_PER_TASK, SECONDS_PER_TASK = 0.073e-6, 1.5e-6  # 55 million took 4.0 GB, 69 million 106 s


def find_warnings(scenario: ResolvedScenario) -> list[str]:
    """Settings that are legal and still likely a mistake, one sentence each."""
    return [warning for check in _WARNINGS for warning in check(scenario)]


def slow_simulation_warnings(scenario: ResolvedScenario) -> list[str]:
    """Those warnings that predict a slow simulation."""
    return [warning for check in _SLOW_SIMULATION_CHECKS for warning in check(scenario)]


def _replicated_heads(scenario: ResolvedScenario) -> Iterator[str]:
    model, tp = scenario.model, scenario.layout.tp
    for kv_heads in dict.fromkeys(distinct_attention.kv_heads for distinct_attention in model.distinct_attentions):
        if tp > kv_heads:
            yield f"tp {tp} exceeds the {kv_heads} kv_heads of {model.name}: {tp // kv_heads} ranks hold each"


def _ineffective_expert_load(scenario: ResolvedScenario) -> Iterator[str]:
    moes = scenario.model.distinct_routed_moes
    capacities = [moe.capacity_factor for moe in moes if moe.capacity_factor is not None]
    if scenario.training.expert_load is not None and capacities:
        yield (
            f"training.expert_load changes nothing: every expert takes its capacity (capacity_factor "
            f"{max(capacities):g}), padded or dropped; write model.experts.capacity_factor: none for dropless experts"
        )


def _ineffective_tensor_overlap(scenario: ResolvedScenario) -> Iterator[str]:
    if scenario.layout.tp_comm_overlap and scenario.cross_domain_tp_group_count:
        yield (
            "layout.tp_comm_overlap has no effect: user buffers work within one NVLink domain, and a tensor-parallel "
            "group that reaches beyond it has none"
        )


def _sliding_window_with_ring_cp(scenario: ResolvedScenario) -> Iterator[str]:
    """Transformer Engine's AttnFuncWithCPAndKVP2P (context_parallel.py): windows require `a2a` or `all_gather`."""
    is_ring = scenario.layout.cp_kind not in (ContextParallelKind.ULYSSES, ContextParallelKind.ALL_GATHER)
    if (
        scenario.layout.cp > 1
        and is_ring
        and any(distinct_attention.window is not None for distinct_attention in scenario.model.distinct_attentions)
    ):
        yield (
            f"layout.cp {scenario.layout.cp}: the ring passes all keys and values on, also for layers with a window; "
            "Transformer Engine refuses windows on its ring (p2p); cp_kind: ulysses and all_gather have them"
        )


def _sequence_exceeds_max_positions(scenario: ResolvedScenario) -> Iterator[str]:
    model, sequence = scenario.model, scenario.training.sequence
    if model.positions is PositionEncoding.ROTARY and sequence > model.max_positions:
        yield f"sequence {sequence} is longer than the {model.max_positions} positions that {model.name} was made for"


def _symmetry_off(scenario: ResolvedScenario) -> Iterator[str]:
    ranks, passes = scenario.layout.world_size, 2 * scenario.microbatch_count * scenario.placement.max_chunks
    if scenario.cost.symmetry is Symmetry.OFF and ranks > WARN_RANKS:
        yield (
            f"cost.symmetry off simulates all {ranks:,} ranks: {ranks:,} x {passes:,} = {ranks * passes:,} "
            "passes of microbatches; auto gives the same answer from the few ranks that differ"
        )


def _slow_without_symmetry(scenario: ResolvedScenario) -> Iterator[str]:
    """About 10 ms and 250 kB per rank for the passes of a typical step (`tests/benchmarks/README.md`)."""
    ranks, reason = scenario.layout.world_size, _no_symmetry_reason(scenario)
    is_large = ranks > WARN_RANKS or _estimated_task_count(scenario) > WARN_UNFOLDED_TASKS
    if scenario.cost.network is Contention.SHARED and reason and is_large:
        yield (
            f"{reason}, and on a shared network all {ranks:,} are simulated one by one, which takes minutes and "
            "gigabytes; cost.network uncontended takes seconds"
        )


def _slow_scattered_placement(scenario: ResolvedScenario) -> Iterator[str]:
    """Nodes in scattered order each share racks with different nodes, so no two nodes are equivalent."""
    cluster = scenario.cluster
    scattered = bool((np.diff(cluster.machine_gpu_ids) < 0).any())
    if scenario.cost.network is Contention.SHARED and scattered and cluster.node_count > WARN_NODES:
        yield (
            f"cluster.placement: each of the {cluster.node_count:,} nodes shares links with others, and on a shared "
            "network "
            "all of them are simulated, which takes minutes; cost.network uncontended takes seconds"
        )


def _memory_for_spans(scenario: ResolvedScenario) -> Iterator[str]:
    """Without symmetry the spans of every rank and step are stored. A larger dp has fewer passes for the same batch."""
    reason, tasks, steps = _no_symmetry_reason(scenario), _estimated_task_count(scenario), scenario.steps
    if scenario.cost.network is Contention.SHARED or not reason or tasks < WARN_TASKS:
        return
    fitting_steps = int(steps * WARN_TASKS / tasks)
    fewer_steps_text = f"{fitting_steps:,} step{'s' * (fitting_steps > 1)}, " if fitting_steps and steps > 1 else ""
    symmetry_text = "cost.symmetry auto, " if scenario.jitter is None else ""
    yield (
        f"{reason}: about {tasks / 1e6:,.0f} million tasks of {scenario.layout.world_size:,} ranks in {steps:,} "
        f"step{'s' * (steps > 1)} take some {tasks * GB_PER_TASK:,.0f} GB of memory and "
        f"{tasks * SECONDS_PER_TASK:,.0f} s; {symmetry_text}{fewer_steps_text}or a smaller layout.dp and "
        "global_batch takes less"
    )


def _no_symmetry_reason(scenario: ResolvedScenario) -> str:
    """Why all ranks are simulated; empty if only representatives of equivalent ranks are."""
    if scenario.jitter is not None:
        return "jitter makes every rank differ"
    return "cost.symmetry is off" if scenario.cost.symmetry is Symmetry.OFF else ""


def _estimated_task_count(scenario: ResolvedScenario) -> float:
    """Estimated number of tasks of all ranks in all steps; each is stored as one trace event."""
    layout, chunks = scenario.layout, scenario.placement.max_chunks
    is_fsdp = layout.data.shards_parameters
    units = scenario.model.layer_count / (layout.pp * chunks) if is_fsdp else 0.0
    passes = 2 * scenario.microbatch_count * chunks
    return layout.world_size * passes * (TASKS_PER_PASS + TASKS_PER_UNIT * units) * scenario.steps


def _slow_desynchronized_tp_groups(scenario: ResolvedScenario) -> Iterator[str]:
    """Segments of a desynchronized tensor-parallel group contend with other groups at every collective."""
    if scenario.cost.network is Contention.UNCONTENDED or _estimated_task_count(scenario) <= WARN_DESYNC_TP_TASKS:
        return
    degradations, groups = scenario.degradations, scenario.layout.mesh.groups_along(TENSOR)
    speeds = degradations.gpu_speeds(scenario.cluster.machine_gpu_ids)[groups]
    has_unequal_speeds = bool((speeds.min(axis=1) != speeds.max(axis=1)).any())
    has_permanent_link_faults = len(degradations.links) > len(degradations.temporary_links)
    has_link_faults = bool(degradations.nics or has_permanent_link_faults) and groups.shape[1] > 1
    domains = np.unique(scenario.cluster.fabric.domain_ids(groups.reshape(-1)), return_counts=True)[1]
    is_one_domain = (
        not scenario.cross_domain_tp_group_count and int(domains.max()) == groups.shape[1]
    )  # every group within one NVLink domain
    if (has_unequal_speeds or has_link_faults) and not is_one_domain:
        yield (
            "degradations put some ranks of a tensor-parallel group out of step; on a shared network such a scenario "
            "can take minutes, with cost.network uncontended it takes seconds"
        )


def _zero_with_pipeline(scenario: ResolvedScenario) -> Iterator[str]:
    """ZeRO stage 2 and 3 with pipeline parallelism (DeepSpeed: `runtime/pipe/engine.py`)."""
    layout = scenario.layout
    if not layout.is_pipelined or layout.data.zero_stage < 2:
        return
    if layout.gradient_sync is GradientSync.EVERY_BACKWARD:
        yield (
            "layout.data: gradients are reduced after every microbatch although there is a pipeline; Megatron-LM, "
            "PyTorch and DeepSpeed reduce them once a step (leave reduce out)"
        )
    elif layout.data.zero_stage == 2:
        yield (
            "layout.data: zero2 with a pipeline keeps whole gradients until the last microbatch, so it takes the "
            "memory and the time of zero1; DeepSpeed refuses the two together"
        )


def _flash_attention_unsupported(scenario: ResolvedScenario) -> Iterator[str]:
    """bf16 requires compute capability 8.0, the minimum for FlashAttention-2 too (Dao-AILab/flash-attention)."""
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        if scenario.training.attention is not AttentionBackend.STANDARD and DType.BF16 not in accelerator.peak:
            yield (
                f"attention flash on {accelerator.name}: FlashAttention-2 needs compute capability 8.0 and this, "
                "without bf16, "
                "has less; training.attention standard is the safe choice"
            )


def _uncommon_interleaving(scenario: ResolvedScenario) -> Iterator[str]:
    """Megatron-LM's checks: microbatches a multiple of pp; equal stages, embedding and loss counted as layers."""
    pp, chunks, layers = scenario.layout.pp, scenario.placement.max_chunks, scenario.model.layer_count
    if scenario.schedule.round_size(pp) == 1:
        return
    if scenario.schedule.round_size(pp) == pp and scenario.microbatch_count % pp:
        yield (
            f"{scenario.microbatch_count} microbatches are not a multiple of pp {pp}, which Megatron-LM's interleaved "
            "schedule wants by default; this is the order of torch.distributed.pipelining"
        )
    is_divisible = any((layers + extra) % (pp * chunks) == 0 for extra in (0, 1, 2))
    if scenario.layout.layers_per_stage is None and not is_divisible:
        yield (
            f"{layers} layers do not divide into pp {pp} x {chunks} chunks = {pp * chunks} stages, not even with "
            "embedding and loss counted as layers; Megatron-LM wants such a split written out (layout.layers_per_stage)"
        )


def _staggered_schedule_end(scenario: ResolvedScenario) -> Iterator[str]:
    """In ZB-2p and ZB-V ranks start and end staggered; the bubble vanishes only over consecutive steps."""
    schedule, stages = scenario.schedule, scenario.placement.stage_ranks
    if not schedule.ends_staggered or scenario.layout.pp == 1:
        return
    if scenario.model.tied_embeddings and stages[0] != stages[-1]:
        yield (
            f"model.tied_embeddings: the first and the last pipeline rank add up a gradient at the end of a step, so "
            f"schedule {schedule.name} cannot begin the next step early; its authors untie them"
        )
    elif scenario.steps == 1:
        yield (
            f"schedule {schedule.name}: ranks are done one after the other and go on with the next step, so a step "
            "alone takes longer than one of many; with steps 3 the last one has the step time of a long run"
        )


def _ineffective_link_faults(scenario: ResolvedScenario) -> Iterator[str]:
    """Faults of links that the job does not use; skipped with dead links, which may reroute transfers anywhere."""
    fabric, degradations = scenario.cluster.fabric, scenario.degradations
    has_dead_nics = any(nic.bandwidth_fraction == 0.0 for nic in degradations.nics)
    if has_dead_nics or any(isinstance(change.effect, DeadLinkEffect) for change in degradations.links):
        return
    highest_tier = fabric.highest_tier(range(scenario.cluster.gpu_count))
    unused_kinds = dict.fromkeys(_KINDS_ABOVE_TIER.get(highest_tier, ()))
    ineffective_keys = [f"background.{kind.value}" for kind in degradations.background_load if kind in unused_kinds]
    ineffective_keys += ["nics"] * (LinkKind.NIC in unused_kinds and bool(degradations.nics))
    for change_index, change in enumerate(degradations.links):
        ineffective_keys += [f"links.{change_index}"] * (
            fabric.link_info(change.link_ids(fabric)[0]).kind in unused_kinds
        )
    for key in ineffective_keys:
        yield f"degradations.{key} changes nothing: no transfer leaves the {highest_tier} tier"


def _degradations_outside_job(scenario: ResolvedScenario) -> Iterator[str]:
    """Degradations of GPUs that are not allocated to the job."""
    degradations, gpu_ids = scenario.degradations, scenario.cluster.machine_gpu_ids
    entries = (
        [("slow", slow_gpus.gpu_ids) for slow_gpus in degradations.slow_gpus],
        [("nics", nic.gpu_ids) for nic in degradations.nics],
    )
    for entry_index, (key, gpus) in chain.from_iterable(map(enumerate, entries)):
        if not np.isin(gpus, gpu_ids).any():
            yield (
                f"degradations.{key}.{entry_index} changes nothing: the job has none of these GPUs (cluster.placement)"
            )


def _ineffective_channel_limits(scenario: ResolvedScenario) -> Iterator[str]:
    """Channel counts are modelled for point-to-point messages only, and only if the rate of a channel is known."""
    limits = scenario.cost.nccl_overrides.channel_limits
    if limits == ChannelLimits():
        return
    library, technologies = (
        load_library(scenario.cluster.library),
        LinkTechnologies.from_links(scenario.cluster.fabric.links),
    )
    if math.isinf(library.channel_rate_on(technologies)):
        yield "cost.nccl: numbers of channels change nothing; the rate of a channel is not known for these GPUs"
    else:
        yield (
            "cost.nccl: numbers of channels limit messages inside NVLink domains only; rings, trees and NVLS go at the "
            "rate of their links"
        )


def _ineffective_collnet(scenario: ResolvedScenario) -> Iterator[str]:
    if not scenario.cost.nccl_overrides.collnet_enabled:
        return
    library, technologies = (
        load_library(scenario.cluster.library),
        LinkTechnologies.from_links(scenario.cluster.fabric.links),
    )
    if not library.has_sharp(technologies):
        networks = " and ".join(network.value for network in technologies.networks) or "no network"
        yield (
            f"cost.nccl: NCCL_COLLNET_ENABLE changes nothing; switches of {networks} do not add, those of InfiniBand do"
        )


def _record_ignored_on_degraded_network(scenario: ResolvedScenario) -> Iterator[str]:
    record = scenario.cost.record
    if record is not None and record.collectives and scenario.degradations.affects_network:
        yield "the network is disturbed, so the record's collectives are left aside: the model of the fabric times all"


_KINDS_ABOVE_TIER: Mapping[str, tuple[LinkKind, ...]] = {
    "gpu": (LinkKind.NVLINK, LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN),
    "nvlink": (LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN),
    "host": (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN),
    "leaf": (LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN),
    "spine": (LinkKind.SPINE, LinkKind.WAN),
    "core": (LinkKind.WAN,),
}

_WARNINGS: tuple[Callable[[ResolvedScenario], Iterator[str]], ...] = (
    _replicated_heads,
    _ineffective_tensor_overlap,
    _ineffective_expert_load,
    nvlink_domain_warnings,
    site_warnings,
    alignment_warnings,
    useless_core_recompute,
    absent_recompute_modules,
    _sequence_exceeds_max_positions,
    _sliding_window_with_ring_cp,
    _uncommon_interleaving,
    _staggered_schedule_end,
    _flash_attention_unsupported,
    _zero_with_pipeline,
    _symmetry_off,
    _slow_without_symmetry,
    _slow_scattered_placement,
    _memory_for_spans,
    _slow_desynchronized_tp_groups,
    _ineffective_link_faults,
    _degradations_outside_job,
    _ineffective_channel_limits,
    _ineffective_collnet,
    _record_ignored_on_degraded_network,
)
_SLOW_SIMULATION_CHECKS = (
    _slow_without_symmetry,
    _slow_scattered_placement,
    _memory_for_spans,
    _slow_desynchronized_tp_groups,
)
