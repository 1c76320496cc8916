"""How is the work spread over ranks?

A layout is a mesh of axes with degrees: tensor (tp), context (cp), data (dp) and pipeline (pp). `order` lists the axes
from the one whose neighbours are adjacent ranks to the one that is farthest apart.
"""

from dataclasses import dataclass, field

from clustersim.parallel.data import DataParallelism, Replicated

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. layers_per_stage: layers of each virtual stage in model order, or None for an even split.

    tensor_overlap: tensor-parallel collectives are pipelined in chunks with their neighbouring matmul;
    backward_overlap: backward's run beside the matmul of the gradient that does not need them (Megatron-LM since 2022);
    pipeline_overlap: a stage goes on computing while its output is sent (otherwise it waits for its sends).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = AXES
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    data: DataParallelism = field(default_factory=Replicated)
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        """How many ranks the layout needs."""
        return self.tp * self.cp * self.dp * self.pp
