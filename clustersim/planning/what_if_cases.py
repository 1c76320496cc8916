"""Which single changes are worth a look, before anybody changes anything?

Links, kernels, batch, microbatch, recomputation, sharding and one slow rank: what a planner buys, tunes, or has to live
with. The strengths are round ones around a tenth, small enough to read as a slope and large enough to see. A change
gives the changed scenario, or the reason why it cannot be.

Changed is what can matter: the slow rank is one whose kernels take longest, for which the others wait; and where PCIe
is slower than NICs of twice the bandwidth would be, both have twice of theirs.
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
from clustersim.results.time_categories import KERNELS, Part
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
_ROUNDING: Final = 1e-9  # what sums of times are off by
_LINK_WORDS: Final = {LinkKind.PCIE: "PCIe", LinkKind.HOST: "host links"}
_NO_EXPERTS: Final = "no experts are spread over ranks"
LESS, MORE, TWICE, SLOW = 0.9, 1.1, 2.0, 0.9
VARIATION: Final = 0.3
"""Of drawn loads of experts: the middle of what is measured (0.05 to 0.55 of ranks' rows, `model.moe_expert_load`)."""
APART: Final = 16.0  # times as long where ranks that hold other experts are no longer alike
SPLITS: Final = 4.0  # times the classes of ranks with a slow one: 16 and 64 for Llama 3 405B on 16,384 GPUs


@dataclass(frozen=True, slots=True)
class Untried:
    """Why a change cannot be tried."""

    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The changed scenario. more: what the words of the case do not say, to be put behind them."""

    scenario: Scenario
    more: str = ""


Change = Callable[[SimulationResult], Changed | Untried]


def _every(_: Scenario) -> bool:
    return True


def _mixture(scenario: Scenario) -> bool:
    return bool(scenario.model.distinct_moes)


def _narrow(scenario: Scenario) -> bool:
    return scenario.training.recipe.casts is not None


def _computing_in(dtype: DType) -> Callable[[Scenario], bool]:
    """Whether every accelerator of the job has kernels for a format."""
    return lambda scenario: all(
        dtype in accelerator_kind.formats for accelerator_kind in scenario.cluster.accelerator_kinds()[0]
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One change.

    modelled: whether collectives are modelled with it, even where some were measured; effort: how many times as long as
    without it a simulation takes; concerns: whether a scenario has what is changed.
    """

    name: str
    words: str
    change: Change
    modelled: bool = False
    effort: float = 1.0
    concerns: Callable[[Scenario], bool] = _every


def _links(kinds: Callable[[Scenario], tuple[LinkKind, ...]], bandwidth: float, nowhere: str) -> Change:
    def change(result: SimulationResult) -> Changed | Untried:
        there = kinds(result.scenario)
        return Changed(with_link_bandwidth(result.scenario, there, bandwidth)) if there else Untried(nowhere)

    return change


def _faster_network(result: SimulationResult) -> Changed | Untried:
    """With what leads to its NICs, where that would be slower: else nothing would change."""
    scenario = result.scenario
    there = network_link_kinds(scenario)
    if not there:
        return Untried(_NO_NETWORK)
    slower = nic_path_bottlenecks(scenario, TWICE)
    more = f", {' and '.join(_LINK_WORDS[kind] for kind in slower)} too" if slower else ""
    return Changed(with_link_bandwidth(scenario, (*there, *slower), TWICE), more)


def _node_links(scenario: Scenario) -> tuple[LinkKind, ...]:
    return nvlink_kinds(scenario) or pcie_link_kinds(scenario)


def _faster_products(result: SimulationResult) -> Changed | Untried:
    """Not where a share of the peak would be above all of it: then less than the change was made."""
    efficiency = effective_efficiency(result.scenario)
    parts = efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward
    most = max(part.share for part in parts)
    if most * MORE > 1.0:
        return Untried(f"kernels reach {most:.0%} of the peak already")
    return Changed(with_matmul_slowdown(result.scenario, 1.0 / MORE))


def _larger_batch(result: SimulationResult) -> Changed | Untried:
    return Changed(with_global_batch_factor(result.scenario, 2))


def _smaller_microbatches(result: SimulationResult) -> Changed | Untried:
    sequences = result.scenario.training.microbatch
    if sequences % 2:
        return Untried(f"a microbatch of {sequences} sequence{'s' * (sequences > 1)} has no half")
    return Changed(with_microbatch_size(result.scenario, sequences // 2))


def _slow_rank(result: SimulationResult) -> Changed | Untried:
    scenario = result.scenario
    if scenario.layout.world_size == 1:
        return Untried("there is one rank")
    rank = _busiest(result)
    word = "pipeline rank" if scenario.placement.max_chunks > 1 else "stage"
    stage = f", {word} {result.program.program_index[rank]}" if scenario.layout.pp > 1 else ""
    return Changed(with_slow_gpu(scenario, SLOW, rank), f": GPU {scenario.cluster.machine_gpu_ids[rank]:,}{stage}")


def _busiest(result: SimulationResult) -> int:
    """The first of the ranks whose kernels take longest, but for those that are slow already."""
    parts = result.breakdown
    kernels = parts.seconds[:, [part.place for part in KERNELS]].sum(axis=1)
    speeds = result.scenario.degradations.gpu_speeds(result.scenario.cluster.machine_gpu_ids)
    owner = np.searchsorted(parts.ranks, parts.representative)
    healthy = np.where(speeds == speeds.max(), kernels[owner], -1.0)
    return int(np.argmax(healthy >= (1.0 - _ROUNDING) * healthy.max()))


def _hybrid(result: SimulationResult) -> Changed | Untried:
    """Over as few ranks as memory allows: then gathers and reductions go least far."""
    scenario, layout = result.scenario, result.scenario.layout
    ranks = layout.cp * layout.dp
    if not isinstance(layout.data, FullyShard) or ranks == 1:
        return Untried("weights are not fully sharded")
    if layout.is_hybrid_sharded:
        return Untried(f"weights are cut over {layout.data.shard_size:,} of {ranks:,} ranks now")
    for shards in (layout.cp * divisor for divisor in divisors(layout.dp)[:-1]):
        changed = with_dp_shard_size(scenario, shards)
        if shards > 1 and fits_in_memory(changed):
            return Changed(changed, f": over {shards:,} of {ranks:,}")
    return Untried(f"weights that are cut over fewer than all {ranks:,} ranks do not fit")


def _other_dispatcher(result: SimulationResult) -> Changed | Untried:
    """Kernels of their own in place of the library's collectives, or the reverse."""
    scenario = result.scenario
    layout, cluster = scenario.layout, scenario.cluster
    if not layout.has_expert_mesh:
        return Untried(_NO_EXPERTS)
    if layout.dispatcher.has_custom_kernels:
        other = TokenDispatcher.ALL_TO_ALL
    else:
        beyond = len(np.unique(cluster.fabric.domain_ids(cluster.machine_gpu_ids))) < cluster.node_count
        other = TokenDispatcher.HYBRIDEP if beyond else TokenDispatcher.DEEPEP
    return Changed(with_dispatcher(scenario, other), f": {other.value}, not {layout.dispatcher.value}")


def _other_load(result: SimulationResult) -> Changed | Untried:
    """Loads that are drawn where they are even, and even ones where they are not."""
    scenario = result.scenario
    if scenario.layout.ep == 1:
        return Untried("every rank has all experts, so it gets as many rows as any other")
    if any(distinct_moe.capacity is not None for distinct_moe in scenario.model.distinct_moes):
        return Untried("experts take as many rows as their capacity is, whoever is chosen")
    load = None if scenario.training.expert_load else RandomExpertLoad(VARIATION)
    return Changed(with_expert_load(scenario, load), ": evenly" if load is None else f": {load.description}")


def _experts(*, inside: bool) -> Change:
    """The widest spread that stays inside NVLink domains, or the narrowest that does not."""

    def change(result: SimulationResult) -> Changed | Untried:
        scenario = result.scenario
        if not any(distinct_moe.single_dense_mlp is None for distinct_moe in scenario.model.distinct_moes):
            return Untried(_NO_EXPERTS)
        if ep_fits_domains(scenario, scenario.layout.ep) is inside:
            return Untried(f"tokens {'stay inside' if inside else 'leave'} their NVLink domain now")
        found = [ranks for ranks in feasible_ep_degrees(scenario) if ep_fits_domains(scenario, ranks) is inside]
        if not found:
            return Untried(f"no legal ep is {'inside' if inside else 'across'} NVLink domains")
        ranks = found[-1] if inside else found[0]
        return Changed(with_expert_parallelism(scenario, ranks), f": ep {ranks}, not {scenario.layout.ep}")

    return change


def _recompute(policy: Recompute, already: str) -> Change:
    def change(result: SimulationResult) -> Changed | Untried:
        scenario = result.scenario
        return Untried(already) if scenario.training.recompute == policy else Changed(with_recompute(scenario, policy))

    return change


def _products_in(dtype: DType) -> Change:
    """By the usual recipe."""

    def change(result: SimulationResult) -> Changed | Untried:
        scenario, own = result.scenario, result.scenario.training.recipe
        name = default_recipe_name(scenario, dtype)
        if own.matmul_formats.forward is dtype or own.name == name:
            return Untried(f"they are in {own.name} now")
        return Changed(with_recipe(scenario, name), f" ({name})")

    return change


def _no_offload(result: SimulationResult) -> Changed | Untried:
    scenario = result.scenario
    offloads = scenario.training.offload != NO_OFFLOAD
    return Changed(without_offload(scenario)) if offloads else Untried("nothing is on the host now")


def _no_overheads(result: SimulationResult) -> Changed | Untried:
    overheads = result.scenario.training.overheads
    there = overheads != overheads.layer_implementation
    return Changed(without_overheads(result.scenario)) if there else Untried("nothing is done beside the model now")


def _cuda_graphs(result: SimulationResult) -> Changed | Untried:
    framework = result.scenario.framework
    if framework.uses_cuda_graphs or framework.graph_launch_seconds is None:
        return Untried("passes are captured now" if framework.uses_cuda_graphs else f"{framework.name} captures none")
    waits = result.breakdown.total(Part.LAUNCH)
    return Changed(with_cuda_graphs(result.scenario)) if waits else Untried("no GPU waits for its host")


CASES: Final = (
    Case(
        "network_less", "network links at 0.9x bandwidth", _links(network_link_kinds, LESS, _NO_NETWORK), modelled=True
    ),
    Case("network_twice", "network links at 2x bandwidth", _faster_network, modelled=True),
    Case(
        "node_links_less",
        "NVLink (else PCIe) at 0.9x bandwidth",
        _links(_node_links, LESS, _NO_NODE_LINKS),
        modelled=True,
    ),
    Case("products_faster", "matmuls and attention 1.1x as fast", _faster_products),
    Case(
        "other_dispatcher",
        "tokens sent to their experts in another way",
        _other_dispatcher,
        modelled=True,
        concerns=_mixture,
    ),
    Case("other_loads", "tokens spread over experts in another way", _other_load, effort=APART, concerns=_mixture),
    Case(
        "experts_inside",
        "experts spread inside NVLink domains",
        _experts(inside=True),
        modelled=True,
        concerns=_mixture,
    ),
    Case(
        "experts_across",
        "experts spread across NVLink domains",
        _experts(inside=False),
        modelled=True,
        concerns=_mixture,
    ),
    Case("twice_the_microbatches", "twice the microbatches (global batch 2x)", _larger_batch, effort=2.0),
    Case("half_the_microbatch", "microbatches of half the size (same batch)", _smaller_microbatches, effort=2.0),
    Case("slow_rank", "one rank at 0.9x speed", _slow_rank, effort=SPLITS),
    Case("hybrid_sharding", "weights cut over as few ranks as fit, equal on the rest", _hybrid, modelled=True),
    Case("no_recompute", "nothing recomputed", _recompute(NoRecompute(), "nothing is recomputed now")),
    Case("full_recompute", "all layers recomputed", _recompute(FullRecompute(), "all layers are recomputed now")),
    Case("products_bf16", "products in BF16", _products_in(DType.BF16), concerns=_narrow),
    Case("products_fp8", "products in FP8", _products_in(DType.FP8), concerns=_computing_in(DType.FP8)),
    Case("products_mxfp8", "products in MXFP8", _products_in(DType.MXFP8), concerns=_computing_in(DType.MXFP8)),
    Case("products_nvfp4", "products in NVFP4", _products_in(DType.NVFP4), concerns=_computing_in(DType.NVFP4)),
    Case("cuda_graphs", "passes captured in CUDA graphs", _cuda_graphs),
    Case("no_offload", "nothing on the host", _no_offload),
    Case("no_overheads", "nothing done beside the model (training.overheads: none)", _no_overheads),
)
