"""How is the work spread over ranks?

A layout gives every axis of `mesh` its degree. `order` lists the axes from the one whose neighbours are
adjacent ranks to the one whose neighbours are farthest apart. Where data parallelism shards weights over a
subset of its ranks (hybrid sharding), those are neighbours on the data-parallel axis, and the
context-parallel ranks are among them, as in torchtitan's `dp_shard_cp` mesh and Megatron-LM's partial
data-parallel groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.pickling import FieldPickling
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, GradientSync
from clustersim.parallel.layer_partition import LayerPartition
from clustersim.parallel.mesh import (
    BASE_AXES,
    CONTEXT_INNER,
    CONTEXT_MESH,
    CONTEXT_OUTER,
    DATA,
    DENSE_AXIS_NAMES,
    DENSE_MESH,
    ENCODER_DATA,
    ENCODER_IMAGES,
    ENCODER_MESH,
    ENCODER_TENSOR,
    ENCODER_TP_GROUP,
    EXPERT,
    EXPERT_DATA,
    EXPERT_MESH,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    EXPERT_TENSOR,
    HYBRID_EXPERT_MESH,
    HYBRID_MESH,
    MESHES,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    TP_GROUP,
    Axis,
    CommGroup,
    Mesh,
)
from clustersim.program.task import TokenDispatcher


def count_encoder_ranks(tp: int, encoder_tp: int | None, encoder_dp: int | None) -> int:
    """Number of ranks that an encoder has besides the model's, by degrees of parallelism; 0 without an encoder_dp."""
    return 0 if encoder_dp is None else (encoder_tp or tp) * encoder_dp


@dataclass(frozen=True)
class Layout(FieldPickling):
    """Degrees of parallelism.

    layers_per_stage: of each virtual stage in model order, or the rule that partitions them.

    cp_kind: what context-parallel ranks exchange; cp_inner: ranks of their inner groups, where they have any;
    cp_balanced: each rank has a chunk from the front of a causal sequence and its mirror chunk from the back (zigzag),
    else consecutive tokens. ep: number of ranks over which the experts of a MoE layer are distributed; etp: over which
    each expert is sharded (None: tp), both folded onto the ranks of tp, cp and dp; encoder_tp: over which an encoder is
    sharded, whose replicas share the images of a sequence (None: tp, and all ranks of cp have all images); encoder_dp:
    replicas of an encoder that is the first pipeline rank, which then has as many ranks as it needs (None: as the
    others); is_encoder: it is the layout of such an encoder; dispatcher: token dispatcher;
    dispatcher_num_sms: SMs that its kernels use (None: the default). tp_comm_overlap: tensor-parallel
    collectives are pipelined in chunks with their neighbouring matmul; async_tensor_model_parallel_allreduce:
    backward's collectives overlap the matmul of the gradient that does not need them (Megatron-LM since 2022);
    overlap_p2p_comm: a stage continues computing while its output is sent (otherwise it waits for its sends);
    overlap_moe_expert_parallel_comm: dispatch and combine of a forward overlap the compute of another
    microbatch's backward, and vice versa; delay_wgrad_compute: that backward's weight gradients are computed
    after its sends; moe_shared_expert_overlap: shared experts run while the tokens of the same pass travel;
    mirrored: bidirectional pipelines (DualPipe), each direction with a copy of the weights; pp and dp are then
    those of one pipeline on half the ranks of the pair (`as_configured` has the user's values);
    deallocate_pipeline_outputs: a stage's output is freed once it is sent, where otherwise autograd's graph
    holds it until its backward (Megatron-LM's `deallocate_pipeline_outputs`; Llama 3, arXiv:2407.21783, section
    3.3.2).
    """

    tp: int = 1
    cp: int = 1
    cp_kind: ContextParallelKind = ContextParallelKind.RING
    cp_inner: int | None = None
    cp_balanced: bool = True
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    encoder_tp: int | None = None
    encoder_dp: int | None = None
    is_encoder: bool = False
    dispatcher: TokenDispatcher = TokenDispatcher.ALL_TO_ALL
    dispatcher_num_sms: int | None = None
    order: tuple[str, ...] = tuple(axis.name for axis in MESHES[DENSE_MESH])
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    overlap_p2p_comm: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    moe_shared_expert_overlap: bool = False
    mirrored: bool = False
    deallocate_pipeline_outputs: bool = True
    data: DataParallelStrategy = field(default_factory=DdpStrategy)
    layers_per_stage: LayerPartition = None

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.encoder_ranks + self.mesh.size

    @property
    def encoder_ranks(self) -> int:
        """Number of ranks that an encoder has besides the model's (0: it has some of them)."""
        return count_encoder_ranks(self.tp, self.encoder_tp, self.encoder_dp)

    @property
    def encoder_cells(self) -> int:
        """Number of sets of replicas of the model that share replicas of an encoder on ranks of its own.

        As many as both can be dealt out to evenly (the brokers of DistTrain, Zhang et al. 2024, arXiv:2408.04275).
        """
        return self.dp if self.encoder_dp is None else math.gcd(self.dp, self.encoder_dp)

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of one replica of the model, without those that only an encoder has."""
        return self.mesh.size // self.dp

    def ranks_at(self, pipeline_rank: int) -> int:
        """Number of ranks with this pipeline coordinate."""
        if self.encoder_ranks and pipeline_rank == 0:
            return self.encoder_ranks
        return self.tp * self.cp * self.dp

    @property
    def as_configured(self) -> "Layout":
        """The layout as users configure it: two bidirectional pipelines count as one pipeline on all its ranks."""
        return replace(self, pp=2 * self.pp, dp=self.dp // 2, mirrored=False) if self.mirrored else self

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the dense mesh's axes by name, in the usual order; their product is the number of ranks."""
        return {name: getattr(self, name) for name in DENSE_AXIS_NAMES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """Degree of every axis by name."""
        return self.degrees | {EXPERT.name: self.ep}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Base axes of the layout's ranks, in the order of results."""
        return tuple(axis for axis in BASE_AXES if axis is not EXPERT or self.has_expert_mesh)

    @property
    def effective_etp(self) -> int:
        """Number of ranks over which each expert is sharded."""
        return self.tp if self.etp is None else self.etp

    @property
    def effective_encoder_tp(self) -> int:
        """Number of ranks over which an encoder is sharded."""
        return self.tp if self.encoder_tp is None else self.encoder_tp

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts have a mesh of their own."""
        return self.ep > 1 or self.effective_etp != self.tp

    @property
    def tp_group(self) -> CommGroup:
        """The groups of tensor-parallel ranks."""
        return ENCODER_TP_GROUP if self.is_encoder else TP_GROUP

    @property
    def image_shares(self) -> int:
        """Replicas of an encoder that share images (1: there is one, or each has all of them)."""
        if self.encoder_dp is not None:
            return self.encoder_dp // self.encoder_cells
        return 1 if self.encoder_tp is None else max(1, self.tp * self.cp // self.encoder_tp)

    @property
    def has_encoder_mesh(self) -> bool:
        """Whether an encoder has a mesh of its own."""
        return self.image_shares > 1 or self.encoder_dp is not None

    @property
    def encoder_layout(self) -> "Layout":
        """The layout of an encoder, which knows no sequence and context parallelism."""
        unfolded = replace(self, cp=1, dp=self.dp * self.cp, sequence_parallel=False, encoder_tp=None, encoder_dp=None)
        if not self.has_encoder_mesh:
            return unfolded
        tp = self.effective_encoder_tp
        return replace(unfolded, tp=tp, dp=self.encoder_dp or self.tp * self.cp * self.dp // tp, is_encoder=True)

    @property
    def exchanging_ranks(self) -> int:
        """Context-parallel ranks that exchange tokens for heads around attention (1: none)."""
        match self.cp_kind:
            case ContextParallelKind.ULYSSES:
                return self.cp
            case ContextParallelKind.TWO_DIMENSIONAL:
                return self.inner_ranks
        return 1

    @property
    def inner_ranks(self) -> int:
        """Ranks of an inner group of context parallelism (1: there are none)."""
        return (self.cp_inner or 1) if self.cp > 1 and self.cp_kind.has_groups else 1

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are spread over several pipeline ranks."""
        return self.pp > 1

    @property
    def gradient_sync(self) -> GradientSync:
        """When gradients are reduced."""
        return self.data.gradient_sync(is_pipelined=self.is_pipelined)

    @property
    def is_hybrid_sharded(self) -> bool:
        """Whether weights or states are sharded over a strict subset of the ranks that hold the same weights (HSDP)."""
        return self.data.shard_size not in (None, self.cp * self.dp)

    def group_size(self, comm_group: CommGroup) -> int:
        """Number of ranks along the axes of a group."""
        degrees = self.meshes[comm_group.mesh].degrees
        return math.prod(degrees[axis.name] for axis in comm_group.axes)

    @property
    def mesh(self) -> Mesh:
        """The dense mesh."""
        return self.meshes[DENSE_MESH]

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        """All meshes over the layout's ranks, by name; sub-axes take their parent's position in the order.

        All have the same ranks, but that of an encoder on ranks of its own, which are before the others.
        """
        degrees = self.degrees | self._sub_axis_degrees
        is_present = {
            DENSE_MESH: True,
            HYBRID_MESH: self.is_hybrid_sharded,
            CONTEXT_MESH: self.inner_ranks > 1,
            EXPERT_MESH: self.has_expert_mesh,
            HYBRID_EXPERT_MESH: self.is_hybrid_sharded and self.has_expert_mesh,
            ENCODER_MESH: self.has_encoder_mesh,
        }
        return {
            mesh: Mesh(
                {axis.name: self._mesh_degree(mesh, degrees, axis) for axis in self._ordered_axes(axes)},
                self._mirrored_axis(axes),
                0 if mesh == ENCODER_MESH else self.encoder_ranks,
            )
            for mesh, axes in MESHES.items()
            if is_present[mesh]
        }

    def _mesh_degree(self, mesh: str, degrees: dict[str, int], axis: Axis) -> int:
        """Degree of an axis in a mesh: an encoder on ranks of its own is a pipeline rank that no other mesh has."""
        if axis is not PIPELINE or not self.encoder_ranks:
            return degrees[axis.name]
        return 1 if mesh == ENCODER_MESH else self.pp - 1

    def rank_coordinates(self, axis: Axis) -> IntArray:
        """Coordinate of every rank on a base axis: [ranks]; 0 on one that the layout does not have."""
        coordinates = np.zeros(self.world_size, dtype=np.int64)
        meshes = (candidate for candidate in self.meshes.values() if axis.name in candidate.degrees)
        if (mesh := next(meshes, None)) is not None:
            behind_encoder = int(axis is PIPELINE and self.encoder_ranks > 0)
            coordinates[mesh.first_rank :] = behind_encoder + mesh.rank_coordinates(axis)
        if self.encoder_ranks and axis in (TENSOR, DATA):
            replica, shard = np.divmod(np.arange(self.encoder_ranks), self.effective_encoder_tp)
            coordinates[: self.encoder_ranks] = shard if axis is TENSOR else replica
        return coordinates

    def _ordered_axes(self, axes: tuple[Axis, ...]) -> Sequence[Axis]:
        """The axes of a mesh in the layout's order; a mesh with axes that are not in it keeps its own order."""
        positions = {name: position for position, name in enumerate(self.order)}
        if not all(axis.base_axis.name in positions for axis in axes):
            return axes
        return sorted(axes, key=lambda axis: positions[axis.base_axis.name])

    def _mirrored_axis(self, axes: tuple[Axis, ...]) -> Axis | None:
        """The axis of a mesh whose second half belongs to the pipelines of opposite direction."""
        data_axes = (axis for axis in axes if axis.base_axis is DATA and axis not in (SHARD, EXPERT_SHARD))
        return next(data_axes) if self.mirrored else None

    @property
    def _sub_axis_degrees(self) -> dict[str, int]:
        """Degrees of the axes of experts and encoder, and of the data-parallel sub-axes of hybrid sharding."""
        etp = self.effective_etp
        expert_dp = max(1, self.tp * self.cp * self.dp // (etp * self.ep))
        sub_degrees = {EXPERT_TENSOR.name: etp, EXPERT.name: self.ep, EXPERT_DATA.name: expert_dp}
        sub_degrees |= {
            ENCODER_TENSOR.name: self.effective_encoder_tp,
            ENCODER_IMAGES.name: self.image_shares,
            ENCODER_DATA.name: self.encoder_cells,
        }
        sub_degrees |= {CONTEXT_INNER.name: self.inner_ranks, CONTEXT_OUTER.name: self.cp // self.inner_ranks}
        if not self.is_hybrid_sharded:
            return sub_degrees
        shard = max(1, (self.data.shard_size or 1) // self.cp)
        replicas = max(1, self.dp // shard)
        sub_degrees |= {SHARD.name: shard, REPLICATE.name: replicas}
        return sub_degrees | {EXPERT_SHARD.name: max(1, expert_dp // replicas), EXPERT_REPLICATE.name: replicas}
