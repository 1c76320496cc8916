"""Flow demands: what does the collective of one class of groups ask of the simulated links?

One link of every colour is simulated (`link_load_matrix`), and one group of every colour. All groups of a
colour communicate at the same times, so the flow that represents them loads a link by the sum over all those
of them that use this one real link. Pipeline filling is counted as loading links as much as steady state
does: so groups of one kind that communicate in step take as long as their costs say, in which filling is
shared as well.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.interning import Interner
from clustersim.common.units import Seconds
from clustersim.cost.timing import LinkDemand, LinkDemandCost
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix
from clustersim.symmetry.refinement import SymmetryClasses, lowest_members


@dataclass(frozen=True, slots=True)
class _AggregatedLoads:
    """Loads by group class, sorted by class. class_start: [classes + 1] first entry of each class."""

    class_start: IntArray
    link_class: IntArray
    seconds_per_byte: FloatArray


class FlowDemands:
    """Aggregates the link demands of single groups to demands of classes."""

    def __init__(self, program: Program, classes: SymmetryClasses, source: LinkDemandCost) -> None:
        self._classes, self._source = classes, source
        self._group_indices = program.group_indices
        self._is_representative = np.zeros(len(classes.link_colours), dtype=np.bool_)
        self._is_representative[lowest_members(classes.link_colours)] = True
        self._comm_op_ids: Interner[CommOp] = Interner()
        self._rank_cache: dict[tuple[int, int], tuple[Seconds, FlowDemand | None]] = {}

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """Seconds before data move, and the demand of all groups in the class of the rank's group (None: no data)."""
        key = rank, self._comm_op_ids.index_of(comm_op)
        result = self._rank_cache.get(key)
        if result is None:
            result = self._rank_cache[key] = self._class_demand(rank, comm_op)
        return result

    def _class_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        group_index = int(self._group_indices[comm_op.comm_group][rank])
        return self._group_demand(
            comm_op, int(self._classes.group_colours[comm_op.comm_group][group_index]), group_index
        )

    @cached_by(lambda _self, comm_op, colour, _group_index: (comm_op, colour))
    def _group_demand(self, comm_op: CommOp, colour: int, group_index: int) -> tuple[Seconds, FlowDemand | None]:
        """Latency and demand of the groups of a colour, of which `group_index` is one."""
        link_demand = self._source.link_demand(comm_op)
        has_data = link_demand.transfer[group_index] > 0.0
        demand = (
            self._flow_demand(
                link_demand, group_index, self._aggregate(comm_op.comm_group, link_demand.link_loads), colour
            )
            if has_data
            else None
        )
        return float(link_demand.latency[group_index]), demand

    def _flow_demand(
        self, link_demand: LinkDemand, group_index: int, aggregated: _AggregatedLoads, colour: int
    ) -> FlowDemand:
        work_seconds = float(link_demand.transfer[group_index])
        class_slice = slice(aggregated.class_start[colour], aggregated.class_start[colour + 1])
        utilization = aggregated.seconds_per_byte[class_slice] / link_demand.per_byte[group_index]
        return FlowDemand(
            work_seconds,
            work_seconds / float(link_demand.flow[group_index]),
            aggregated.link_class[class_slice],
            utilization,
        )

    @cached_method
    def _aggregate(self, comm_group: str, matrix: LinkLoadMatrix) -> _AggregatedLoads:
        """Sum what the groups of one class ask of one link of each class."""
        group_colours, link_colours = self._classes.group_colours[comm_group], self._classes.link_colours
        is_simulated = self._is_representative[matrix.link_index]
        colours, links = group_colours[matrix.group_index[is_simulated]], link_colours[matrix.link_index[is_simulated]]
        count = len(self._is_representative) + 1
        pairs, pair_index = np.unique(colours * count + links, return_inverse=True)
        seconds = np.bincount(pair_index.reshape(-1), matrix.seconds_per_byte[is_simulated], minlength=len(pairs))
        class_start = np.searchsorted(pairs // count, np.arange(int(group_colours.max()) + 2))
        return _AggregatedLoads(class_start, pairs % count, seconds.astype(np.float64))
