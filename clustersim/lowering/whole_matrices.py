"""Lowering of Muon and SOAP: when whole matrices are gathered, orthogonalized (or updated) and sent back.

The momentum of all matrices is updated in one segment, their weights in another; between them each matrix's
Newton-Schulz iteration is a segment of its own, matrix after matrix on the compute stream. Where ranks exchange
matrices (`MuonDistribution`), the communication of one overlaps the iteration of the one before, unless `overlap`
is off; nothing is gathered further ahead, as it takes memory. Matrices that tensor-parallel ranks share are exchanged
inside the segment, which waits for it (`newton_schulz_tp` in NVIDIA-NeMo/Emerging-Optimizers). SOAP's step of a matrix
takes the place of the iteration, on the rank that has it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clustersim.common.units import Bytes
from clustersim.lowering.matrix_batches import exchange_rounds, in_batches
from clustersim.lowering.overheads import matrix_operations
from clustersim.lowering.program_builder import RankProgramBuilder
from clustersim.model.newton_schulz import product_kernel, shared_iteration, update_kernels
from clustersim.model.optimizers import Muon, MuonDistribution, Soap
from clustersim.model.soap import matrix_kernels
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.matrix_owners import (
    SharedMatrix,
    busiest_owner,
    busiest_slice,
    count_matrices,
    unit_matrices,
)
from clustersim.parallel.mesh import CommGroup
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.program.task import CollectiveType, CommOp, Operation, WorkType

_ITERATE_BYTES = 2.0  # BF16, in which matrices are exchanged
_AHEAD = 2  # a matrix is sent for while the one before is orthogonalized


@dataclass(slots=True)
class WholeMatrixLowering:
    """Updates the matrices of one rank.

    after: the task that has updated the momentum; _computed: the last compute task of each exchange so far; sent: tasks
    that return orthogonal matrices, which the update of the weights waits for.
    """

    builder: RankProgramBuilder
    optimizer: Muon | Soap
    after: int
    sent: list[int] = field(default_factory=list)
    _computed: list[int] = field(default_factory=list)

    def add_group(self, group: ParameterGroup, stages: Sequence[PipelineStage]) -> None:
        """Orthogonalize the matrices of a parameter group."""
        plan = self.builder.plan
        layers = [unit_matrices(plan.layout, unit, group.name) for stage in stages for unit in plan.stage_units(stage)]
        matrices = [shared for unit in layers for shared in unit]
        if not matrices:
            return
        distribution = self.optimizer.distribution_for(plan.layout.data.zero_stage)
        if group.shard_group is None or group.shard_count == 1:
            distribution = MuonDistribution.REPLICATED
        match distribution, group.shard_group:
            case MuonDistribution.LAYER_WISE, CommGroup():
                owned = busiest_owner(count_matrices(matrices), self.optimizer, group.shard_count)
                self._add_iterations(in_batches(matrices, owned, self.optimizer))
            case MuonDistribution.ALL_TO_ALL, CommGroup() as comm_group:
                self._add_exchanges(matrices, comm_group, group.shard_count)
            case MuonDistribution.GATHER, CommGroup() as comm_group if plan.layout.data.shards_parameters:
                for unit in layers:
                    elements = sum(shared.matrix.elements * shared.matrix.count for shared in unit)
                    self._add_gathered(in_batches(unit, count_matrices(unit), self.optimizer), elements, comm_group)
            case MuonDistribution.GATHER, CommGroup() as comm_group:
                touched, missing = busiest_slice(matrices, self.optimizer, group.shard_count)
                payload = missing * group.shard_count / (group.shard_count - 1)  # of which this rank has one share
                self._add_gathered(in_batches(matrices, touched, self.optimizer), payload, comm_group)
            case _:
                self._add_iterations(in_batches(matrices, count_matrices(matrices), self.optimizer))

    def _add_iterations(self, batches: Counter[SharedMatrix], depends_on: tuple[int, ...] = ()) -> None:
        """Orthogonalize matrices one after the other, after `depends_on` or the momentum's update."""
        task = self.after
        for shared, count in sorted(batches.items()):
            name = f"orthogonalize {shared.matrix.outputs} x {shared.matrix.inputs}"
            operations = [*_iteration_operations(shared, self.optimizer)]
            task = self.builder.add_repeated_standalone(name, operations, depends_on, count)
            depends_on = ()
        self._computed.append(task)

    def _add_gathered(self, batches: Counter[SharedMatrix], elements: float, comm_group: CommGroup) -> None:
        """Orthogonalize matrices of which `elements` elements are gathered first."""
        if not batches:
            return
        if not elements:
            self._add_iterations(batches)
            return
        gather = self._gather(comm_group, elements)
        self._add_iterations(batches, (gather,))

    def _add_exchanges(self, matrices: Sequence[SharedMatrix], comm_group: CommGroup, ranks: int) -> None:
        """Exchange equal matrices, one (or one batch) for each rank at a time, and send them back.

        Messages keep their order, so that those of the next round are sent for before this one's are returned.
        """
        rounds = [*exchange_rounds(matrices, self.optimizer, ranks)]
        received = [self._exchange(comm_group, elements) for _, elements in rounds[:1]]
        for index, (batch, elements) in enumerate(rounds):
            following = rounds[index + 1 : index + 2]
            if self.optimizer.overlap:
                received += [self._exchange(comm_group, size) for _, size in following]
            self._add_iterations(Counter({batch: 1}), (received[index],))
            self._return(comm_group, elements)
            if not self.optimizer.overlap:
                received += [self._exchange(comm_group, size) for _, size in following]

    def _exchange(self, comm_group: CommGroup, elements: float) -> int:
        """Exchange shards for whole matrices, while those of one round at most wait for their iteration."""
        comm_op = _comm_op("exchange momentum", CollectiveType.ALL_TO_ALL, comm_group, elements)
        inputs = [self.after, *self._computed[-1:], *(() if self.optimizer.overlap else self.sent[-1:])]
        return self.builder.add_dp_collective(comm_op, inputs)

    def _gather(self, comm_group: CommGroup, elements: float) -> int:
        """Gather matrices that a later iteration waits for; return the task."""
        ahead = _AHEAD if self.optimizer.overlap else 1
        inputs = [self.after, *self._computed[-ahead : len(self._computed) - ahead + 1]]
        comm_op = _comm_op("gather momentum", CollectiveType.ALL_GATHER, comm_group, elements)
        return self.builder.add_dp_collective(comm_op, inputs)

    def _return(self, comm_group: CommGroup, elements: float) -> None:
        """Send the matrices that were orthogonalized last back to the ranks whose shards they are."""
        comm_op = _comm_op("return updates", CollectiveType.ALL_TO_ALL, comm_group, elements)
        self.sent.append(self.builder.add_dp_collective(comm_op, (self._computed[-1],)))


def _comm_op(name: str, collective: CollectiveType, comm_group: CommGroup, elements: float) -> CommOp:
    return CommOp(name, collective, comm_group.name, float(elements * _ITERATE_BYTES))


def _iteration_operations(shared: SharedMatrix, optimizer: Muon | Soap) -> Iterator[Operation]:
    """The update of a matrix: Muon's iteration, with what tensor-parallel ranks exchange for it, or SOAP's step."""
    if isinstance(optimizer, Soap):
        yield from matrix_operations(matrix_kernels(shared.matrix, optimizer))
        return
    iteration = shared_iteration(shared.matrix, optimizer, shared.ranks)
    if iteration.gathered_bytes:
        yield _blocking("gather matrix", CollectiveType.ALL_GATHER, shared, iteration.gathered_bytes)
    product, *updates = matrix_operations((product_kernel(iteration, optimizer), *update_kernels(iteration, optimizer)))
    for _ in range(optimizer.steps):
        yield product
        if iteration.summed_bytes:
            yield _blocking("sum products", CollectiveType.ALL_REDUCE, shared, iteration.summed_bytes)
        yield from updates


def _blocking(name: str, collective: CollectiveType, shared: SharedMatrix, payload: Bytes) -> Operation:
    return Operation(CommOp(name, collective, shared.group_name, payload), WorkType.OPTIMIZER)
