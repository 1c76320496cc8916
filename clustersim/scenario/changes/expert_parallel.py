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


def with_load(scenario: Scenario, load: ExpertLoad | None) -> Scenario:
    """Tokens choose their experts so; None: evenly."""
    return replace(scenario, training=replace(scenario.training, expert_load=load))


def with_experts_over(scenario: Scenario, ranks: int) -> Scenario:
    """The experts of each layer are spread over so many ranks."""
    return replace(scenario, layout=_over(scenario.layout, ranks))


def _over(layout: Layout, ranks: int) -> Layout:
    """How far each expert is cut stays as it is, be it said or not."""
    return replace(layout, ep=ranks, etp=layout.effective_etp)


def spreads(scenario: Scenario) -> Iterator[int]:
    """Over how many ranks the experts of every layer can be spread, ascending."""
    layout = scenario.layout.as_configured
    room = layout.tp * layout.cp * layout.dp
    experts = math.gcd(*(mixture.experts for mixture in scenario.model.mixtures if mixture.alone is None))
    yield from (divisor for divisor in divisors(experts) if room % (divisor * layout.effective_etp) == 0)


def within_domains(scenario: Scenario, ranks: int) -> bool:
    """Whether all that tokens reach is in their NVLink domain, with experts over so many ranks; PCIe's is a node."""
    mesh = _over(scenario.layout, ranks).meshes.get(EXPERT_MESH)
    if mesh is None:
        return True
    cluster = scenario.cluster
    groups = cluster.places[mesh.groups_along(EXPERT, EXPERT_TENSOR)]
    domains = cluster.fabric.domains(groups)
    return bool(np.all(domains == domains[:, :1]))
