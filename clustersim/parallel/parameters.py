"""Which weights are kept, sharded and reduced alike?

The weights of a model fall into groups. Dense weights are one: ranks that differ only along replicating axes hold the
same of them. A strategy of data parallelism shards a group over the ranks of one role, or holds it equal on the ranks
of another, or both: gradients are summed and scattered over the first, then averaged over the second, and parameters
are gathered over the first. DDP, ZeRO and FSDP differ only in these roles, in what is sharded and in when it moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import WEIGHTS, Role
from clustersim.workload.operators import ADAPTERS, DENSE, QUANTIZED
from clustersim.workload.recipe import WeightFormats
from clustersim.workload.training import Training

_HOLDERS: Final[Mapping[str, Role]] = MappingProxyType({DENSE: WEIGHTS, QUANTIZED: WEIGHTS, ADAPTERS: WEIGHTS})
"""The ranks that a strategy shares the weights of a group out to, or keeps equal."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that are kept, sharded and reduced alike.

    shard: over whose ranks they are cut, None: they are whole; replicate: on whose ranks equal ones are, None: on one
    rank; shards, replicas: how many ranks those are; formats: of weights, gradients and optimizer states; trained:
    they have gradients and optimizer states.
    """

    name: str
    formats: WeightFormats
    shard: Role | None = None
    replicate: Role | None = None
    shards: int = 1
    replicas: int = 1
    trained: bool = True

    @property
    def ranks(self) -> int:
        """Ranks that reduce gradients with each other."""
        return self.shards * self.replicas


def parameter_groups(layout: Layout, training: Training) -> tuple[ParameterGroup, ...]:
    """The groups of a model's weights, as the layout's strategy spreads them."""
    groups = (_group(layout, name, formats) for name, formats in _formats(training).items())
    return tuple(replace(group, trained=training.lora is None or group.name == ADAPTERS) for group in groups)


def _formats(training: Training) -> dict[str, WeightFormats]:
    """The groups that a model is trained as, with their formats."""
    formats, lora = training.recipe.weights, training.lora
    if lora is None:
        return {DENSE: formats}
    quantized = {} if lora.base is None else {QUANTIZED: replace(formats, stored=lora.base, gathered=lora.base)}
    return {DENSE: formats, **quantized, ADAPTERS: formats}


def _group(layout: Layout, name: str, formats: WeightFormats) -> ParameterGroup:
    holders = _HOLDERS[name]
    ranks = layout.size_of(holders)
    if layout.data.stage:
        return ParameterGroup(name, formats, shard=holders, shards=ranks)
    return ParameterGroup(name, formats, replicate=holders, replicas=ranks)
