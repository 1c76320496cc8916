"""Which exchanges must be simulated on a network that they share?

Collectives and messages outside blocks always are: they run beside whatever else a rank does. An exchange inside a
block is only where it crosses a link that any other group crosses too, of its own role or of another; where it has its
links for itself, it takes its own time and the block can stay one event.

Many share only ports of their own members, with these members' own collectives: tensor parallelism within nodes, with
gradients on the data stream. A rank's blocks do one exchange at a time; so while the data streams of its members are
idle such an exchange meets nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.cost.background_traffic import BackgroundFlow, loaded_links
from clustersim.cost.timing import CommCost, CommTiming, LinkDemand, LinkDemandCost
from clustersim.program.program import Program
from clustersim.program.task import OVERLAPPING_STREAMS, CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix


@dataclass(frozen=True, slots=True)
class ContentionMap:
    """demands: what exchanges ask of links; inside: of the exchanges of blocks, which groups share links with others.

    inside: [groups] by exchange; only of exchanges of which any group does. own: [groups] likewise, which of these
    share links with nobody while the data streams of their members are idle. others: what is on links beside.
    """

    demands: LinkDemandCost
    contended: Mapping[CommOp, BoolArray]
    self_only: Mapping[CommOp, BoolArray]
    background: tuple[BackgroundFlow, ...] = ()

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """What one collective asks of links in each group of its role."""
        return self.demands.link_demand(comm_op)


@dataclass(frozen=True, slots=True)
class UncontendedComm:
    """Times exchanges (an `CommCost`) as if groups that share links inside blocks had them for themselves.

    What sharing adds is found out by simulation; sources of durations let all groups of a role share their links.
    """

    comm_cost: CommCost
    contention: ContentionMap
    _cache: dict[CommOp, CommTiming] = field(init=False, default_factory=dict)

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Time one collective in each group of its role."""
        cached = self._cache.get(comm_op)
        if cached is None:
            cached = self._cache[comm_op] = self._uncontended_timing(comm_op)
        return cached

    def _uncontended_timing(self, comm_op: CommOp) -> CommTiming:
        timing, contended = self.comm_cost.time_comm_op(comm_op), self.contention.contended.get(comm_op)
        if contended is None:
            return timing
        demand = self.contention.link_demand(comm_op)
        return replace(timing, seconds=np.where(contended, demand.latency + demand.transfer, timing.seconds))


def map_contention(
    program: Program,
    demands: LinkDemandCost,
    owner: IntArray,
    background: tuple[BackgroundFlow, ...] = (),
    other_job_links: Iterable[IntArray] = (),
) -> ContentionMap:
    """Find out which exchanges of a program share links. owner: [links] the rank whose port a link is, -1: none's.

    beside: what loads links beside the program; jobs: links that other jobs cross, numbers of each.
    """
    has_background = np.isin(np.arange(len(owner)), np.concatenate([loaded_links(background), *other_job_links]))
    is_shared = has_background | _links_of_several_groups(program.comm_ops, demands, len(owner))
    is_shared_with_others = has_background | (is_shared & _links_of_non_owners(program, demands, owner))
    contended: dict[CommOp, BoolArray] = {}
    self_only: dict[CommOp, BoolArray] = {}
    for comm_op in program.comm_ops:
        if comm_op not in program.segment_comm_ops:
            continue
        link_loads = demands.link_demand(comm_op).link_loads
        group_contended, group_meets_others = np.zeros(
            (2, len(program.groups[comm_op.comm_group].members)), dtype=np.bool_
        )
        group_contended[link_loads.group_index[is_shared[link_loads.link_index]]] = True
        group_meets_others[link_loads.group_index[is_shared_with_others[link_loads.link_index]]] = True
        if group_contended.any():
            contended[comm_op], self_only[comm_op] = group_contended, group_contended & ~group_meets_others
    return ContentionMap(demands, contended, self_only, background)


def _links_of_non_owners(program: Program, demands: LinkDemandCost, owner: IntArray) -> BoolArray:
    """For each link whether any but its owner's collectives, in blocks and beside them, crosses it."""
    issued_ops = (issued for rank_program in program.programs for issued in rank_program.issued_comm_ops)
    other_stream_ops = {comm_op for stream, comm_op in issued_ops if stream not in OVERLAPPING_STREAMS}
    is_crossed = np.zeros(len(owner), dtype=np.bool_)
    has_owner = (owner >= 0) & (owner < program.world_size)
    loads = ((op.comm_group, demands.link_demand(op).link_loads, op in other_stream_ops) for op in program.comm_ops)
    for comm_group, link_loads, any_stream in dict.fromkeys(
        loads
    ):  # exchanges that differ in payload alone cross the same
        is_owner_group = has_owner[link_loads.link_index] & (
            program.group_indices[comm_group][owner[link_loads.link_index]] == link_loads.group_index
        )
        is_crossed[link_loads.link_index if any_stream else link_loads.link_index[~is_owner_group]] = True
    return is_crossed


def _links_of_several_groups(comm_ops: Iterable[CommOp], demands: LinkDemandCost, link_count: int) -> BoolArray:
    """For each link whether groups of several roles, or several groups of one, cross it."""
    loads_by_group: dict[str, dict[LinkLoadMatrix, None]] = {}
    for comm_op in comm_ops:
        loads_by_group.setdefault(comm_op.comm_group, {})[demands.link_demand(comm_op).link_loads] = None
    is_shared, is_crossed = np.zeros((2, link_count), dtype=np.bool_)
    for group_loads in loads_by_group.values():
        group = np.full(link_count, -1, dtype=np.int64)
        for link_loads in group_loads:
            previous = group[link_loads.link_index]
            group[link_loads.link_index] = link_loads.group_index  # of several groups on one link, one stays
            differs = (previous >= 0) & (previous != link_loads.group_index) | (
                group[link_loads.link_index] != link_loads.group_index
            )
            is_shared[link_loads.link_index[differs]] = True
        is_shared |= is_crossed & (group >= 0)
        is_crossed |= group >= 0
    return is_shared
