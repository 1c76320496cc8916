"""Changes of the cluster: faster or slower links, kernels, GPUs.

Factors are round numbers around 10 %: small enough to be read as a slope, large enough to be visible. A change
must be able to matter: the slow rank is one with the most kernel time, since the others wait for it; and where the
path to the NICs (PCIe) would be slower than NICs with doubled bandwidth, it is doubled as well.
"""

from collections.abc import Callable, Iterator
from typing import Final

from clustersim.hardware.topology import LinkKind
from clustersim.parallel.mesh import PIPELINE
from clustersim.scenario.changes.health import middle_rank, with_slow_gpu, with_slow_node
from clustersim.scenario.changes.kernels import tensor_core_shares, with_matmul_slowdown
from clustersim.scenario.changes.links import (
    network_link_kinds,
    nic_path_bottlenecks,
    node_link_kinds,
    site_link_kinds,
    with_link_bandwidth,
)
from clustersim.scenario.changes.scenario_change import (
    ApplyChange,
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
    UnaffectedScenarioError,
    apply_setter,
)
from clustersim.scenario.scenario import Scenario

_NO_NETWORK: Final = "all ranks are on one node"
_LINK_LABELS: Final = {LinkKind.PCIE: "PCIe", LinkKind.HOST: "host links"}
_REDUCED, _KERNEL_SPEEDUP, _DOUBLED = 0.9, 1.1, 2.0
_MIN_KERNEL_SPEEDUP: Final = 1.01  # a smaller one is not visible
_SLOW_RANK_COST: Final = (
    4.0  # factor of equivalence classes with a slow rank: from 16 to 64 for Llama 3 405B on 16,384 GPUs
)


def _reduced_links(kinds: Callable[[Scenario], tuple[LinkKind, ...]], no_links: str) -> ApplyChange:
    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        link_kinds = kinds(baseline.scenario)
        if not link_kinds:
            raise UnaffectedScenarioError(no_links)
        yield ChangedScenario(with_link_bandwidth(baseline.scenario, link_kinds, _REDUCED))

    return apply


def _doubled_network(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Double the network bandwidth, and that of the links to the NICs where they would become the bottleneck."""
    scenario = baseline.scenario
    link_kinds = network_link_kinds(scenario)
    if not link_kinds:
        raise UnaffectedScenarioError(_NO_NETWORK)
    bottlenecks = nic_path_bottlenecks(scenario, _DOUBLED)
    detail = f", {' and '.join(_LINK_LABELS[kind] for kind in bottlenecks)} too" if bottlenecks else ""
    yield ChangedScenario(with_link_bandwidth(scenario, (*link_kinds, *bottlenecks), _DOUBLED), detail)


def _faster_matmuls(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Scale matmul and attention speed, by at most what lets the fastest of them reach the peak."""
    speedup = min(_KERNEL_SPEEDUP, 1.0 / max(tensor_core_shares(baseline.scenario)))
    if speedup < _MIN_KERNEL_SPEEDUP:
        raise InapplicableChangeError("the fastest of them runs at the peak")
    yield ChangedScenario(with_matmul_slowdown(baseline.scenario, 1.0 / speedup), f" {speedup:.3g}x as fast")


def _slow_rank(baseline: Baseline) -> Iterator[ChangedScenario]:
    scenario = baseline.scenario
    if scenario.layout.world_size == 1:
        raise InapplicableChangeError("there is one rank")
    rank = middle_rank(scenario) if baseline.busiest_rank is None else baseline.busiest_rank
    stage_label = "pipeline rank" if scenario.placement.max_chunks > 1 else "stage"
    pipeline_rank = scenario.layout.rank_coordinates(PIPELINE)[rank]
    stage = f", {stage_label} {pipeline_rank}" if scenario.layout.pp > 1 else ""
    detail = f": GPU {scenario.cluster.machine_gpu_ids[rank]:,}{stage}"
    yield ChangedScenario(with_slow_gpu(scenario, _REDUCED, rank), detail)


LINK_CHANGES: Final = (
    ScenarioChange(
        "network_less",
        "network links at 0.9x bandwidth",
        ChangeSubject.LINKS,
        ChangeUse.WHAT_IF | ChangeUse.SENSITIVITY,
        _reduced_links(network_link_kinds, _NO_NETWORK),
    ),
    ScenarioChange(
        "network_twice",
        "network links at 2x bandwidth",
        ChangeSubject.LINKS,
        ChangeUse.WHAT_IF,
        _doubled_network,
    ),
    ScenarioChange(
        "site_links_twice",
        "links between sites at 2x bandwidth",
        ChangeSubject.LINKS,
        ChangeUse.WHAT_IF,
        apply_setter(lambda scenario: with_link_bandwidth(scenario, site_link_kinds(scenario), _DOUBLED)),
        is_relevant=lambda scenario: bool(site_link_kinds(scenario)),
    ),
    ScenarioChange(
        "node_links_less",
        "NVLink (else PCIe) at 0.9x bandwidth",
        ChangeSubject.LINKS,
        ChangeUse.WHAT_IF | ChangeUse.SENSITIVITY,
        _reduced_links(node_link_kinds, "no NVLink or PCIe is used"),
    ),
)

KERNEL_CHANGES: Final = (
    ScenarioChange(
        "products_faster",
        "matmuls and attention",
        ChangeSubject.KERNELS,
        ChangeUse.WHAT_IF,
        _faster_matmuls,
    ),
    ScenarioChange(
        "products_slower",
        "matmuls and attention at 0.9x speed",
        ChangeSubject.KERNELS,
        ChangeUse.SENSITIVITY,
        apply_setter(lambda scenario: with_matmul_slowdown(scenario, 1.0 / _REDUCED)),
    ),
)

NODE_CHANGES: Final = (
    ScenarioChange(
        "slow_node",
        "one node at 0.9x speed",
        ChangeSubject.GPUS,
        ChangeUse.SENSITIVITY,
        apply_setter(lambda scenario: with_slow_node(scenario, _REDUCED)),
    ),
)

GPU_CHANGES: Final = (
    ScenarioChange(
        "slow_rank",
        "one rank at 0.9x speed",
        ChangeSubject.GPUS,
        ChangeUse.WHAT_IF,
        _slow_rank,
        relative_cost=lambda _: _SLOW_RANK_COST,
    ),
)
