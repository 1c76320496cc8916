"""Which weights are kept, sharded and reduced alike?

The weights of a model fall into groups. Dense weights are one: ranks that differ only along replicating axes hold the
same of them. A strategy of data parallelism shards a group over the ranks of one role, or holds it equal on the ranks
of another, or both: gradients are summed and scattered over the first, then averaged over the second, and parameters
are gathered over the first. DDP, ZeRO and FSDP differ only in these roles, in what is sharded and in when it moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import WEIGHTS, Role
from clustersim.workload.operators import DENSE
from clustersim.workload.recipe import WeightFormats

_HOLDERS: Final[Mapping[str, Role]] = MappingProxyType({DENSE: WEIGHTS})
"""The ranks that a strategy shares the weights of a group out to, or keeps equal."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that are kept, sharded and reduced alike.

    shard: over whose ranks they are cut, None: they are whole; replicate: on whose ranks equal ones are, None: on one
    rank; shards, replicas: how many ranks those are; formats: of weights, gradients and optimizer states.
    """

    name: str
    formats: WeightFormats
    shard: Role | None = None
    replicate: Role | None = None
    shards: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that reduce gradients with each other."""
        return self.shards * self.replicas


def parameter_groups(layout: Layout, formats: WeightFormats) -> tuple[ParameterGroup, ...]:
    """The groups of a model's weights, as the layout's strategy spreads them."""
    return tuple(_group(layout, name, holders, formats) for name, holders in _HOLDERS.items())


def _group(layout: Layout, name: str, holders: Role, formats: WeightFormats) -> ParameterGroup:
    ranks = layout.size_of(holders)
    if layout.data.stage:
        return ParameterGroup(name, formats, shard=holders, shards=ranks)
    return ParameterGroup(name, formats, replicate=holders, replicas=ranks)
