"""Which collectives inside segments contend for links, and their uncontended times."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clustersim.cost.contention import ContentionMap, UncontendedComm, map_contention
from clustersim.cost.timing import LinkDemand
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from tests.engine.fake_costs import UnitCost
from tests.engine.fake_links import LinkCost
from tests.engine.small_programs import StreamTask, all_reduce, compute, make_comm_op, make_program, receive, send

SEGMENT_OP = make_comm_op("tp", 2.0)
NO_OWNER = np.full(8, -1)
"""The rank that owns each of eight links as its port: none."""


def contended_names(rank_programs: Program, routes: Mapping[str, list[list[int]]]) -> set[str]:
    """Names of collectives inside segments that share any of eight links."""
    return {
        comm_op.name
        for comm_op in map_contention(rank_programs, LinkCost(UnitCost(rank_programs), 8, routes), NO_OWNER).contended
    }


def pair_program(*extra_steps: StreamTask) -> Program:
    """Four ranks; pairs of them communicate inside a segment, and groups outside, if `extra_steps` do."""
    return make_program(
        [[compute(1.0, SEGMENT_OP), *extra_steps]] * 4, {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    )


def test_a_group_with_its_own_link_shares_nothing() -> None:
    assert contended_names(pair_program(), {"tp": [[0], [1]]}) == set()


def test_a_group_that_crosses_no_link_shares_nothing() -> None:
    assert contended_names(pair_program(all_reduce(1.0)), {"dp": [[0], [0]]}) == set()


def test_two_groups_of_one_kind_on_one_link_share_it() -> None:
    assert contended_names(pair_program(), {"tp": [[0, 2], [1, 2]]}) == {"tp"}


def test_groups_of_two_kinds_on_one_link_share_it() -> None:
    assert contended_names(pair_program(all_reduce(1.0)), {"tp": [[0], [1]], "dp": [[2], [1]]}) == {"tp"}


def test_groups_of_two_kinds_on_separate_links_share_nothing() -> None:
    assert contended_names(pair_program(all_reduce(1.0)), {"tp": [[0], [1]], "dp": [[2], [3]]}) == set()


def test_sharing_outside_segments_does_not_matter() -> None:
    """Reductions of two groups share link 2; the collective inside segments is elsewhere."""
    assert contended_names(pair_program(all_reduce(1.0)), {"tp": [[0], [1]], "dp": [[2], [2]]}) == set()


def test_consecutive_collectives_of_a_group_share_nothing() -> None:
    """Its collectives follow each other, inside one segment and in the next, whatever their sizes."""
    other = replace(SEGMENT_OP, name="other", payload=5.0)
    rank_programs = make_program([[compute(SEGMENT_OP, SEGMENT_OP, other), compute(other)]] * 2, {"tp": [[0, 1]]})
    assert contended_names(rank_programs, {"tp": [[0]]}) == set()


def test_exactly_the_collectives_of_a_contended_link_are_listed() -> None:
    second = make_comm_op("cp", 1.0)
    steps = [compute(SEGMENT_OP, second), all_reduce(1.0)]
    rank_programs = make_program([steps] * 2, {"tp": [[0, 1]], "cp": [[0, 1]], "dp": [[0, 1]]})
    assert contended_names(rank_programs, {"tp": [[0]], "cp": [[1]], "dp": [[1]]}) == {"cp"}
    assert contended_names(rank_programs, {"tp": [[0]], "cp": [[0]], "dp": [[1]]}) == {"tp", "cp"}


def self_only_pairs(rank_programs: Program, routes: Mapping[str, list[list[int]]], owner: list[int]) -> list[bool]:
    """Which pairs share links with no other group while the data-parallel streams of their members are idle."""
    return (
        map_contention(rank_programs, LinkCost(UnitCost(rank_programs), 8, routes), np.array(owner))
        .self_only[SEGMENT_OP]
        .tolist()
    )


def test_ports_of_members_are_free_while_their_data_streams_are_idle() -> None:
    """Link r is rank r's port: only its pair's collective and its reduction cross it."""
    rank_programs, ports = pair_program(all_reduce(1.0)), {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    assert self_only_pairs(rank_programs, ports, [0, 1, 2, 3, -1, -1, -1, -1]) == [True, True]
    assert self_only_pairs(rank_programs, ports, [-1] * 8) == [False, False], "a switch's link may be anybody's"
    assert self_only_pairs(rank_programs, {**ports, "dp": [[0, 2, 3], [1, 3]]}, [0, 1, 2, 3, -1, -1, -1, -1]) == [
        True,
        False,
    ]


def test_messages_do_not_wait_for_idle_data_streams() -> None:
    """Rank 0 sends to rank 2 through its own port while its pair may communicate inside a segment."""
    segment_step = compute(1.0, SEGMENT_OP)
    steps = [[segment_step, send(1.0)], [segment_step], [segment_step, receive(1.0)], [segment_step]]
    rank_programs = make_program(steps, {"tp": [[0, 1], [2, 3]], "pp_next": [[0, 2]]})
    ports = {"tp": [[0, 1], [2, 3]], "pp_next": [[0, 2]]}
    assert self_only_pairs(rank_programs, ports, [0, 1, 2, 3, -1, -1, -1, -1]) == [False, False]


class RoutesByNameCost(LinkCost):
    """Collectives of one group with different routes: routes by the collective's name."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        return replace(super().link_demand(comm_op), link_loads=self._link_load_matrix(comm_op.name))


def contended_names_by_name(routes: Mapping[str, list[list[int]]]) -> set[str]:
    rank_programs = make_program(
        [[compute(replace(SEGMENT_OP, name="near"), replace(SEGMENT_OP, name="far"))]] * 4, {"tp": [[0, 1], [2, 3]]}
    )
    return {
        comm_op.name
        for comm_op in map_contention(
            rank_programs, RoutesByNameCost(UnitCost(rank_programs), 8, routes), NO_OWNER
        ).contended
    }


def test_two_groups_share_a_link_that_they_cross_with_different_ops() -> None:
    """The first group's `network_latency` collective crosses the second one's link."""
    assert contended_names_by_name({"near": [[0], [1]], "far": [[1], [2]]}) == {"near", "far"}
    assert contended_names_by_name({"near": [[0], [1]], "far": [[2], [1]]}) == set(), "both exchanges of one group"
    assert contended_names_by_name({"near": [[0], [0]], "far": [[2], [1]]}) == {"near"}


class HalfTransferCost(LinkCost):
    """Uncontended demand of collectives: half a second of latency, and half of their usual transfer time."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        original = super().link_demand(comm_op)
        return replace(original, latency=np.full(len(original.flow), 0.5), transfer=original.flow / 2)


def test_contended_ops_are_timed_uncontended_and_others_unchanged() -> None:
    rank_programs = pair_program(all_reduce(4.0))
    unit, outside = UnitCost(rank_programs), make_comm_op("dp", 4.0)
    contention = ContentionMap(HalfTransferCost(unit, 8, {}), {SEGMENT_OP: np.array([True, False])}, {})
    uncontended = UncontendedComm(unit, contention)
    assert uncontended.time_comm_op(SEGMENT_OP).seconds.tolist() == [1.5, 2.0]
    assert uncontended.time_comm_op(outside).seconds.tolist() == [4.0, 4.0]
    assert uncontended.time_comm_op(SEGMENT_OP).algorithm == unit.time_comm_op(SEGMENT_OP).algorithm


def test_only_groups_on_contended_links_are_marked() -> None:
    """The first pair and the reduction of its first rank are on link 0; the second pair is the only user of link 1."""
    rank_programs = pair_program(all_reduce(4.0))
    (groups,) = map_contention(
        rank_programs, LinkCost(UnitCost(rank_programs), 8, {"tp": [[0], [1]], "dp": [[0]]}), NO_OWNER
    ).contended.values()
    assert groups.tolist() == [True, False]
