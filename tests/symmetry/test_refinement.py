"""Which ranks are alike? Colour refinement against a slow and obvious one, and partitions worked out by hand."""

from collections.abc import Hashable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.process_groups import process_groups
from clustersim.program.placement import looped_placement
from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.symmetry.refinement import singleton_classes, symmetry_classes
from tests.conftest import examples

Partition = frozenset[frozenset[int]]
NOTHING = RankProgram((), ())


def program_of(layout: Layout, *roles: str) -> Program:
    """Every pipeline rank has a program of its own."""
    groups = process_groups(layout, looped_placement(layout.pp))
    return Program(
        (NOTHING,) * layout.pp, layout.mesh.rank_coordinates(PIPELINE), {role: groups[role] for role in roles}
    )


def plain(ranks: int, groups: Mapping[str, list[list[int]]], kind: list[int] | None = None) -> Program:
    """A role of pairs (sender, receiver) starts with pp."""
    made = {role: ProcessGroups(role, np.array(rows), ordered=role.startswith("pp")) for role, rows in groups.items()}
    kinds = np.array(kind or [0] * ranks)
    return Program((NOTHING,) * (int(kinds.max()) + 1), kinds, made)


def slow(groups: int, *rows: int) -> np.ndarray:
    """One exchange takes 1 s in every group, 2 s in these."""
    seconds = np.ones((groups, 1))
    seconds[list(rows)] = 2.0
    return seconds


def partition(colour: np.ndarray) -> Partition:
    return frozenset(frozenset(np.flatnonzero(colour == item).tolist()) for item in set(colour.tolist()))


def parts(*sets: set[int]) -> Partition:
    return frozenset(map(frozenset, sets))


def test_replicas_of_a_pipeline_rank_are_one_class() -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=3)
    program = program_of(layout, "tp", "cp", "dp", "model", "world", "pp_next", "pp_previous", "embedding")
    found = symmetry_classes(program, {})
    assert found.count == 3
    assert partition(found.rank_colours) == partition(layout.mesh.rank_coordinates(PIPELINE))
    assert found.representative.tolist() == [16 * stage for stage in range(3) for _ in range(16)]


def test_equally_slow_groups_are_still_alike() -> None:
    layout = Layout(tp=2, dp=2, pp=2)
    program = program_of(layout, "tp", "dp")
    assert symmetry_classes(program, {"tp": np.full((4, 2), 3.0), "dp": np.full((4, 1), 2.0)}).count == 2


def test_a_slow_group_splits_its_own_members_and_no_others() -> None:
    """Dp groups of tp 2 x dp 2 x pp 2 are 0 2 | 1 3 | 4 6 | 5 7; the second is slow, and nothing else joins ranks."""
    program = program_of(Layout(tp=2, dp=2, pp=2), "dp")
    assert program.groups["dp"].members.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    found = symmetry_classes(program, {"dp": slow(4, 1)})
    assert partition(found.rank_colours) == parts({0, 2}, {1, 3}, {4, 5, 6, 7})


def test_a_slow_group_splits_whom_its_members_meet() -> None:
    """Pipeline neighbours of ranks 1 and 3 are 5 and 7: they wait for slow ranks, 4 and 6 do not."""
    program = program_of(Layout(tp=2, dp=2, pp=2), "dp", "pp_next", "pp_previous")
    found = symmetry_classes(program, {"dp": slow(4, 1)})
    assert partition(found.rank_colours) == parts({0, 2}, {1, 3}, {4, 6}, {5, 7})


def test_a_slow_rank_is_felt_along_a_line_of_pairs() -> None:
    """0 -> 1 -> 2 and 3 -> 4 -> 5, where the pair 0 -> 1 is slow, and 6 alone."""
    program = plain(7, {"pp_next": [[0, 1], [1, 2], [3, 4], [4, 5]]})
    assert partition(symmetry_classes(program, {}).rank_colours) == parts({0, 3}, {1, 4}, {2, 5}, {6})
    found = symmetry_classes(program, {"pp_next": slow(4, 0)})
    assert partition(found.rank_colours) == parts({0}, {1}, {2}, {3}, {4}, {5}, {6})


def test_in_ordered_pairs_the_sender_is_not_the_receiver() -> None:
    ranks = [[0, 1], [3, 2]]
    assert partition(symmetry_classes(plain(4, {"pp_next": ranks}), {}).rank_colours) == parts({0, 3}, {1, 2})
    assert partition(symmetry_classes(plain(4, {"dp": ranks}), {}).rank_colours) == parts({0, 1, 2, 3})


def test_who_is_in_no_group_is_unlike_who_is_in_one() -> None:
    assert partition(symmetry_classes(plain(4, {"dp": [[0, 1]]}), {}).rank_colours) == parts({0, 1}, {2, 3})


def test_groups_are_told_apart_by_how_many_of_each_kind_they_have() -> None:
    """Two kinds; groups AAB, AAB and ABB: an A among As differs from an A among Bs."""
    kind = [0, 0, 1, 0, 1, 0, 0, 1, 1]
    program = plain(9, {"dp": [[0, 1, 2], [3, 4, 5], [6, 7, 8]]}, kind)
    assert partition(symmetry_classes(program, {}).rank_colours) == parts({0, 1, 3, 5}, {2, 4}, {6}, {7, 8})


def test_unfolded_every_rank_and_group_is_its_own_class() -> None:
    found = singleton_classes(program_of(Layout(tp=2, dp=2), "tp", "dp"))
    assert found.count == 4
    assert found.representative.tolist() == [0, 1, 2, 3]
    assert found.group_colours["tp"].tolist() == [0, 1]


def test_sixteen_thousand_ranks_fold_to_their_pipeline_ranks() -> None:
    layout = Layout(tp=8, dp=128, pp=16)
    program = program_of(layout, "tp", "dp", "model", "world", "pp_next", "pp_previous", "embedding")
    assert symmetry_classes(program, {}).count == 16
    found = symmetry_classes(program, {"tp": slow(2048, 5)})
    assert 16 < found.count <= 64, "the slow group's pipeline, and whoever reduces with it"


Colour = Hashable


def refined(program: Program, costs: Mapping[str, np.ndarray]) -> Partition:
    """Colour refinement as it is written in textbooks: colours are whole tuples, numbered afresh in each round."""
    colour: dict[int, int] = dict(enumerate(program.program_index.tolist()))
    while True:
        seen: dict[int, Colour] = {rank: (colour[rank], _met(program, costs, colour, rank)) for rank in colour}
        numbers = {item: number for number, item in enumerate(dict.fromkeys(seen.values()))}
        if len(numbers) == len(set(colour.values())):
            return partition(np.array(list(colour.values())))
        colour = {rank: numbers[seen[rank]] for rank in colour}


def _met(program: Program, costs: Mapping[str, np.ndarray], colour: dict[int, int], rank: int) -> Colour:
    """Every group that a rank is in: its role, the rank's place where that matters, its cost and its members."""
    met = []
    for role, groups in program.groups.items():
        for row, members in enumerate(groups.members.tolist()):
            if rank in members:
                cost = tuple(costs[role][row].tolist()) if role in costs else ()
                colours = [colour[member] for member in members]
                place = members.index(rank) if groups.ordered else -1
                met.append((role, place, cost, tuple(colours if groups.ordered else sorted(colours))))
    return tuple(sorted(met))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, dict[str, np.ndarray]]:
    """Up to 10 ranks of up to 3 kinds, in up to 3 roles of groups and 2 of pairs, at costs of 1 or 2."""
    ranks = draw(st.integers(1, 10))
    kind = draw(st.lists(st.integers(0, draw(st.integers(0, 2))), min_size=ranks, max_size=ranks))
    groups = {role: draw(_groups(ranks)) for role in draw(st.sets(st.sampled_from(["tp", "dp", "world"])))}
    if ranks > 1:
        groups |= {role: draw(_pairs(ranks)) for role in draw(st.sets(st.sampled_from(["pp_next", "pp_previous"])))}
    seconds = st.sampled_from([1.0, 1.0, 1.0, 2.0])
    costs = {
        role: np.array(draw(st.lists(st.tuples(seconds, seconds), min_size=len(rows), max_size=len(rows))))
        for role, rows in sorted(groups.items())
        if draw(st.booleans())
    }
    return plain(ranks, groups, kind), costs


@st.composite
def _groups(draw: st.DrawFn, ranks: int) -> list[list[int]]:
    """Some groups of one size, without overlap."""
    size = draw(st.integers(1, ranks))
    order = draw(st.permutations(range(ranks)))
    count = draw(st.integers(1, ranks // size))
    return [list(order[size * number : size * (number + 1)]) for number in range(count)]


@st.composite
def _pairs(draw: st.DrawFn, ranks: int) -> list[list[int]]:
    """Each rank sends in at most one pair and receives in at most one; nobody sends to itself."""
    targets = draw(st.permutations(range(ranks)))
    pairs = [[source, target] for source, target in enumerate(targets) if source != target]
    return pairs[: draw(st.integers(1, ranks))] or [[0, 1]]


@given(cases())
@examples(400)
def test_classes_are_those_of_textbook_refinement(case: tuple[Program, dict[str, np.ndarray]]) -> None:
    program, costs = case
    found = symmetry_classes(program, costs)
    assert partition(found.rank_colours) == refined(program, costs)
    lowest = [int(np.flatnonzero(found.rank_colours == colour)[0]) for colour in found.rank_colours]
    assert found.representative.tolist() == lowest


@given(cases())
@examples(200)
def test_groups_of_one_colour_cost_the_same_and_have_members_of_the_same_colours(
    case: tuple[Program, dict[str, np.ndarray]],
) -> None:
    program, costs = case
    found = symmetry_classes(program, costs)
    for role, groups in program.groups.items():
        known: dict[int, Colour] = {}
        for row, colour in enumerate(found.group_colours[role].tolist()):
            inside = found.rank_colours[groups.members[row]].tolist()
            cost = tuple(costs[role][row].tolist()) if role in costs else ()
            like = (cost, tuple(inside if groups.ordered else sorted(inside)))
            assert known.setdefault(colour, like) == like
        assert len(set(known.values())) == len(known)
