"""Which weights are kept, sharded and reduced alike?

The weights of a model fall into groups. Dense weights are one: ranks that differ only along replicating axes hold the
same of them. A strategy of data parallelism shards a group over the ranks of one role, or holds it equal on the ranks
of another, or both: gradients are summed and scattered over the first, then averaged over the second, and parameters
are gathered over the first. DDP, ZeRO and FSDP differ only in these roles, in what is sharded and in when it moves.
Hybrid sharding has both (FSDP2's two-dimensional mesh, Megatron-LM's optimizer instances, MiCS). Secondary shards
(ZeRO++'s hpZ) are a second copy of the weights, cut over fewer ranks, from which backward gathers. Frozen weights and
the adapters beside them are groups apart: the first are gathered where they are sharded, and nothing else. So are
matrices that are kept or gathered in the format of their products.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.operators import ADAPTERS, DENSE, EXPERTS, NARROWED, QUANTIZED
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    EXPERT_REPLICA,
    EXPERT_REPLICAS,
    EXPERT_SHARDS,
    EXPERT_WEIGHTS,
    INSTANCE,
    REPLICA,
    REPLICAS,
    SHARDS,
    WEIGHTS,
    WORLD,
    Role,
)


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds the same weights of a group.

    all: every rank that does; within: those near each other whom hybrid sharding cuts the weights over; across: those
    who hold the same part then.
    """

    all: Role
    within: Role
    across: Role


_EVERYWHERE: Final = Holders(WEIGHTS, SHARDS, REPLICAS)
_HOLDERS: Final[Mapping[str, Holders]] = MappingProxyType(
    {
        **dict.fromkeys((DENSE, NARROWED, QUANTIZED, ADAPTERS), _EVERYWHERE),
        EXPERTS: Holders(EXPERT_WEIGHTS, EXPERT_SHARDS, EXPERT_REPLICAS),
    }
)
"""The ranks that a strategy shares the weights of a group out to, or keeps equal."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that are kept, sharded and reduced alike.

    shard: over whose ranks they are cut, None: they are whole; replicate: on whose ranks equal ones are, None: on one
    rank; shards, replicas: how many ranks those are; secondary: over whose ranks a second copy is cut, None: there is
    none; seconds: how many those are; formats: of weights, gradients and optimizer states;
    trained: they have gradients and optimizer states.
    """

    name: str
    formats: WeightFormats
    shard: Role | None = None
    replicate: Role | None = None
    shards: int = 1
    replicas: int = 1
    secondary: Role | None = None
    seconds: int = 1
    trained: bool = True

    @property
    def ranks(self) -> int:
        """Ranks that reduce gradients with each other."""
        return self.shards * self.replicas

    @property
    def held(self) -> DType:
        """The format in which a host has them: as the optimizer updates them; frozen ones as they are computed with."""
        return self.formats.held if self.trained else self.formats.stored


def parameter_groups(layout: Layout, training: Training, *, experts: bool = False) -> tuple[ParameterGroup, ...]:
    """The groups of a model's weights, as the layout's strategy spreads them. experts: whether the model has some."""
    formats = _formats(training) | ({EXPERTS: training.recipe.matrices} if experts else {})
    groups = (_group(layout, name, weight_formats) for name, weight_formats in formats.items())
    return tuple(replace(group, trained=training.lora is None or group.name == ADAPTERS) for group in groups)


def _formats(training: Training) -> dict[str, WeightFormats]:
    """The groups that a model is trained as, with their formats."""
    formats, lora = training.recipe.weights, training.lora
    if lora is None:
        return {DENSE: formats, **({NARROWED: training.recipe.matrices} if training.recipe.apart else {})}
    quantized = {} if lora.base is None else {QUANTIZED: replace(formats, stored=lora.base, gathered=lora.base)}
    return {DENSE: formats, **quantized, ADAPTERS: formats}


def _group(layout: Layout, name: str, formats: WeightFormats) -> ParameterGroup:
    holders = _HOLDERS[name] if layout.folded else _EVERYWHERE
    ranks = layout.size_of(holders.all)
    if not layout.data.stage:
        return ParameterGroup(name, formats, replicate=holders.all, replicas=ranks)
    if not layout.hybrid:
        return ParameterGroup(name, formats, shard=holders.all, shards=ranks)
    within, across = layout.size_of(holders.within), layout.size_of(holders.across)
    if layout.data.secondary:
        return ParameterGroup(name, formats, shard=holders.all, shards=ranks, secondary=holders.within, seconds=within)
    return ParameterGroup(name, formats, shard=holders.within, shards=within, replicate=holders.across, replicas=across)


def one_copies(layout: Layout, groups: Iterable[ParameterGroup]) -> tuple[Role, ...]:
    """For each of the groups the ranks that hold all its gradients once together, after they were reduced.

    Where experts lie on a mesh of their own and nothing is sharded, those are others than of dense weights. A sharded
    copy of all groups lies on the same ranks, so one collective does for all (Megatron-LM's ChainedOptimizer,
    `grads_states_parallel_group_is_shared` in megatron/core/optimizer/optimizer.py).
    """
    if not layout.data.stage:
        apart = EXPERT_REPLICA if layout.folded else REPLICA
        return tuple(dict.fromkeys(apart if group.name == EXPERTS else REPLICA for group in groups))
    return (INSTANCE,) if layout.hybrid and not layout.data.secondary else (WORLD,)
