"""Which single changes are worth simulating? The what-if cases: one modification of the scenario each.

Links, kernels, batch, microbatch, recomputation, sharding and one slow rank: what a planner buys, tunes or
has to live with. Factors are round numbers around 10 %: small enough to be read as a slope, large enough to
be visible. Each case returns the changed scenario, or the reason why it does not apply.

A change must be able to matter: the slow rank is one with the most kernel time, since the others wait for
it; and where the path to the NICs (PCIe) would be slower than NICs with doubled bandwidth, it is doubled as
well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.hardware.topology import LinkKind
from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import FullRecompute, NoRecompute, Recompute
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.program.task import TokenDispatcher
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import KERNEL_CATEGORIES, TimeCategory
from clustersim.scenario import Scenario
from clustersim.scenario.changes.expert_parallel import (
    ep_fits_domains,
    feasible_ep_degrees,
    with_dispatcher,
    with_expert_load,
    with_expert_parallelism,
)
from clustersim.scenario.changes.kernels import effective_efficiency, with_matmul_slowdown
from clustersim.scenario.changes.links import (
    network_link_kinds,
    nic_path_bottlenecks,
    nvlink_kinds,
    pcie_link_kinds,
    with_link_bandwidth,
)
from clustersim.scenario.changes.precision import default_recipe_name, with_recipe
from clustersim.scenario.changes.training import (
    with_cuda_graphs,
    with_dp_shard_size,
    with_global_batch_factor,
    with_microbatch_size,
    with_recompute,
    with_slow_gpu,
    without_offload,
    without_overheads,
)
from clustersim.scenario.nearest_values import divisors

_NO_NETWORK: Final = "all ranks are on one node"
_NO_NODE_LINKS: Final = "no NVLink or PCIe is used"
_ROUNDING: Final = 1e-9  # relative rounding error of sums of times
_LINK_LABELS: Final = {LinkKind.PCIE: "PCIe", LinkKind.HOST: "host links"}
_NO_EXPERTS: Final = "no experts are spread over ranks"
REDUCED_BANDWIDTH, KERNEL_SPEEDUP, DOUBLED_BANDWIDTH, SLOW_RANK_SPEED = 0.9, 1.1, 2.0, 0.9
LOAD_VARIATION: Final = 0.3
"""Coefficient of variation of random expert loads: middle of the measured range (0.05 to 0.55 of the tokens per
rank, `expert_load`).
"""
UNEVEN_LOAD_COST: Final = 16.0  # relative cost where ranks with different experts are no longer equivalent
SLOW_RANK_COST: Final = (
    4.0  # factor of equivalence classes with a slow rank: from 16 to 64 for Llama 3 405B on 16,384 GPUs
)


@dataclass(frozen=True, slots=True)
class SkippedChange:
    """Why a change does not apply to a scenario."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChangedScenario:
    """The changed scenario. label_suffix: what the label of the case leaves open, appended to it."""

    scenario: Scenario
    label_suffix: str = ""


ScenarioChange = Callable[[SimulationResult], ChangedScenario | SkippedChange]


def _always_applies(_: Scenario) -> bool:
    return True


def _has_moe(scenario: Scenario) -> bool:
    return bool(scenario.model.distinct_moes)


def _uses_low_precision(scenario: Scenario) -> bool:
    return scenario.training.recipe.casts is not None


def _supports_dtype(dtype: DType) -> Callable[[Scenario], bool]:
    """A predicate: does every accelerator type of the job support matmuls in this format?"""
    return lambda scenario: all(
        dtype in accelerator_kind.formats for accelerator_kind in scenario.cluster.accelerator_kinds()[0]
    )


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """One what-if case.

    models_collectives: whether collectives are modelled even where measured ones exist; relative_cost:
    simulation time relative to that of the unchanged scenario; is_applicable: whether the scenario has what is
    changed.
    """

    name: str
    label: str
    change: ScenarioChange
    models_collectives: bool = False
    relative_cost: float = 1.0
    is_applicable: Callable[[Scenario], bool] = _always_applies


def _scaled_links(kinds: Callable[[Scenario], tuple[LinkKind, ...]], factor: float, skip_reason: str) -> ScenarioChange:
    def apply_change(result: SimulationResult) -> ChangedScenario | SkippedChange:
        link_kinds = kinds(result.scenario)
        return (
            ChangedScenario(with_link_bandwidth(result.scenario, link_kinds, factor))
            if link_kinds
            else SkippedChange(skip_reason)
        )

    return apply_change


def _faster_network(result: SimulationResult) -> ChangedScenario | SkippedChange:
    """Double the network bandwidth, and that of the links to the NICs where they would become the bottleneck."""
    scenario = result.scenario
    link_kinds = network_link_kinds(scenario)
    if not link_kinds:
        return SkippedChange(_NO_NETWORK)
    bottlenecks = nic_path_bottlenecks(scenario, DOUBLED_BANDWIDTH)
    label_suffix = f", {' and '.join(_LINK_LABELS[kind] for kind in bottlenecks)} too" if bottlenecks else ""
    return ChangedScenario(with_link_bandwidth(scenario, (*link_kinds, *bottlenecks), DOUBLED_BANDWIDTH), label_suffix)


def _intra_node_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    return nvlink_kinds(scenario) or pcie_link_kinds(scenario)


def _faster_matmuls(result: SimulationResult) -> ChangedScenario | SkippedChange:
    """Scale matmul and attention speed; skipped if an efficiency would exceed 100 % of the peak."""
    efficiency = effective_efficiency(result.scenario)
    curves = efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward
    max_fraction = max(curve.peak_fraction for curve in curves)
    if max_fraction * KERNEL_SPEEDUP > 1.0:
        return SkippedChange(f"kernels reach {max_fraction:.0%} of the peak already")
    return ChangedScenario(with_matmul_slowdown(result.scenario, 1.0 / KERNEL_SPEEDUP))


def _larger_batch(result: SimulationResult) -> ChangedScenario | SkippedChange:
    return ChangedScenario(with_global_batch_factor(result.scenario, 2))


def _smaller_microbatches(result: SimulationResult) -> ChangedScenario | SkippedChange:
    sequences = result.scenario.training.microbatch
    if sequences % 2:
        return SkippedChange(f"a microbatch of {sequences} sequence{'s' * (sequences > 1)} has no half")
    return ChangedScenario(with_microbatch_size(result.scenario, sequences // 2))


def _slow_rank(result: SimulationResult) -> ChangedScenario | SkippedChange:
    scenario = result.scenario
    if scenario.layout.world_size == 1:
        return SkippedChange("there is one rank")
    rank = _max_compute_rank(result)
    stage_label = "pipeline rank" if scenario.placement.max_chunks > 1 else "stage"
    stage = f", {stage_label} {result.program.program_index[rank]}" if scenario.layout.pp > 1 else ""
    return ChangedScenario(
        with_slow_gpu(scenario, SLOW_RANK_SPEED, rank), f": GPU {scenario.cluster.machine_gpu_ids[rank]:,}{stage}"
    )


def _max_compute_rank(result: SimulationResult) -> int:
    """The first of the ranks with the most kernel time, excluding those that are slowed already."""
    breakdown = result.breakdown
    kernels = breakdown.seconds[:, [category.index for category in KERNEL_CATEGORIES]].sum(axis=1)
    speeds = result.scenario.degradations.gpu_speeds(result.scenario.cluster.machine_gpu_ids)
    owner = np.searchsorted(breakdown.ranks, breakdown.representative)
    healthy = np.where(speeds == speeds.max(), kernels[owner], -1.0)
    return int(np.argmax(healthy >= (1.0 - _ROUNDING) * healthy.max()))


def _hybrid_sharding(result: SimulationResult) -> ChangedScenario | SkippedChange:
    """Shard over as few ranks as memory allows: all-gathers and reduce-scatters then span the fewest ranks."""
    scenario, layout = result.scenario, result.scenario.layout
    ranks = layout.cp * layout.dp
    if not isinstance(layout.data, FullyShard) or ranks == 1:
        return SkippedChange("weights are not fully sharded")
    if layout.is_hybrid_sharded:
        return SkippedChange(f"weights are cut over {layout.data.shard_size:,} of {ranks:,} ranks now")
    for shards in (layout.cp * divisor for divisor in divisors(layout.dp)[:-1]):
        changed = with_dp_shard_size(scenario, shards)
        if shards > 1 and fits_in_memory(changed):
            return ChangedScenario(changed, f": over {shards:,} of {ranks:,}")
    return SkippedChange(f"weights that are cut over fewer than all {ranks:,} ranks do not fit")


def _other_dispatcher(result: SimulationResult) -> ChangedScenario | SkippedChange:
    """Use a fused dispatch kernel (DeepEP, HybridEP) in place of the library's all-to-all, or the reverse."""
    scenario = result.scenario
    layout, cluster = scenario.layout, scenario.cluster
    if not layout.has_expert_mesh:
        return SkippedChange(_NO_EXPERTS)
    if layout.dispatcher.has_custom_kernels:
        other = TokenDispatcher.ALL_TO_ALL
    else:
        crosses_domains = len(np.unique(cluster.fabric.domain_ids(cluster.machine_gpu_ids))) < cluster.node_count
        other = TokenDispatcher.HYBRIDEP if crosses_domains else TokenDispatcher.DEEPEP
    return ChangedScenario(with_dispatcher(scenario, other), f": {other.value}, not {layout.dispatcher.value}")


def _other_expert_load(result: SimulationResult) -> ChangedScenario | SkippedChange:
    """Random expert loads where they are balanced, balanced ones where they are not."""
    scenario = result.scenario
    if scenario.layout.ep == 1:
        return SkippedChange("every rank has all experts, so it gets as many rows as any other")
    if any(distinct_moe.capacity_factor is not None for distinct_moe in scenario.model.distinct_moes):
        return SkippedChange("experts take as many rows as their capacity is, whoever is chosen")
    load = None if scenario.training.expert_load else RandomExpertLoad(LOAD_VARIATION)
    return ChangedScenario(with_expert_load(scenario, load), ": evenly" if load is None else f": {load.description}")


def _experts_across_domains(*, within: bool) -> ScenarioChange:
    """The largest ep whose groups stay within NVLink domains, or the smallest whose groups do not."""

    def apply_change(result: SimulationResult) -> ChangedScenario | SkippedChange:
        scenario = result.scenario
        if not any(distinct_moe.single_dense_mlp is None for distinct_moe in scenario.model.distinct_moes):
            return SkippedChange(_NO_EXPERTS)
        if ep_fits_domains(scenario, scenario.layout.ep) is within:
            return SkippedChange(f"tokens {'stay inside' if within else 'leave'} their NVLink domain now")
        degrees = [ranks for ranks in feasible_ep_degrees(scenario) if ep_fits_domains(scenario, ranks) is within]
        if not degrees:
            return SkippedChange(f"no legal ep is {'inside' if within else 'across'} NVLink domains")
        ranks = degrees[-1] if within else degrees[0]
        return ChangedScenario(with_expert_parallelism(scenario, ranks), f": ep {ranks}, not {scenario.layout.ep}")

    return apply_change


def _recompute_policy(policy: Recompute, skip_reason: str) -> ScenarioChange:
    def apply_change(result: SimulationResult) -> ChangedScenario | SkippedChange:
        scenario = result.scenario
        return (
            SkippedChange(skip_reason)
            if scenario.training.recompute == policy
            else ChangedScenario(with_recompute(scenario, policy))
        )

    return apply_change


def _matmuls_in(dtype: DType) -> ScenarioChange:
    """Matmuls in a format, by its default recipe."""

    def apply_change(result: SimulationResult) -> ChangedScenario | SkippedChange:
        scenario, recipe = result.scenario, result.scenario.training.recipe
        name = default_recipe_name(scenario, dtype)
        if recipe.matmul_formats.forward is dtype or recipe.name == name:
            return SkippedChange(f"they are in {recipe.name} now")
        return ChangedScenario(with_recipe(scenario, name), f" ({name})")

    return apply_change


def _no_offload(result: SimulationResult) -> ChangedScenario | SkippedChange:
    scenario = result.scenario
    uses_offload = scenario.training.offload != NO_OFFLOAD
    return ChangedScenario(without_offload(scenario)) if uses_offload else SkippedChange("nothing is on the host now")


def _no_overheads(result: SimulationResult) -> ChangedScenario | SkippedChange:
    overheads = result.scenario.training.overheads
    has_overheads = overheads != overheads.layer_implementation
    return (
        ChangedScenario(without_overheads(result.scenario))
        if has_overheads
        else SkippedChange("there are no overheads outside the model now")
    )


def _cuda_graphs(result: SimulationResult) -> ChangedScenario | SkippedChange:
    framework = result.scenario.framework
    if framework.uses_cuda_graphs or framework.graph_launch_seconds is None:
        return SkippedChange(
            "passes are captured now" if framework.uses_cuda_graphs else f"{framework.name} captures none"
        )
    launch_seconds = result.breakdown.category_total(TimeCategory.LAUNCH)
    return (
        ChangedScenario(with_cuda_graphs(result.scenario))
        if launch_seconds
        else SkippedChange("no GPU waits for its host")
    )


WHAT_IF_CASES: Final = (
    WhatIfCase(
        "network_less",
        "network links at 0.9x bandwidth",
        _scaled_links(network_link_kinds, REDUCED_BANDWIDTH, _NO_NETWORK),
        models_collectives=True,
    ),
    WhatIfCase("network_twice", "network links at 2x bandwidth", _faster_network, models_collectives=True),
    WhatIfCase(
        "node_links_less",
        "NVLink (else PCIe) at 0.9x bandwidth",
        _scaled_links(_intra_node_link_kinds, REDUCED_BANDWIDTH, _NO_NODE_LINKS),
        models_collectives=True,
    ),
    WhatIfCase("products_faster", "matmuls and attention 1.1x as fast", _faster_matmuls),
    WhatIfCase(
        "other_dispatcher",
        "tokens sent to their experts in another way",
        _other_dispatcher,
        models_collectives=True,
        is_applicable=_has_moe,
    ),
    WhatIfCase(
        "other_loads",
        "tokens spread over experts in another way",
        _other_expert_load,
        relative_cost=UNEVEN_LOAD_COST,
        is_applicable=_has_moe,
    ),
    WhatIfCase(
        "experts_inside",
        "experts spread inside NVLink domains",
        _experts_across_domains(within=True),
        models_collectives=True,
        is_applicable=_has_moe,
    ),
    WhatIfCase(
        "experts_across",
        "experts spread across NVLink domains",
        _experts_across_domains(within=False),
        models_collectives=True,
        is_applicable=_has_moe,
    ),
    WhatIfCase("twice_the_microbatches", "twice the microbatches (global batch 2x)", _larger_batch, relative_cost=2.0),
    WhatIfCase(
        "half_the_microbatch", "microbatches of half the size (same batch)", _smaller_microbatches, relative_cost=2.0
    ),
    WhatIfCase("slow_rank", "one rank at 0.9x speed", _slow_rank, relative_cost=SLOW_RANK_COST),
    WhatIfCase(
        "hybrid_sharding",
        "weights cut over as few ranks as fit, equal on the rest",
        _hybrid_sharding,
        models_collectives=True,
    ),
    WhatIfCase("no_recompute", "nothing recomputed", _recompute_policy(NoRecompute(), "nothing is recomputed now")),
    WhatIfCase(
        "full_recompute", "all layers recomputed", _recompute_policy(FullRecompute(), "all layers are recomputed now")
    ),
    WhatIfCase("products_bf16", "matmuls in BF16", _matmuls_in(DType.BF16), is_applicable=_uses_low_precision),
    WhatIfCase("products_fp8", "matmuls in FP8", _matmuls_in(DType.FP8), is_applicable=_supports_dtype(DType.FP8)),
    WhatIfCase(
        "products_mxfp8", "matmuls in MXFP8", _matmuls_in(DType.MXFP8), is_applicable=_supports_dtype(DType.MXFP8)
    ),
    WhatIfCase(
        "products_nvfp4", "matmuls in NVFP4", _matmuls_in(DType.NVFP4), is_applicable=_supports_dtype(DType.NVFP4)
    ),
    WhatIfCase("cuda_graphs", "passes captured in CUDA graphs", _cuda_graphs),
    WhatIfCase("no_offload", "nothing on the host", _no_offload),
    WhatIfCase("no_overheads", "no overheads outside the model (training.overheads: none)", _no_overheads),
)
