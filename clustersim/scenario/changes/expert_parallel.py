"""What would a scenario be with another dispatcher, or with its experts over other ranks?"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import EXPERT, EXPERT_MESH, EXPERT_TENSOR
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.scenario import Scenario


def with_dispatcher(scenario: Scenario, dispatcher: TokenDispatcher) -> Scenario:
    """Tokens travel to their experts and back in another way."""
    return replace(scenario, layout=replace(scenario.layout, dispatcher=dispatcher, dispatcher_sms=None))


def with_expert_load(scenario: Scenario, load: ExpertLoad | None) -> Scenario:
    """Tokens choose their experts so; None: evenly."""
    return replace(scenario, training=replace(scenario.training, expert_load=load))


def with_expert_parallelism(scenario: Scenario, ep: int) -> Scenario:
    """The experts of each layer are spread over so many ranks."""
    return replace(scenario, layout=_layout_with_ep(scenario.layout, ep))


def _layout_with_ep(layout: Layout, ep: int) -> Layout:
    """How far each expert is cut stays as it is, be it said or not."""
    return replace(layout, ep=ep, etp=layout.effective_etp)


def feasible_ep_degrees(scenario: Scenario) -> Iterator[int]:
    """Over how many ranks the experts of every layer can be spread, ascending."""
    layout = scenario.layout.as_configured
    rank_count = layout.tp * layout.cp * layout.dp
    expert_count = math.gcd(
        *(
            distinct_moe.experts
            for distinct_moe in scenario.model.distinct_moes
            if distinct_moe.single_dense_mlp is None
        )
    )
    yield from (divisor for divisor in divisors(expert_count) if rank_count % (divisor * layout.effective_etp) == 0)


def ep_fits_domains(scenario: Scenario, ep: int) -> bool:
    """Whether all that tokens reach is in their NVLink domain, with experts over so many ranks; PCIe's is a node."""
    mesh = _layout_with_ep(scenario.layout, ep).meshes.get(EXPERT_MESH)
    if mesh is None:
        return True
    cluster = scenario.cluster
    group_gpus = cluster.machine_gpu_ids[mesh.groups_along(EXPERT, EXPERT_TENSOR)]
    domain_ids = cluster.fabric.domain_ids(group_gpus)
    return bool(np.all(domain_ids == domain_ids[:, :1]))
