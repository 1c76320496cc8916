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
from clustersim.common.pickling import FieldState
from clustersim.parallel.data_parallel_strategy import DataParallelism, DdpStrategy, GradientSync
from clustersim.parallel.layer_partition import Split
from clustersim.parallel.mesh import (
    AXES,
    DATA,
    DENSE,
    EXPERT,
    EXPERT_DATA,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    EXPERT_TENSOR,
    EXPERTS,
    HYBRID,
    HYBRID_EXPERTS,
    MESHES,
    NAMES,
    REPLICATE,
    SHARD,
    Axis,
    Mesh,
    Role,
)
from clustersim.program.task import TokenDispatcher


@dataclass(frozen=True)
class Layout(FieldState):
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
    order: tuple[str, ...] = tuple(axis.name for axis in MESHES[DENSE])
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    overlap_expert_communication: bool = False
    delay_wgrad: bool = False
    overlap_shared_experts: bool = False
    mirrored: bool = False
    release_outputs: bool = True
    data: DataParallelism = field(default_factory=DdpStrategy)
    layers_per_stage: Split = None

    @property
    def world(self) -> int:
        """How many ranks the layout needs."""
        return self.mesh.size

    @property
    def written(self) -> "Layout":
        """The layout as people say it: a pair of pipelines that run towards each other is one, of all of its ranks."""
        return replace(self, pp=2 * self.pp, dp=self.dp // 2, mirrored=False) if self.mirrored else self

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that make up all ranks, by the names of their axes in the usual order."""
        return {name: getattr(self, name) for name in NAMES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """The degree of every axis by its name."""
        return self.degrees | {EXPERT.name: self.ep}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The whole axes that the layout's ranks lie on, in the order of answers."""
        return tuple(axis for axis in AXES if axis is not EXPERT or self.folded)

    @property
    def expert_tensor(self) -> int:
        """Over how many ranks each expert is cut."""
        return self.tp if self.etp is None else self.etp

    @property
    def folded(self) -> bool:
        """Whether experts are spread over ranks in another way than what every token meets."""
        return self.ep > 1 or self.expert_tensor != self.tp

    @property
    def pipelined(self) -> bool:
        """Whether layers are spread over pipeline ranks."""
        return self.pp > 1

    @property
    def gradient_sync(self) -> GradientSync:
        """When gradients are reduced."""
        return self.data.sync(pipelined=self.pipelined)

    @property
    def hybrid(self) -> bool:
        """Whether some of the ranks that hold the same weights share them out among themselves only."""
        return self.data.within not in (None, self.cp * self.dp)

    def size_of(self, role: Role) -> int:
        """How many ranks a group of a role has that holds all who differ along its axes."""
        degrees = self.meshes[role.mesh].degrees
        return math.prod(degrees[axis.name] for axis in role.axes)

    @property
    def mesh(self) -> Mesh:
        """The layout's ranks along its axes."""
        return self.meshes[DENSE]

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        """All meshes that lie over the layout's ranks, by their names; the parts of an axis lie in its place."""
        degrees = self.degrees | self._parts
        there = {DENSE: True, HYBRID: self.hybrid, EXPERTS: self.folded, HYBRID_EXPERTS: self.hybrid and self.folded}
        return {
            mesh: Mesh({axis.name: degrees[axis.name] for axis in self._ordered(axes)}, self._opposite(axes))
            for mesh, axes in MESHES.items()
            if there[mesh]
        }

    def coordinate(self, axis: Axis) -> IntArray:
        """Coordinate of every rank on a whole axis: [ranks]; 0 on one that the layout does not have."""
        meshes = (mesh for mesh in self.meshes.values() if axis.name in mesh.degrees)
        found = next(meshes, None)
        return np.zeros(self.world, dtype=np.int64) if found is None else found.coordinate(axis)

    def _ordered(self, axes: tuple[Axis, ...]) -> Sequence[Axis]:
        """The axes of a mesh as the layout orders them; a mesh that has others keeps its own order."""
        places = {name: place for place, name in enumerate(self.order)}
        if not all(axis.whole.name in places for axis in axes):
            return axes
        return sorted(axes, key=lambda axis: places[axis.whole.name])

    def _opposite(self, axes: tuple[Axis, ...]) -> Axis | None:
        """The axis of a mesh whose second half is of pipelines that run the other way."""
        data = (axis for axis in axes if axis.whole is DATA and axis not in (SHARD, EXPERT_SHARD))
        return next(data) if self.mirrored else None

    @property
    def _parts(self) -> dict[str, int]:
        """Degrees of the axes of experts, and of the parts of data-parallel axes, where there are any."""
        cut = self.expert_tensor
        same = max(1, self.tp * self.cp * self.dp // (cut * self.ep))
        parts = {EXPERT_TENSOR.name: cut, EXPERT.name: self.ep, EXPERT_DATA.name: same}
        if not self.hybrid:
            return parts
        shard = max(1, (self.data.within or 1) // self.cp)
        replicas = max(1, self.dp // shard)
        parts |= {SHARD.name: shard, REPLICATE.name: replicas}
        return parts | {EXPERT_SHARD.name: max(1, same // replicas), EXPERT_REPLICATE.name: replicas}
