"""Which matrices does each rank orthogonalize, if several ranks hold the same weights?

Layer-wise owners: matrices, the costliest first, go to the rank with the least to do (longest processing time
first), as Megatron-LM's `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` places them. A flat buffer
(ZeRO-1 and -2) is cut into equal pieces instead, so that a rank shares the matrices at the edges of its own with its
neighbours (Liu et al. 2025, arXiv:2502.16982, section 2.3). All ranks wait for the one that has most to do, so its
matrices stand for those of every rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import NamedTuple

from clustersim.common.units import Flop
from clustersim.model.newton_schulz import newton_schulz_flops
from clustersim.model.operators import LayerOperators, Operator, ParallelRegion
from clustersim.model.optimizers import Muon, MuonTensorParallel, Soap
from clustersim.model.soap import soap_flops
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import ETP_GROUP, TP_GROUP, CommGroup


@dataclass(frozen=True, slots=True, order=True)
class SharedMatrix:
    """A matrix of one rank with the tensor-parallel ranks that share it.

    ranks: number of them; group_name: their process group, "" where it is not shared.
    """

    matrix: WeightMatrix
    ranks: int = 1
    group_name: str = ""

    @property
    def single(self) -> "SharedMatrix":
        """One of the matrices."""
        return replace(self, matrix=self.matrix.single)

    def with_count(self, count: int) -> "SharedMatrix":
        """The same matrix `count` times."""
        return replace(self, matrix=replace(self.matrix, count=count))

    def cost(self, optimizer: Muon | Soap) -> Flop:
        """FLOP of one matrix's update on this rank, up to a factor."""
        matrix = self.matrix.single
        if isinstance(optimizer, Soap):
            return soap_flops(matrix, optimizer)
        is_whole = optimizer.tensor_parallel is MuonTensorParallel.DUPLICATED
        return newton_schulz_flops(matrix.gathered(self.ranks) if is_whole else matrix, 1)


MatrixCounts = Mapping[SharedMatrix, int]
"""How many there are of each matrix with count 1."""


class BufferSlice(NamedTuple):
    """The matrices that one rank's piece of a flat buffer touches, and the elements of these that others hold."""

    matrices: MatrixCounts
    missing_elements: float


def unit_matrices(layout: Layout, unit: LayerOperators, group: str) -> tuple[SharedMatrix, ...]:
    """The matrices of a unit that belong to a parameter group."""
    operators = (op for op in unit.operators if op.parameter_group == group and op.trainable and op.parameter_count)
    return tuple(_shared(layout, operator, matrix) for operator in operators for matrix in operator.matrices)


def _shared(layout: Layout, operator: Operator, matrix: WeightMatrix) -> SharedMatrix:
    sharing: tuple[int, CommGroup] = (1, TP_GROUP)
    if operator.region is ParallelRegion.SHARDED:
        sharing = layout.tp, TP_GROUP
    elif operator.region is ParallelRegion.EXPERT:
        sharing = layout.effective_etp, ETP_GROUP if layout.has_expert_mesh else TP_GROUP
    ranks, comm_group = sharing
    return SharedMatrix(matrix, ranks, comm_group.name) if ranks > 1 else SharedMatrix(matrix)


def count_matrices(matrices: Iterable[SharedMatrix]) -> Counter[SharedMatrix]:
    """How often each matrix occurs."""
    counts: Counter[SharedMatrix] = Counter()
    for shared in matrices:
        counts[shared.single] += shared.matrix.count
    return counts


def busiest_owner(counts: MatrixCounts, optimizer: Muon | Soap, ranks: int) -> Counter[SharedMatrix]:
    """The matrices of the rank that has most to do, where `ranks` ranks own whole matrices.

    Equal matrices are dealt out at once where each rank gets several.
    """
    costs = {shared: shared.cost(optimizer) for shared in counts}
    owned: list[Counter[SharedMatrix]] = [Counter() for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for shared in sorted(counts, key=lambda matrix: (-costs[matrix], matrix)):
        rounds, remainder = divmod(counts[shared], ranks)
        loads = [(load + rounds * costs[shared], rank) for load, rank in loads]
        for rank_matrices in owned:
            rank_matrices[shared] += rounds
        heapify(loads)
        for _ in range(remainder):
            load, rank = loads[0]
            owned[rank][shared] += 1
            heapreplace(loads, (load + costs[shared], rank))
    _, busiest = max(loads)
    return +owned[busiest]


def busiest_slice(matrices: Sequence[SharedMatrix], muon: Muon, ranks: int) -> BufferSlice:
    """What the rank touches that has most to do, where a flat buffer of the matrices is cut into equal pieces."""
    elements = sum(shared.matrix.elements * shared.matrix.count for shared in matrices)
    size, singles = elements / ranks, [*_singles(matrices)]
    edges = [0]
    for shared in singles:
        edges.append(edges[-1] + shared.matrix.elements)
    best, best_cost, first = BufferSlice({}, 0.0), -1.0, 0
    for rank in range(ranks):
        begin, end = rank * size, (rank + 1) * size
        while first < len(singles) and edges[first + 1] <= begin:
            first += 1
        last = first
        while last < len(singles) and edges[last] < end:
            last += 1
        cost = sum(shared.cost(muon) for shared in singles[first:last])
        if cost > best_cost:
            touched = edges[last] - edges[first]
            best, best_cost = BufferSlice(Counter(singles[first:last]), touched - size), cost
    return best


def _singles(matrices: Iterable[SharedMatrix]) -> Iterator[SharedMatrix]:
    for shared in matrices:
        for _ in range(shared.matrix.count):
            yield shared.single
