"""How is the work spread over ranks?

A layout gives every axis of `mesh` its degree. `order` lists the axes from the one whose neighbours are adjacent ranks
to the one that is farthest apart. Where data parallelism shards weights over some of its ranks only (hybrid sharding),
those are neighbours on the data-parallel axis, and the context-parallel ranks are among them, as in torchtitan's
`dp_shard_cp` mesh and Megatron-LM's partial data-parallel groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.pickling import FieldPickling
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, GradientSync
from clustersim.parallel.layer_partition import LayerPartition
from clustersim.parallel.mesh import (
    BASE_AXES,
    DATA,
    DENSE_AXIS_NAMES,
    DENSE_MESH,
    EXPERT,
    EXPERT_DATA,
    EXPERT_MESH,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    EXPERT_TENSOR,
    HYBRID_EXPERT_MESH,
    HYBRID_MESH,
    MESHES,
    REPLICATE,
    SHARD,
    Axis,
    CommGroup,
    Mesh,
)
from clustersim.program.task import TokenDispatcher


@dataclass(frozen=True)
class Layout(FieldPickling):
    """Degrees of parallelism. layers_per_stage: of each virtual stage in model order, or the rule that deals them.

    ep: over how many ranks the experts of a mixture are spread; etp: over how many each of them is cut (None: tp), both
    folded onto the ranks of tp, cp and dp; dispatcher: how tokens travel to their experts and back; dispatcher_sms:
    multiprocessors that its kernels take (None: as many as usual).
    tensor_overlap: tensor-parallel collectives are pipelined in chunks with their neighbouring matmul;
    backward_overlap: backward's run beside the matmul of the gradient that does not need them (Megatron-LM since 2022);
    pipeline_overlap: a stage goes on computing while its output is sent (otherwise it waits for its sends);
    overlap_expert_communication: tokens of a forward travel to experts and back while a backward beside it computes,
    and the other way round; delay_wgrad: that backward's gradients of weights come behind what it sends;
    overlap_shared_experts: shared experts run while the pass's own tokens travel;
    mirrored: pipelines are in pairs that run towards each other (DualPipe), each with a copy of the weights; pp and dp
    are then those of a pipeline with half the ranks of the pair (`written` has what people say);
    release_outputs: what a stage has sent is freed, where otherwise autograd's graph holds it until its backward
    (Megatron-LM's `deallocate_pipeline_outputs`; Llama 3, arXiv:2407.21783, section 3.3.2).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dispatcher: TokenDispatcher = TokenDispatcher.ALL_TO_ALL
    dispatcher_sms: int | None = None
    order: tuple[str, ...] = tuple(axis.name for axis in MESHES[DENSE_MESH])
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    overlap_expert_communication: bool = False
    delay_wgrad: bool = False
    overlap_shared_experts: bool = False
    mirrored: bool = False
    release_outputs: bool = True
    data: DataParallelStrategy = field(default_factory=DdpStrategy)
    layers_per_stage: LayerPartition = None

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.mesh.size

    @property
    def as_configured(self) -> "Layout":
        """The layout as people say it: a pair of pipelines that run towards each other is one, of all of its ranks."""
        return replace(self, pp=2 * self.pp, dp=self.dp // 2, mirrored=False) if self.mirrored else self

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that make up all ranks, by the names of their axes in the usual order."""
        return {name: getattr(self, name) for name in DENSE_AXIS_NAMES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """The degree of every axis by its name."""
        return self.degrees | {EXPERT.name: self.ep}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The whole axes that the layout's ranks lie on, in the order of answers."""
        return tuple(axis for axis in BASE_AXES if axis is not EXPERT or self.has_expert_mesh)

    @property
    def effective_etp(self) -> int:
        """Over how many ranks each expert is cut."""
        return self.tp if self.etp is None else self.etp

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts are spread over ranks in another way than what every token meets."""
        return self.ep > 1 or self.effective_etp != self.tp

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are spread over pipeline ranks."""
        return self.pp > 1

    @property
    def gradient_sync(self) -> GradientSync:
        """When gradients are reduced."""
        return self.data.gradient_sync(is_pipelined=self.is_pipelined)

    @property
    def is_hybrid_sharded(self) -> bool:
        """Whether some of the ranks that hold the same weights share them out among themselves only."""
        return self.data.shard_size not in (None, self.cp * self.dp)

    def group_size(self, comm_group: CommGroup) -> int:
        """How many ranks a group of a role has that holds all who differ along its axes."""
        degrees = self.meshes[comm_group.mesh].degrees
        return math.prod(degrees[axis.name] for axis in comm_group.axes)

    @property
    def mesh(self) -> Mesh:
        """The layout's ranks along its axes."""
        return self.meshes[DENSE_MESH]

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        """All meshes that lie over the layout's ranks, by their names; the parts of an axis lie in its place."""
        degrees = self.degrees | self._sub_axis_degrees
        is_present = {
            DENSE_MESH: True,
            HYBRID_MESH: self.is_hybrid_sharded,
            EXPERT_MESH: self.has_expert_mesh,
            HYBRID_EXPERT_MESH: self.is_hybrid_sharded and self.has_expert_mesh,
        }
        return {
            mesh: Mesh({axis.name: degrees[axis.name] for axis in self._ordered_axes(axes)}, self._mirrored_axis(axes))
            for mesh, axes in MESHES.items()
            if is_present[mesh]
        }

    def rank_coordinates(self, axis: Axis) -> IntArray:
        """Coordinate of every rank on a whole axis: [ranks]; 0 on one that the layout does not have."""
        meshes = (candidate for candidate in self.meshes.values() if axis.name in candidate.degrees)
        mesh = next(meshes, None)
        return np.zeros(self.world_size, dtype=np.int64) if mesh is None else mesh.rank_coordinates(axis)

    def _ordered_axes(self, axes: tuple[Axis, ...]) -> Sequence[Axis]:
        """The axes of a mesh as the layout orders them; a mesh that has others keeps its own order."""
        positions = {name: position for position, name in enumerate(self.order)}
        if not all(axis.base_axis.name in positions for axis in axes):
            return axes
        return sorted(axes, key=lambda axis: positions[axis.base_axis.name])

    def _mirrored_axis(self, axes: tuple[Axis, ...]) -> Axis | None:
        """The axis of a mesh whose second half is of pipelines that run the other way."""
        data_axes = (axis for axis in axes if axis.base_axis is DATA and axis not in (SHARD, EXPERT_SHARD))
        return next(data_axes) if self.mirrored else None

    @property
    def _sub_axis_degrees(self) -> dict[str, int]:
        """Degrees of the axes of experts, and of the parts of data-parallel axes, where there are any."""
        etp = self.effective_etp
        expert_dp = max(1, self.tp * self.cp * self.dp // (etp * self.ep))
        sub_degrees = {EXPERT_TENSOR.name: etp, EXPERT.name: self.ep, EXPERT_DATA.name: expert_dp}
        if not self.is_hybrid_sharded:
            return sub_degrees
        shard = max(1, (self.data.shard_size or 1) // self.cp)
        replicas = max(1, self.dp // shard)
        sub_degrees |= {SHARD.name: shard, REPLICATE.name: replicas}
        return sub_degrees | {EXPERT_SHARD.name: max(1, expert_dp // replicas), EXPERT_REPLICATE.name: replicas}
