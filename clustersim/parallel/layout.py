"""How is the work spread over ranks?

A layout gives every axis of `mesh` its degree. `order` lists the axes from the one whose neighbours are adjacent ranks
to the one that is farthest apart. Where data parallelism shards weights over some of its ranks only (hybrid sharding),
those are neighbours on the data-parallel axis, and the context-parallel ranks are among them, as in torchtitan's
`dp_shard_cp` mesh and Megatron-LM's partial data-parallel groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from clustersim.parallel.data import DataParallelism, GradientSync, Replicated
from clustersim.parallel.mesh import DENSE, HYBRID, MESHES, NAMES, REPLICATE, SHARD, Axis, Mesh, Role
from clustersim.parallel.pipeline import Split


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. layers_per_stage: of each virtual stage in model order, or the rule that deals them.

    tensor_overlap: tensor-parallel collectives are pipelined in chunks with their neighbouring matmul;
    backward_overlap: backward's run beside the matmul of the gradient that does not need them (Megatron-LM since 2022);
    pipeline_overlap: a stage goes on computing while its output is sent (otherwise it waits for its sends);
    release_outputs: what a stage has sent is freed, where otherwise autograd's graph holds it until its backward
    (Megatron-LM's `deallocate_pipeline_outputs`; Llama 3, arXiv:2407.21783, section 3.3.2).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = tuple(axis.name for axis in MESHES[DENSE])
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    release_outputs: bool = True
    data: DataParallelism = field(default_factory=Replicated)
    layers_per_stage: Split = None

    @property
    def world(self) -> int:
        """How many ranks the layout needs."""
        return self.mesh.size

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of every axis by its name, in the usual order of axes."""
        return {name: getattr(self, name) for name in NAMES}

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

    @property
    def meshes(self) -> dict[str, Mesh]:
        """All meshes that lie over the layout's ranks, by their names; the parts of an axis lie in its place."""
        degrees = self.degrees | self._parts
        return {
            mesh: Mesh({axis.name: degrees[axis.name] for axis in self._ordered(axes)})
            for mesh, axes in MESHES.items()
            if mesh != HYBRID or self.hybrid
        }

    def _ordered(self, axes: tuple[Axis, ...]) -> Sequence[Axis]:
        """The axes of a mesh as the layout orders them; a mesh that has others keeps its own order."""
        places = {name: place for place, name in enumerate(self.order)}
        if not all(axis.whole.name in places for axis in axes):
            return axes
        return sorted(axes, key=lambda axis: places[axis.whole.name])

    @property
    def _parts(self) -> dict[str, int]:
        """Degrees of the parts of the data-parallel axis, where there are any."""
        if not self.hybrid:
            return {}
        shard = max(1, (self.data.within or 1) // self.cp)
        return {SHARD.name: shard, REPLICATE.name: self.dp // shard}
