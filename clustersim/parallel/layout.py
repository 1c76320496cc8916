"""How is the work spread over ranks?

A layout gives every axis of `mesh` its degree. `order` lists the axes from the one whose neighbours are adjacent ranks
to the one that is farthest apart.
"""

import math
from dataclasses import dataclass, field

from clustersim.parallel.data import DataParallelism, Replicated
from clustersim.parallel.mesh import DENSE, MESHES, NAMES, Mesh, Role
from clustersim.parallel.pipeline import Split


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. layers_per_stage: of each virtual stage in model order, or the rule that deals them.

    tensor_overlap: tensor-parallel collectives are pipelined in chunks with their neighbouring matmul;
    backward_overlap: backward's run beside the matmul of the gradient that does not need them (Megatron-LM since 2022);
    pipeline_overlap: a stage goes on computing while its output is sent (otherwise it waits for its sends).
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
        """All meshes that lie over the layout's ranks, by their names."""
        degrees = self.degrees
        made = {mesh: Mesh({axis.name: degrees[axis.name] for axis in axes}) for mesh, axes in MESHES.items()}
        return made | {DENSE: Mesh({name: degrees[name] for name in self.order})}
