"""Lowering of Dion: when the low-rank products of matrices are computed, summed and orthonormalized.

Of sharded weights as many equal matrices as there are ranks form a batch (`model.power_iteration`), whose four phases
are segments with a collective between each: partial products are reduce-scattered, orthonormal ones all-gathered, norms
of columns summed. A few batches are worked on in turns, so that the collectives of one overlap the phases of others
(microsoft/dion, `AsyncRuntime`, max_concurrent_tasks 3), unless `overlap` is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.lowering.overheads import matrix_operations
from clustersim.lowering.program_builder import RankProgramBuilder
from clustersim.model.optimizers import Dion
from clustersim.model.power_iteration import PowerIteration, power_iteration
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.matrix_owners import count_matrices, unit_matrices
from clustersim.parallel.mesh import CommGroup
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.program.task import CollectiveType, CommOp, Operation

_CONCURRENT: Final = 3


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase of the iteration: its kernels, and the collective that the next phase waits for, if any."""

    name: str
    operations: tuple[Operation, ...]
    comm_op: CommOp | None = None


@dataclass(frozen=True, slots=True)
class DionLowering:
    """Updates the matrices of one rank. after: the task that has added the gradients to the momentum."""

    builder: RankProgramBuilder
    dion: Dion
    after: int

    def add_group(self, group: ParameterGroup, stages: Sequence[PipelineStage]) -> None:
        """Update the matrices of a parameter group, batch by batch."""
        plan = self.builder.plan
        layers = [unit_matrices(plan.layout, unit, group.name) for stage in stages for unit in plan.stage_units(stage)]
        counts = count_matrices(shared for unit in layers for shared in unit)
        sharing = group.shard_group if group.shard_count > 1 else None
        for shared, total in sorted(counts.items()):
            if sharing is None:
                self._add_whole(shared.matrix, total, group)
            else:
                self._add_shards(shared.matrix, total, group, sharing)

    def _add_whole(self, matrix: WeightMatrix, total: int, group: ParameterGroup) -> None:
        """Update matrices that this rank has, one after the other."""
        phases = _phases(power_iteration(matrix, self.dion, group.formats, ranks=1, orthonormalized=1), None)
        operations = [operation for phase in phases for operation in phase.operations]
        self.builder.add_repeated_standalone(
            f"update {matrix.outputs} x {matrix.inputs}", operations, (self.after,), total
        )

    def _add_shards(self, matrix: WeightMatrix, total: int, group: ParameterGroup, sharing: CommGroup) -> None:
        """Update matrices of which this rank has a shard each, a few batches in turns."""
        ranks, width = group.shard_count, _CONCURRENT if self.dion.overlap else 1
        sizes = [ranks] * (total // ranks) + [total % ranks] * bool(total % ranks)
        iterations = [
            power_iteration(replace(matrix, count=size), self.dion, group.formats, ranks=ranks, orthonormalized=1)
            for size in sizes
        ]
        for first in range(0, len(iterations), width):
            self._add_turn([_phases(iteration, sharing) for iteration in iterations[first : first + width]])

    def _add_turn(self, batches: Sequence[Sequence[_Phase]]) -> None:
        """The first phase of all batches, then the second, and so on."""
        waits: list[tuple[int, ...]] = [(self.after,)] * len(batches)
        for phases in zip(*batches, strict=True):
            for index, phase in enumerate(phases):
                task = self.builder.add_standalone(phase.name, [*phase.operations], waits[index])
                sent = () if phase.comm_op is None else (self.builder.add_dp_collective(phase.comm_op, [task]),)
                waits[index] = sent


def _phases(iteration: PowerIteration, sharing: CommGroup | None) -> list[_Phase]:
    """The four phases of an iteration, with what the ranks of a group exchange between them."""
    momentum, product = iteration.formats.moments, iteration.product_bytes
    exchanged: dict[str, tuple[CollectiveType, float, DType | None]] = {
        "project momentum": (CollectiveType.REDUCE_SCATTER, product, momentum),
        "orthonormalize": (CollectiveType.ALL_GATHER, product, None),
        "feed error back": (CollectiveType.ALL_REDUCE, iteration.norm_bytes, DType.FP32),
    }
    kernels = {
        "project momentum": iteration.project(),
        "orthonormalize": iteration.orthonormalize(),
        "feed error back": iteration.update(),
        "update matrices": iteration.apply(),
    }
    phases: list[_Phase] = []
    for name, phase in kernels.items():
        comm_op = None
        if sharing is not None and name in exchanged:
            collective, size, reduced = exchanged[name]
            comm_op = CommOp(f"products: {name}", collective, sharing.name, size, reduce_dtype=reduced)
        phases.append(_Phase(name, tuple(matrix_operations(phase)), comm_op))
    return phases
