"""Which exchanges inside blocks share links with anybody, and what they take alone."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clustersim.cost.contention import ContentionMap, UncontendedComm, map_contention
from clustersim.cost.timing import LinkDemand
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from tests.engine.fake_costs import UnitCost
from tests.engine.fake_links import LinkCost
from tests.engine.small_programs import Step, compute, exchange, meet, program, receive, send

INSIDE = exchange("tp", 2.0)
NOBODY = np.full(8, -1)
"""Whose port each of eight links is: nobody's."""


def shared(made: Program, routes: Mapping[str, list[list[int]]]) -> set[str]:
    """Names of exchanges inside blocks that share any of eight links."""
    return {comm_op.name for comm_op in map_contention(made, LinkCost(UnitCost(made), 8, routes), NOBODY).contended}


def pairs(*more: Step) -> Program:
    """Four ranks; pairs of them communicate inside a block, and all of them outside, if they do."""
    return program([[compute(1.0, INSIDE), *more]] * 4, {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]})


def test_a_group_with_its_own_link_shares_nothing() -> None:
    assert shared(pairs(), {"tp": [[0], [1]]}) == set()


def test_a_group_that_crosses_no_link_shares_nothing() -> None:
    assert shared(pairs(meet(1.0)), {"dp": [[0], [0]]}) == set()


def test_two_groups_of_one_role_on_one_link_share_it() -> None:
    assert shared(pairs(), {"tp": [[0, 2], [1, 2]]}) == {"tp"}


def test_two_roles_on_one_link_share_it() -> None:
    assert shared(pairs(meet(1.0)), {"tp": [[0], [1]], "dp": [[2], [1]]}) == {"tp"}


def test_two_roles_on_links_of_their_own_share_nothing() -> None:
    assert shared(pairs(meet(1.0)), {"tp": [[0], [1]], "dp": [[2], [3]]}) == set()


def test_who_shares_links_with_whom_outside_blocks_does_not_matter() -> None:
    """Reductions of two groups share link 2; the exchange inside blocks is elsewhere."""
    assert shared(pairs(meet(1.0)), {"tp": [[0], [1]], "dp": [[2], [2]]}) == set()


def test_the_same_group_twice_on_its_link_shares_it_with_nobody() -> None:
    """Its collectives follow each other, inside one block and in the next, whatever their sizes."""
    other = replace(INSIDE, name="other", payload=5.0)
    made = program([[compute(INSIDE, INSIDE, other), compute(other)]] * 2, {"tp": [[0, 1]]})
    assert shared(made, {"tp": [[0]]}) == set()


def test_every_exchange_of_a_crowded_link_is_named_and_no_other() -> None:
    second = exchange("cp", 1.0)
    steps = [compute(INSIDE, second), meet(1.0)]
    made = program([steps] * 2, {"tp": [[0, 1]], "cp": [[0, 1]], "dp": [[0, 1]]})
    assert shared(made, {"tp": [[0]], "cp": [[1]], "dp": [[1]]}) == {"cp"}
    assert shared(made, {"tp": [[0]], "cp": [[0]], "dp": [[1]]}) == {"tp", "cp"}


def own(made: Program, routes: Mapping[str, list[list[int]]], owner: list[int]) -> list[bool]:
    """Which pairs share links with nobody while the data streams of their members are idle."""
    return map_contention(made, LinkCost(UnitCost(made), 8, routes), np.array(owner)).self_only[INSIDE].tolist()


def test_ports_of_members_are_free_while_their_data_streams_are_idle() -> None:
    """Link r is rank r's port: its pair's exchange and its reduction cross it, and nobody else's."""
    made, ports = pairs(meet(1.0)), {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    assert own(made, ports, [0, 1, 2, 3, -1, -1, -1, -1]) == [True, True]
    assert own(made, ports, [-1] * 8) == [False, False], "a switch's link may be anybody's"
    assert own(made, {**ports, "dp": [[0, 2, 3], [1, 3]]}, [0, 1, 2, 3, -1, -1, -1, -1]) == [True, False]


def test_messages_do_not_wait_for_idle_data_streams() -> None:
    """Rank 0 sends to rank 2 through its own port while its pair may communicate inside a block."""
    block = compute(1.0, INSIDE)
    steps = [[block, send(1.0)], [block], [block, receive(1.0)], [block]]
    made = program(steps, {"tp": [[0, 1], [2, 3]], "pp_next": [[0, 2]]})
    ports = {"tp": [[0, 1], [2, 3]], "pp_next": [[0, 2]]}
    assert own(made, ports, [0, 1, 2, 3, -1, -1, -1, -1]) == [False, False]


class ByName(LinkCost):
    """Exchanges of a role that go different ways: routes by the exchange's name."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        return replace(super().link_demand(comm_op), link_loads=self._of(comm_op.name))


def shared_by_name(routes: Mapping[str, list[list[int]]]) -> set[str]:
    made = program([[compute(replace(INSIDE, name="near"), replace(INSIDE, name="far"))]] * 4, {"tp": [[0, 1], [2, 3]]})
    return {comm_op.name for comm_op in map_contention(made, ByName(UnitCost(made), 8, routes), NOBODY).contended}


def test_two_groups_share_a_link_that_they_cross_with_different_exchanges() -> None:
    """The first group goes far over the second one's link."""
    assert shared_by_name({"near": [[0], [1]], "far": [[1], [2]]}) == {"near", "far"}
    assert shared_by_name({"near": [[0], [1]], "far": [[2], [1]]}) == set(), "both exchanges of one group"
    assert shared_by_name({"near": [[0], [0]], "far": [[2], [1]]}) == {"near"}


class Slower(LinkCost):
    """What exchanges ask of links if nobody is there: half a second of latency, and half of their usual time."""

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        usual = super().link_demand(comm_op)
        return replace(usual, latency=np.full(len(usual.flow), 0.5), transfer=usual.flow / 2)


def test_what_shares_links_is_timed_as_if_it_had_them_for_itself_and_all_else_as_usual() -> None:
    made = pairs(meet(4.0))
    unit, outside = UnitCost(made), exchange("dp", 4.0)
    found = ContentionMap(Slower(unit, 8, {}), {INSIDE: np.array([True, False])}, {})
    alone = UncontendedComm(unit, found)
    assert alone.time_comm_op(INSIDE).seconds.tolist() == [1.5, 2.0]
    assert alone.time_comm_op(outside).seconds.tolist() == [4.0, 4.0]
    assert alone.time_comm_op(INSIDE).algorithm == unit.time_comm_op(INSIDE).algorithm


def test_only_groups_that_meet_others_share() -> None:
    """The first pair and the reduction of its first rank are on link 0; the second pair is by itself on link 1."""
    made = pairs(meet(4.0))
    (groups,) = map_contention(
        made, LinkCost(UnitCost(made), 8, {"tp": [[0], [1]], "dp": [[0]]}), NOBODY
    ).contended.values()
    assert groups.tolist() == [True, False]
