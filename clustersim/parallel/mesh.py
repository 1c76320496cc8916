"""Along which axes is work spread over ranks, and which ranks form a group?

An axis is one kind of parallelism; a mesh gives each of its axes a degree and numbers ranks along them, the
first axis fastest. Several meshes may lie over the same ranks, as attention's and the experts' do where both
are folded onto the same GPUs (Liu et al. 2025, arXiv:2504.14960). A `CommGroup` defines the process groups
for one purpose by a mesh and those of its axes along which their members differ: gradients, say, are reduced
over groups of `DP_GROUP`.

Hybrid sharding splits the data-parallel axis in two (`SHARD`, whose ranks are near each other, and
`REPLICATE`), so it has a mesh of its own. A new axis is one entry of `MESHES` (and of `COMM_GROUPS`, if it
communicates by itself) and its degree in `layout`; which ranks hold the same weights, the label of its
communication in a breakdown and its colour on pages follow from the entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of parallelism.

    label: text before "axis" or "communication"; category: colour category of its communication (`report.theme`);
    replicates_weights: its ranks hold the same weights; within_layer: its ranks communicate between the kernels
    of a layer; parent: the axis that it is a sub-axis of, by which results name it.
    """

    name: str
    label: str
    category: str
    replicates_weights: bool = False
    within_layer: bool = False
    parent: "Axis | None" = None

    @property
    def base_axis(self) -> "Axis":
        """Its parent axis, or itself."""
        return self.parent or self


TENSOR: Final = Axis("tp", "tensor-parallel", "tensor", within_layer=True)
CONTEXT: Final = Axis("cp", "context-parallel", "context", replicates_weights=True, within_layer=True)
CONTEXT_INNER: Final = Axis(
    "cp_inner", "context-parallel", "context", replicates_weights=True, within_layer=True, parent=CONTEXT
)
CONTEXT_OUTER: Final = Axis(
    "cp_outer", "context-parallel", "context", replicates_weights=True, within_layer=True, parent=CONTEXT
)
DATA: Final = Axis("dp", "data-parallel", "data", replicates_weights=True)
PIPELINE: Final = Axis("pp", "pipeline", "pipeline")
EXPERT: Final = Axis("ep", "expert-parallel", "expert", within_layer=True)
EXPERT_TENSOR: Final = Axis("etp", "tensor-parallel", "tensor", within_layer=True, parent=TENSOR)
EXPERT_DATA: Final = Axis("edp", "data-parallel", "data", replicates_weights=True, parent=DATA)
SHARD: Final = Axis("dp_shard", "data-parallel", "data", replicates_weights=True, parent=DATA)
REPLICATE: Final = Axis("dp_replicate", "data-parallel", "data", replicates_weights=True, parent=DATA)
EXPERT_SHARD: Final = Axis("edp_shard", "data-parallel", "data", replicates_weights=True, parent=DATA)
EXPERT_REPLICATE: Final = Axis("edp_replicate", "data-parallel", "data", replicates_weights=True, parent=DATA)
ENCODER_TENSOR: Final = Axis("encoder_tp", "tensor-parallel", "tensor", within_layer=True, parent=TENSOR)
ENCODER_IMAGES: Final = Axis("encoder_images", "tensor-parallel", "tensor", replicates_weights=True, parent=TENSOR)
ENCODER_DATA: Final = Axis("encoder_dp", "data-parallel", "data", replicates_weights=True, parent=DATA)
DENSE_MESH: Final = "dense"
"""The mesh of attention and of all weights that every token uses."""
HYBRID_MESH: Final = "hybrid"
"""The dense mesh where data parallelism shards weights over a subset of its ranks (HSDP)."""
CONTEXT_MESH: Final = "context"
"""The dense mesh where context parallelism has groups within groups."""
EXPERT_MESH: Final = "experts"
"""The mesh of experts, where it is not the dense one: expert tensor parallelism, then expert parallelism."""
HYBRID_EXPERT_MESH: Final = "hybrid experts"
"""The mesh of experts where data parallelism shards weights over a subset of its ranks (HSDP)."""
ENCODER_MESH: Final = "encoder"
"""The mesh of an encoder with degrees of its own: replicas that share the images of a sequence, and those of others."""
MESHES: Final[Mapping[str, tuple[Axis, ...]]] = MappingProxyType(
    {
        DENSE_MESH: (TENSOR, CONTEXT, DATA, PIPELINE),
        HYBRID_MESH: (TENSOR, CONTEXT, SHARD, REPLICATE, PIPELINE),
        CONTEXT_MESH: (TENSOR, CONTEXT_INNER, CONTEXT_OUTER, DATA, PIPELINE),
        EXPERT_MESH: (EXPERT_TENSOR, EXPERT, EXPERT_DATA, PIPELINE),
        HYBRID_EXPERT_MESH: (EXPERT_TENSOR, EXPERT, EXPERT_SHARD, EXPERT_REPLICATE, PIPELINE),
        ENCODER_MESH: (ENCODER_TENSOR, ENCODER_IMAGES, ENCODER_DATA, PIPELINE),
    }
)
"""The axes of every mesh, in the usual order of ranks; all meshes of a layout have the same number of ranks."""
BASE_AXES: Final = tuple(dict.fromkeys(axis for axes in MESHES.values() for axis in axes if axis.parent is None))
"""All axes without a parent, in the order of results."""
HOST_AXIS: Final = Axis("host", "host", "host")
"""Not an axis of a mesh: copies between each rank and its host, and what the host computes for it."""
COMM_AXES: Final = (*BASE_AXES, HOST_AXIS)
"""All axes that communication time is accounted to, in the order of results."""
DENSE_AXIS_NAMES: Final = tuple(axis.name for axis in MESHES[DENSE_MESH])
"""Names of the axes whose degrees multiply to the number of ranks; expert axes are folded onto the same ranks."""
DISPLAY_AXES: Final = (*(axis for axis in MESHES[DENSE_MESH] if axis is not DATA), DATA)
"""The dense mesh's axes in display order: first those that make up one replica of the model, then the replicas."""


class GroupSpan(Enum):
    """Which ranks that differ along a group's axes form one process group."""

    ALL = "all"
    EMBEDDING_RANKS = "tables"  # those that hold the embedding table
    NEXT = "next"  # each with the one after it, as sender and receiver
    PREVIOUS = "previous"  # each with the one before it
    COUNTERPART = "across"  # each with its counterpart in the pipeline of opposite direction
    FROM_ENCODER = "from the encoder"  # ranks of the encoder, then those of the model that need what they make
    TO_ENCODER = "to the encoder"  # the same, those of the model first


@dataclass(frozen=True, slots=True)
class CommGroup:
    """The process groups for one purpose.

    axes: along which members differ; accounted_axis: the axis that its communication time is accounted to; label:
    its name where it is distinguished from that axis; mesh: which of the layout's meshes.
    """

    name: str
    label: str
    axes: tuple[Axis, ...]
    accounted_axis: Axis
    span: GroupSpan = GroupSpan.ALL
    mesh: str = DENSE_MESH

    @property
    def is_p2p(self) -> bool:
        """Whether its groups are (sender, receiver) pairs."""
        return self.span in (GroupSpan.NEXT, GroupSpan.PREVIOUS, GroupSpan.COUNTERPART)

    @property
    def report_name(self) -> str:
        """Name under which results list its traffic: both directions of the pipeline are merged."""
        return self.accounted_axis.name if self.is_p2p else self.name

    @property
    def crosses_stages(self) -> bool:
        """Whether waiting for it means waiting for other pipeline stages."""
        return PIPELINE in self.axes


TP_GROUP: Final = CommGroup("tp", "tp", (TENSOR,), TENSOR)
CP_GROUP: Final = CommGroup("cp", "cp", (CONTEXT,), CONTEXT)
CP_INNER_GROUP: Final = CommGroup("cp_inner", "cp within groups", (CONTEXT_INNER,), CONTEXT, mesh=CONTEXT_MESH)
CP_OUTER_GROUP: Final = CommGroup("cp_outer", "cp across groups", (CONTEXT_OUTER,), CONTEXT, mesh=CONTEXT_MESH)
DP_GROUP: Final = CommGroup("dp", "dp", tuple(axis for axis in MESHES[DENSE_MESH] if axis.replicates_weights), DATA)
"""Ranks that hold the same weights (data-parallel group)."""
MODEL_PARALLEL_GROUP: Final = CommGroup(
    "model", "replica", tuple(axis for axis in MESHES[DENSE_MESH] if not axis.replicates_weights), DATA
)
"""Ranks that hold one copy of the weights together (Megatron's model-parallel group)."""
WORLD_GROUP: Final = CommGroup("world", "all ranks", MESHES[DENSE_MESH], DATA)
DP_SHARD_GROUP: Final = CommGroup("dp_shard", "dp within shards", (CONTEXT, SHARD), DATA, mesh=HYBRID_MESH)
"""Ranks over which weights are sharded in hybrid sharding."""
DP_REPLICATE_GROUP: Final = CommGroup("dp_replicate", "dp across replicas", (REPLICATE,), DATA, mesh=HYBRID_MESH)
"""Ranks that hold the same shard in hybrid sharding."""
SHARDED_REPLICA_GROUP: Final = CommGroup(
    "instance",
    "one sharded copy",
    tuple(axis for axis in MESHES[HYBRID_MESH] if axis is not REPLICATE),
    DATA,
    mesh=HYBRID_MESH,
)
"""Ranks that hold one sharded copy of all weights and optimizer states together in hybrid sharding."""
EP_GROUP: Final = CommGroup("ep", "ep", (EXPERT,), EXPERT, mesh=EXPERT_MESH)
"""Ranks that the experts are distributed over (expert-parallel group)."""
ETP_GROUP: Final = CommGroup("etp", "etp", (EXPERT_TENSOR,), EXPERT, mesh=EXPERT_MESH)
"""Ranks that each expert is sharded over (expert-tensor-parallel group)."""
ETP_EP_GROUP: Final = CommGroup("etp_ep", "ep and etp", (EXPERT_TENSOR, EXPERT), EXPERT, mesh=EXPERT_MESH)
"""Ranks that hold all experts together (EP x ETP)."""
EDP_GROUP: Final = CommGroup("edp", "dp of experts", (EXPERT_DATA,), DATA, mesh=EXPERT_MESH)
"""Ranks that hold the same experts (expert-data-parallel group)."""
EXPERT_MODEL_PARALLEL_GROUP: Final = CommGroup(
    "expert_model",
    "replica of experts",
    tuple(axis for axis in MESHES[EXPERT_MESH] if not axis.replicates_weights),
    DATA,
    mesh=EXPERT_MESH,
)
"""Ranks that hold one copy of all experts together."""
EDP_SHARD_GROUP: Final = CommGroup(
    "edp_shard", "dp of experts within shards", (EXPERT_SHARD,), DATA, mesh=HYBRID_EXPERT_MESH
)
EDP_REPLICATE_GROUP: Final = CommGroup(
    "edp_replicate", "dp of experts across replicas", (EXPERT_REPLICATE,), DATA, mesh=HYBRID_EXPERT_MESH
)
ENCODER_TP_GROUP: Final = CommGroup("encoder_tp", "tp of the encoder", (ENCODER_TENSOR,), TENSOR, mesh=ENCODER_MESH)
ENCODER_DP_GROUP: Final = CommGroup(
    "encoder_dp", "dp of the encoder", (ENCODER_IMAGES, ENCODER_DATA), DATA, mesh=ENCODER_MESH
)
"""Ranks that hold the same weights of the encoder."""
ENCODER_IMAGES_GROUP: Final = CommGroup("encoder_images", "images", (ENCODER_IMAGES,), TENSOR, mesh=ENCODER_MESH)
"""Replicas of the encoder that share the images of a sequence."""
FROM_ENCODER_GROUP: Final = CommGroup(
    "from_encoder", "encoder to model", (PIPELINE,), PIPELINE, GroupSpan.FROM_ENCODER, ENCODER_MESH
)
"""Ranks of an encoder with ranks of its own, and those of the model's first stage that they send tokens to."""
TO_ENCODER_GROUP: Final = CommGroup(
    "to_encoder", "model to encoder", (PIPELINE,), PIPELINE, GroupSpan.TO_ENCODER, ENCODER_MESH
)
EMBEDDING_GROUP: Final = CommGroup("embedding", "tied embeddings", (PIPELINE,), DATA, GroupSpan.EMBEDDING_RANKS)
"""Pipeline ranks that hold the embedding table, where it is tied to the output layer or shared with MTP layers."""
PP_NEXT_GROUP: Final = CommGroup("pp_next", "pp", (PIPELINE,), PIPELINE, GroupSpan.NEXT)
PP_PREVIOUS_GROUP: Final = CommGroup("pp_previous", "pp", (PIPELINE,), PIPELINE, GroupSpan.PREVIOUS)
PP_COUNTERPART_GROUP: Final = CommGroup("pp_across", "pp", (DATA, PIPELINE), PIPELINE, GroupSpan.COUNTERPART)
"""Ranks that hold the same stages for pipelines of opposite direction (DualPipe)."""
HOST_GROUP: Final = CommGroup("host", "host", (), HOST_AXIS)
"""Each rank with its host."""
LAUNCH_GROUP: Final = CommGroup("launch", "launches", (), HOST_AXIS)
"""Each rank with the thread that launches its kernels."""

COMM_GROUPS: Final[Mapping[str, CommGroup]] = MappingProxyType(
    {
        comm_group.name: comm_group
        for comm_group in (
            TP_GROUP,
            CP_GROUP,
            CP_INNER_GROUP,
            CP_OUTER_GROUP,
            DP_GROUP,
            DP_SHARD_GROUP,
            DP_REPLICATE_GROUP,
            EP_GROUP,
            ETP_GROUP,
            ETP_EP_GROUP,
            EDP_GROUP,
            EXPERT_MODEL_PARALLEL_GROUP,
            EDP_SHARD_GROUP,
            EDP_REPLICATE_GROUP,
            ENCODER_TP_GROUP,
            ENCODER_DP_GROUP,
            ENCODER_IMAGES_GROUP,
            FROM_ENCODER_GROUP,
            TO_ENCODER_GROUP,
            PP_NEXT_GROUP,
            PP_PREVIOUS_GROUP,
            PP_COUNTERPART_GROUP,
            EMBEDDING_GROUP,
            MODEL_PARALLEL_GROUP,
            SHARDED_REPLICA_GROUP,
            WORLD_GROUP,
            HOST_GROUP,
            LAUNCH_GROUP,
        )
    }
)
"""All groups by the name that `CommOp.comm_group` has."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with degrees over adjacent ranks. degrees: by axis name, the axis with adjacent ranks first.

    mirrored_axis: the data-parallel axis of a mesh of bidirectional pipeline pairs. The first half of its
    coordinates are on the first half of the ranks along the pipeline; the second half, on the counterpart ranks,
    count back from the last one. first_rank: 0, but behind the ranks of an encoder (Megatron-LM's
    `RankGenerator.rank_offset`).
    """

    degrees: Mapping[str, int]
    mirrored_axis: Axis | None = None
    first_rank: int = 0

    @property
    def size(self) -> int:
        """Number of ranks of the mesh."""
        return prod(self.degrees.values())

    @property
    def axis_strides(self) -> dict[str, tuple[int, int]]:
        """(degree, rank stride) of every axis.

        >>> Mesh({"tp": 2, "dp": 4}).axis_strides
        {'tp': (2, 1), 'dp': (4, 2)}
        """
        strides = np.cumprod([1, *self.degrees.values()]).tolist()
        return {name: (degree, stride) for (name, degree), stride in zip(self.degrees.items(), strides, strict=False)}

    @property
    def rank_grid(self) -> IntArray:
        """Ranks with one dimension for each axis, in reversed order: the axis with adjacent ranks is last.

        >>> Mesh({"dp": 4, "pp": 2}, mirrored_axis=DATA).rank_grid.tolist()
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        if self.mirrored_axis is None:
            ranks = np.arange(self.first_rank, self.first_rank + self.size, dtype=np.int64)
            return ranks.reshape([*self.degrees.values()][::-1])
        replica_count, pipeline_size = self.degrees[self.mirrored_axis.name], self.degrees[PIPELINE.name]
        paired_grid = Mesh(
            {**self.degrees, self.mirrored_axis.name: replica_count // 2, PIPELINE.name: 2 * pipeline_size}
        ).rank_grid
        first_half, second_half = np.split(paired_grid, 2, axis=self._dimension(PIPELINE))
        counterparts = np.flip(second_half, axis=self._dimension(PIPELINE))
        return np.concatenate([first_half, counterparts], axis=self._dimension(self.mirrored_axis))

    def rank_coordinates(self, axis: Axis) -> IntArray:
        """Coordinate of each of its ranks on one axis: [ranks of the mesh]."""
        grid, dimension = self.rank_grid, self._dimension(axis)
        coordinates = np.empty(self.size, dtype=np.int64)
        coordinates[grid - self.first_rank] = np.arange(grid.shape[dimension]).reshape(
            [-1] + [1] * (grid.ndim - 1 - dimension)
        )
        return coordinates

    def groups_along(self, *axes: Axis) -> IntArray:
        """Groups of the ranks that differ along these axes only, by coordinate: [groups, product of their degrees].

        >>> Mesh({"tp": 2, "dp": 2}).groups_along(DATA).tolist()
        [[0, 2], [1, 3]]
        """
        grid = self.rank_grid
        dimensions = sorted(self._dimension(axis) for axis in axes)
        transposed = np.moveaxis(grid, dimensions, range(grid.ndim - len(dimensions), grid.ndim))
        size = int(np.prod([grid.shape[dimension] for dimension in dimensions]))
        return np.ascontiguousarray(transposed.reshape(-1, size))

    def _dimension(self, axis: Axis) -> int:
        return len(self.degrees) - 1 - list(self.degrees).index(axis.name)
