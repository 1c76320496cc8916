"""Changes of the token dispatcher, of expert load and of expert parallelism."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import EXPERT, EXPERT_MESH, EXPERT_TENSOR
from clustersim.parallel.token_dispatch import runs_on
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.scenario import Scenario


def with_expert_load(scenario: Scenario, load: ExpertLoad | None) -> Scenario:
    """The scenario with another expert load; None: balanced."""
    return replace(scenario, training=replace(scenario.training, expert_load=load))


def fused_dispatcher(scenario: Scenario) -> TokenDispatcher:
    """The fused dispatch kernels for a cluster: Hybrid-EP where an NVLink domain is several nodes, else DeepEP.

    On AMD's GPUs MORI-EP, if the framework has it.
    """
    cluster, dispatchers = scenario.cluster, scenario.framework.supported_layouts.dispatchers
    if TokenDispatcher.MORI.value in dispatchers and runs_on(TokenDispatcher.MORI, cluster.accelerator):
        return TokenDispatcher.MORI
    has_larger_domains = len(np.unique(cluster.fabric.domain_ids(cluster.machine_gpu_ids))) < cluster.node_count
    return TokenDispatcher.HYBRIDEP if has_larger_domains else TokenDispatcher.DEEPEP


def _layout_with_ep(layout: Layout, ep: int) -> Layout:
    """The layout with another ep; etp keeps its effective value, also where it was left out."""
    return replace(layout, ep=ep, etp=layout.effective_etp)


def feasible_ep_degrees(scenario: Scenario) -> Iterator[int]:
    """Degrees of expert parallelism that divide the experts of every layer and the ranks, ascending."""
    layout = scenario.layout.as_configured
    rank_count = layout.tp * layout.cp * layout.dp
    expert_count = math.gcd(*(moe.experts for moe in scenario.model.distinct_routed_moes))
    yield from (divisor for divisor in divisors(expert_count) if rank_count % (divisor * layout.effective_etp) == 0)


def ep_fits_domains(scenario: Scenario, ep: int) -> bool:
    """Whether every expert-parallel group stays within one NVLink domain (with PCIe: one node)."""
    mesh = _layout_with_ep(scenario.layout, ep).meshes.get(EXPERT_MESH)
    if mesh is None:
        return True
    cluster = scenario.cluster
    group_gpus = cluster.machine_gpu_ids[mesh.groups_along(EXPERT, EXPERT_TENSOR)]
    domain_ids = cluster.fabric.domain_ids(group_gpus)
    return bool(np.all(domain_ids == domain_ids[:, :1]))
