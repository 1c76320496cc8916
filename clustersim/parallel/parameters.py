"""Which weights are kept, sharded and reduced alike?

The weights of a model fall into groups. Dense weights are one: ranks that differ only along replicating axes hold the
same of them. A strategy of data parallelism shards a group over the ranks of one role, or holds it equal on the ranks
of another, or both: gradients are summed and scattered over the first, then averaged over the second, and parameters
are gathered over the first. DDP, ZeRO and FSDP differ only in these roles, in what is sharded and in when it moves.
Hybrid sharding has both (FSDP2's two-dimensional mesh, Megatron-LM's optimizer instances, MiCS). Secondary shards
(ZeRO++'s hpZ) are a second copy of the weights, cut over fewer ranks, from which backward gathers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import INSTANCE, REPLICA, REPLICAS, SHARDS, WEIGHTS, WORLD, Role
from clustersim.workload.operators import DENSE
from clustersim.workload.recipe import WeightFormats


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds the same weights of a group.

    all: every rank that does; within: those near each other whom hybrid sharding cuts the weights over; across: those
    who hold the same part then.
    """

    all: Role
    within: Role
    across: Role


_HOLDERS: Final[Mapping[str, Holders]] = MappingProxyType({DENSE: Holders(WEIGHTS, SHARDS, REPLICAS)})
"""The ranks that a strategy shares the weights of a group out to, or keeps equal."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that are kept, sharded and reduced alike.

    shard: over whose ranks they are cut, None: they are whole; replicate: on whose ranks equal ones are, None: on one
    rank; shards, replicas: how many ranks those are; secondary: over whose ranks a second copy is cut, None: there is
    none; seconds: how many those are; formats: of weights, gradients and optimizer states.
    """

    name: str
    formats: WeightFormats
    shard: Role | None = None
    replicate: Role | None = None
    shards: int = 1
    replicas: int = 1
    secondary: Role | None = None
    seconds: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that reduce gradients with each other."""
        return self.shards * self.replicas


def parameter_groups(layout: Layout, formats: WeightFormats) -> tuple[ParameterGroup, ...]:
    """The groups of a model's weights, as the layout's strategy spreads them."""
    return tuple(_group(layout, name, holders, formats) for name, holders in _HOLDERS.items())


def _group(layout: Layout, name: str, holders: Holders, formats: WeightFormats) -> ParameterGroup:
    ranks = layout.size_of(holders.all)
    if not layout.data.stage:
        return ParameterGroup(name, formats, replicate=holders.all, replicas=ranks)
    if not layout.hybrid:
        return ParameterGroup(name, formats, shard=holders.all, shards=ranks)
    within, across = layout.size_of(holders.within), layout.size_of(holders.across)
    if layout.data.secondary:
        return ParameterGroup(name, formats, shard=holders.all, shards=ranks, secondary=holders.within, seconds=within)
    return ParameterGroup(name, formats, shard=holders.within, shards=within, replicate=holders.across, replicas=across)


def one_copy(layout: Layout) -> Role:
    """The ranks that hold all gradients of the model once together, after they were reduced."""
    if not layout.data.stage:
        return REPLICA
    return INSTANCE if layout.hybrid and not layout.data.secondary else WORLD
