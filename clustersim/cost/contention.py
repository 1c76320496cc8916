"""Which communication ops must be simulated on a shared network?

Collectives and messages outside compute segments always are: they overlap whatever else a rank does. A
communication op inside a segment is simulated only where it crosses a link that another group crosses too,
of its own communicator or of another; where its links are uncontended, it takes its uncontended time and
the segment can stay one event.

Many contend only for ports of their own members, with these members' own collectives: tensor parallelism
within nodes, with gradients on the DP stream. A rank's segments run one communication op at a time; so
while the DP and EP streams of its members are idle such an op is uncontended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.common.cached_method import cached_method
from clustersim.cost.background_traffic import BackgroundFlow, loaded_links
from clustersim.cost.timing import CommCost, CommTiming, LinkDemand, LinkDemandCost
from clustersim.program.program import Program
from clustersim.program.task import OVERLAPPING_STREAMS, CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix
from clustersim.symmetry.rotation_orbits import StepOrbits


@dataclass(frozen=True, slots=True)
class ContentionMap:
    """Which groups contend for links.

    demands: link demands of communication ops; contended: by op inside segments, [groups] which contend with
    others (ops where none does are missing); self_only: likewise, [groups] which contend only with their own
    members' DP and EP collectives; background: background flows on the links.
    """

    demands: LinkDemandCost
    contended: Mapping[CommOp, BoolArray]
    self_only: Mapping[CommOp, BoolArray]
    background: tuple[BackgroundFlow, ...] = ()

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Link demand of one collective in each group of its communicator."""
        return self.demands.link_demand(comm_op)


@dataclass(frozen=True)
class UncontendedComm:
    """Times communication ops (a `CommCost`) without contention, for groups that contend inside segments.

    Contention is added by simulation; the underlying cost sources let all groups of a communicator share their
    links.
    """

    comm_cost: CommCost
    contention: ContentionMap

    @cached_method
    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one collective in each group of its communicator."""
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
    orbits: StepOrbits | None = None,
) -> ContentionMap:
    """Find which communication ops of a program contend for links.

    owner: [links] the rank whose port a link is, -1: none; background: background flows; other_job_links: ids
    of the links that each other job crosses; orbits: the demands' load matrices hold representatives only.
    """
    has_background = np.isin(np.arange(len(owner)), np.concatenate([loaded_links(background), *other_job_links]))
    is_shared = has_background | _links_of_several_groups(program.comm_ops, demands, len(owner), orbits)
    is_shared_with_others = has_background | (is_shared & _links_of_non_owners(program, demands, owner))
    contended: dict[CommOp, BoolArray] = {}
    self_only: dict[CommOp, BoolArray] = {}
    for comm_op in program.comm_ops:
        if comm_op not in program.segment_comm_ops:
            continue
        link_loads = demands.link_demand(comm_op).link_loads
        group_contended, group_shares_with_others = np.zeros(
            (2, len(program.groups[comm_op.comm_group].members)), dtype=np.bool_
        )
        group_contended[link_loads.group_index[is_shared[link_loads.link_index]]] = True
        group_shares_with_others[link_loads.group_index[is_shared_with_others[link_loads.link_index]]] = True
        if orbits is not None:
            representative = orbits.groups[comm_op.comm_group].representative_of_group
            group_contended, group_shares_with_others = (
                group_contended[representative],
                group_shares_with_others[representative],
            )
        if group_contended.any():
            contended[comm_op], self_only[comm_op] = group_contended, group_contended & ~group_shares_with_others
    return ContentionMap(demands, contended, self_only, background)


def _links_of_non_owners(program: Program, demands: LinkDemandCost, owner: IntArray) -> BoolArray:
    """[links] whether any op crosses it but its owner's (in segments or on the DP and EP streams)."""
    issued_ops = (issued for rank_program in program.programs for issued in rank_program.issued_comm_ops)
    other_stream_ops = {comm_op for stream, comm_op in issued_ops if stream not in OVERLAPPING_STREAMS}
    is_crossed = np.zeros(len(owner), dtype=np.bool_)
    has_owner = (owner >= 0) & (owner < program.world_size)
    loads = ((op.comm_group, demands.link_demand(op).link_loads, op in other_stream_ops) for op in program.comm_ops)
    for comm_group, link_loads, any_stream in dict.fromkeys(
        loads
    ):  # ops that differ only in payload have the same link loads
        is_owner_group = has_owner[link_loads.link_index] & (
            program.group_indices[comm_group][owner[link_loads.link_index]] == link_loads.group_index
        )
        is_crossed[link_loads.link_index if any_stream else link_loads.link_index[~is_owner_group]] = True
    return is_crossed


def _links_of_several_groups(
    comm_ops: Iterable[CommOp], demands: LinkDemandCost, link_count: int, orbits: StepOrbits | None
) -> BoolArray:
    """[links] whether groups of several communicators, or several groups of one, cross a link."""
    loads_by_group: dict[str, dict[LinkLoadMatrix, None]] = {}
    for comm_op in comm_ops:
        loads_by_group.setdefault(comm_op.comm_group, {})[demands.link_demand(comm_op).link_loads] = None
    is_shared, is_crossed = np.zeros((2, link_count), dtype=np.bool_)
    for comm_group, group_loads in loads_by_group.items():
        group = np.full(link_count, -1, dtype=np.int64)
        for link_loads in group_loads:
            if orbits is not None and not orbits.groups[comm_group].closed:  # images of a group share its link
                link_orbit = orbits.rotation.orbit_of_link[link_loads.link_index]
                is_shared[link_loads.link_index[orbits.rotation.multiplicity[link_orbit] > 1.0]] = True
            previous = group[link_loads.link_index]
            group[link_loads.link_index] = link_loads.group_index  # of several groups on one link, the last one stays
            differs = (previous >= 0) & (previous != link_loads.group_index) | (
                group[link_loads.link_index] != link_loads.group_index
            )
            is_shared[link_loads.link_index[differs]] = True
        is_shared |= is_crossed & (group >= 0)
        is_crossed |= group >= 0
    return is_shared
