"""Along which axes is work spread over ranks, and who forms a group with whom?

An axis is one way to spread work; a mesh gives each of its axes a degree and numbers ranks along them, the first axis
fastest. Several meshes may lie over the same ranks, as attention's and the experts' do where both are folded onto the
same GPUs (Liu et al. 2025, arXiv:2504.14960). A role names the groups that communicate with each other by a mesh and
those of its axes along which their members differ: gradients, say, are reduced over groups of the role `WEIGHTS`.

Hybrid sharding splits the data-parallel axis in two (`SHARD`, whose ranks are near each other, and `REPLICATE`), so it
has a mesh of its own. A new axis is one entry of `MESHES` (and of `ROLES`, if it communicates by itself) and its degree
in `layout`; who holds the same weights, what a breakdown calls its communication and in which colour pages draw it
follow from the entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Axis:
    """One way to spread work.

    label: in words, before "axis" or "communication"; category: whose colour its communication has (`report.theme`);
    replicates: its ranks hold the same weights; inside: its ranks communicate between the kernels of a layer; part_of:
    the axis that it is a part of, which answers name in its place.
    """

    name: str
    label: str
    category: str
    replicates: bool = False
    inside: bool = False
    part_of: "Axis | None" = None

    @property
    def whole(self) -> "Axis":
        """The axis that it is a part of, or itself."""
        return self.part_of or self


TENSOR: Final = Axis("tp", "tensor-parallel", "tensor", inside=True)
CONTEXT: Final = Axis("cp", "context-parallel", "context", replicates=True, inside=True)
DATA: Final = Axis("dp", "data-parallel", "data", replicates=True)
PIPELINE: Final = Axis("pp", "pipeline", "pipeline")
EXPERT: Final = Axis("ep", "expert-parallel", "expert", inside=True)
EXPERT_TENSOR: Final = Axis("etp", "tensor-parallel", "tensor", inside=True, part_of=TENSOR)
EXPERT_DATA: Final = Axis("edp", "data-parallel", "data", replicates=True, part_of=DATA)
SHARD: Final = Axis("dp_shard", "data-parallel", "data", replicates=True, part_of=DATA)
REPLICATE: Final = Axis("dp_replicate", "data-parallel", "data", replicates=True, part_of=DATA)
EXPERT_SHARD: Final = Axis("edp_shard", "data-parallel", "data", replicates=True, part_of=DATA)
EXPERT_REPLICATE: Final = Axis("edp_replicate", "data-parallel", "data", replicates=True, part_of=DATA)
DENSE: Final = "dense"
"""The mesh of attention and of all weights that every token meets."""
HYBRID: Final = "hybrid"
"""The same where data parallelism shards weights over some of its ranks only."""
EXPERTS: Final = "experts"
"""The mesh of experts, where it is not the dense one: what each is cut over, then which of them a rank has."""
HYBRID_EXPERTS: Final = "hybrid experts"
"""The same where data parallelism shards weights over some of its ranks only."""
MESHES: Final[Mapping[str, tuple[Axis, ...]]] = MappingProxyType(
    {
        DENSE: (TENSOR, CONTEXT, DATA, PIPELINE),
        HYBRID: (TENSOR, CONTEXT, SHARD, REPLICATE, PIPELINE),
        EXPERTS: (EXPERT_TENSOR, EXPERT, EXPERT_DATA, PIPELINE),
        HYBRID_EXPERTS: (EXPERT_TENSOR, EXPERT, EXPERT_SHARD, EXPERT_REPLICATE, PIPELINE),
    }
)
"""The axes of every mesh, in the usual order of ranks; all meshes of a layout have as many ranks."""
AXES: Final = tuple(dict.fromkeys(axis for axes in MESHES.values() for axis in axes if axis.part_of is None))
"""All whole axes, in the order of answers."""
HOST: Final = Axis("host", "host", "host")
"""No axis of a mesh: what each rank copies to and from its host, and what the host computes for it."""
SERVED: Final = (*AXES, HOST)
"""All that time is spent on communication for, in the order of answers."""
NAMES: Final = tuple(axis.name for axis in MESHES[DENSE])
"""The axes whose degrees make up all ranks together; those of experts are folded onto the same ranks."""
SPOKEN: Final = (*(axis for axis in MESHES[DENSE] if axis is not DATA), DATA)
"""The dense mesh's axes as people list them: first what makes one replica of the model, then how many there are."""


class Span(Enum):
    """Which ranks that differ along a role's axes form one group."""

    ALL = "all"
    TABLES = "tables"  # those that hold the embedding's matrix
    NEXT = "next"  # each with the one after it, as sender and receiver
    PREVIOUS = "previous"  # each with the one before it
    ACROSS = "across"  # each with the one opposite, in the pipeline that runs the other way


@dataclass(frozen=True, slots=True)
class Role:
    """The groups of one purpose. axes: along which members differ; serves: the axis whose communication it counts as.

    label: what it is called where it is told apart from the axis that it serves; mesh: which of the layout's.
    """

    name: str
    label: str
    axes: tuple[Axis, ...]
    serves: Axis
    span: Span = Span.ALL
    mesh: str = DENSE

    @property
    def ordered(self) -> bool:
        """Whether its groups are pairs of sender and receiver."""
        return self.span in (Span.NEXT, Span.PREVIOUS, Span.ACROSS)

    @property
    def listed(self) -> str:
        """Under which name answers list what it moves: both directions of the pipeline are one."""
        return self.serves.name if self.ordered else self.name

    @property
    def crosses_stages(self) -> bool:
        """Whether who waits for it waits for other pipeline stages."""
        return PIPELINE in self.axes


TENSOR_ROLE: Final = Role("tp", "tp", (TENSOR,), TENSOR)
CONTEXT_ROLE: Final = Role("cp", "cp", (CONTEXT,), CONTEXT)
WEIGHTS: Final = Role("dp", "dp", tuple(axis for axis in MESHES[DENSE] if axis.replicates), DATA)
"""Ranks that hold the same weights."""
REPLICA: Final = Role("model", "replica", tuple(axis for axis in MESHES[DENSE] if not axis.replicates), DATA)
"""Ranks that hold one copy of the weights together."""
WORLD: Final = Role("world", "all ranks", MESHES[DENSE], DATA)
SHARDS: Final = Role("dp_shard", "dp within shards", (CONTEXT, SHARD), DATA, mesh=HYBRID)
"""Ranks that weights are cut over, where not all that hold the same weights are."""
REPLICAS: Final = Role("dp_replicate", "dp across replicas", (REPLICATE,), DATA, mesh=HYBRID)
"""Ranks that hold the same part of weights which are cut over `SHARDS`."""
INSTANCE: Final = Role(
    "instance", "one sharded copy", tuple(axis for axis in MESHES[HYBRID] if axis is not REPLICATE), DATA, mesh=HYBRID
)
"""Ranks that hold one copy of the sharded weights together."""
EXPERT_ROLE: Final = Role("ep", "ep", (EXPERT,), EXPERT, mesh=EXPERTS)
"""Ranks that have each other's experts."""
EXPERT_TENSOR_ROLE: Final = Role("etp", "etp", (EXPERT_TENSOR,), EXPERT, mesh=EXPERTS)
"""Ranks that experts are cut over."""
EXPERT_PARTS: Final = Role("etp_ep", "ep and etp", (EXPERT_TENSOR, EXPERT), EXPERT, mesh=EXPERTS)
"""Ranks that have parts of all experts together."""
EXPERT_WEIGHTS: Final = Role("edp", "dp of experts", (EXPERT_DATA,), DATA, mesh=EXPERTS)
"""Ranks that hold the same experts."""
EXPERT_REPLICA: Final = Role(
    "expert_model",
    "replica of experts",
    tuple(axis for axis in MESHES[EXPERTS] if not axis.replicates),
    DATA,
    mesh=EXPERTS,
)
"""Ranks that hold one copy of all experts together."""
EXPERT_SHARDS: Final = Role("edp_shard", "dp of experts within shards", (EXPERT_SHARD,), DATA, mesh=HYBRID_EXPERTS)
EXPERT_REPLICAS: Final = Role(
    "edp_replicate", "dp of experts across replicas", (EXPERT_REPLICATE,), DATA, mesh=HYBRID_EXPERTS
)
EMBEDDING: Final = Role("embedding", "tied embeddings", (PIPELINE,), DATA, Span.TABLES)
"""The pipeline ranks that hold an embedding which is the logits' matrix, too, or that of further tokens."""
NEXT: Final = Role("pp_next", "pp", (PIPELINE,), PIPELINE, Span.NEXT)
PREVIOUS: Final = Role("pp_previous", "pp", (PIPELINE,), PIPELINE, Span.PREVIOUS)
ACROSS: Final = Role("pp_across", "pp", (DATA, PIPELINE), PIPELINE, Span.ACROSS)
"""Ranks that hold the same stages for pipelines which run towards each other."""
HOST_ROLE: Final = Role("host", "host", (), HOST)
"""Each rank by itself, with its host."""

ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        role.name: role
        for role in (
            TENSOR_ROLE,
            CONTEXT_ROLE,
            WEIGHTS,
            SHARDS,
            REPLICAS,
            EXPERT_ROLE,
            EXPERT_TENSOR_ROLE,
            EXPERT_PARTS,
            EXPERT_WEIGHTS,
            EXPERT_REPLICA,
            EXPERT_SHARDS,
            EXPERT_REPLICAS,
            NEXT,
            PREVIOUS,
            ACROSS,
            EMBEDDING,
            REPLICA,
            INSTANCE,
            WORLD,
            HOST_ROLE,
        )
    }
)
"""All roles by the name that exchanges carry."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with degrees over ranks 0, 1, ... degrees: by axis name, the axis with adjacent ranks first.

    mirrored: the data-parallel axis of a mesh of pipelines in pairs that run towards each other. The first half of its
    coordinates are on the first half of the ranks along the pipeline; the second half, on those opposite, count back
    from the last one.
    """

    degrees: Mapping[str, int]
    mirrored: Axis | None = None

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return int(np.prod([*self.degrees.values()], dtype=np.int64))

    @property
    def strides(self) -> dict[str, tuple[int, int]]:
        """Degree of every axis, and how many ranks lie from one of its coordinates to the next as they are numbered.

        >>> Mesh({"tp": 2, "dp": 4}).strides
        {'tp': (2, 1), 'dp': (4, 2)}
        """
        strides = np.cumprod([1, *self.degrees.values()]).tolist()
        return {name: (degree, stride) for (name, degree), stride in zip(self.degrees.items(), strides, strict=False)}

    @property
    def grid(self) -> IntArray:
        """Rank numbers with one dimension for each axis, in reversed order: the axis with adjacent ranks is last.

        >>> Mesh({"dp": 4, "pp": 2}, mirrored=DATA).grid.tolist()
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        if self.mirrored is None:
            return np.arange(self.size, dtype=np.int64).reshape([*self.degrees.values()][::-1])
        pairs, pipeline = self.degrees[self.mirrored.name], self.degrees[PIPELINE.name]
        written = Mesh({**self.degrees, self.mirrored.name: pairs // 2, PIPELINE.name: 2 * pipeline}).grid
        ahead, back = np.split(written, 2, axis=self._dimension(PIPELINE))
        opposite = np.flip(back, axis=self._dimension(PIPELINE))
        return np.concatenate([ahead, opposite], axis=self._dimension(self.mirrored))

    def coordinate(self, axis: Axis) -> IntArray:
        """Coordinate of every rank on one axis: [ranks]."""
        grid, dimension = self.grid, self._dimension(axis)
        places = np.empty(self.size, dtype=np.int64)
        places[grid] = np.arange(grid.shape[dimension]).reshape([-1] + [1] * (grid.ndim - 1 - dimension))
        return places

    def members(self, *axes: Axis) -> IntArray:
        """Groups of the ranks that differ along some axes only, by coordinate: [groups, product of their degrees].

        >>> Mesh({"tp": 2, "dp": 2}).members(DATA).tolist()
        [[0, 2], [1, 3]]
        """
        grid = self.grid
        dimensions = sorted(self._dimension(axis) for axis in axes)
        moved = np.moveaxis(grid, dimensions, range(grid.ndim - len(dimensions), grid.ndim))
        size = int(np.prod([grid.shape[dimension] for dimension in dimensions]))
        return np.ascontiguousarray(moved.reshape(-1, size))

    def _dimension(self, axis: Axis) -> int:
        return len(self.degrees) - 1 - list(self.degrees).index(axis.name)
