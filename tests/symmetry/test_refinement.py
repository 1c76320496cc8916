"""Rank equivalence classes: color refinement against a simple reference, and partitions worked out by hand."""

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
EMPTY_PROGRAM = RankProgram((), ())


def layout_program(layout: Layout, *comm_groups: str) -> Program:
    """Every pipeline rank has a program of its own."""
    groups = process_groups(layout, looped_placement(layout.pp))
    return Program(
        (EMPTY_PROGRAM,) * layout.pp,
        layout.mesh.rank_coordinates(PIPELINE),
        {comm_group: groups[comm_group] for comm_group in comm_groups},
    )


def make_program(ranks: int, groups: Mapping[str, list[list[int]]], program_index: list[int] | None = None) -> Program:
    """A program with groups of given members; types that start with pp are ordered pairs (sender, receiver)."""
    groups_by_type = {
        comm_group: ProcessGroups(comm_group, np.array(members), ordered=comm_group.startswith("pp"))
        for comm_group, members in groups.items()
    }
    program_indices = np.array(program_index or [0] * ranks)
    return Program((EMPTY_PROGRAM,) * (int(program_indices.max()) + 1), program_indices, groups_by_type)


def slow_groups(groups: int, *group_indices: int) -> np.ndarray:
    """One communication operation takes 1 s in every group, 2 s in these."""
    seconds = np.ones((groups, 1))
    seconds[list(group_indices)] = 2.0
    return seconds


def partition(labels: np.ndarray) -> Partition:
    return frozenset(frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist()))


def make_partition(*sets: set[int]) -> Partition:
    return frozenset(map(frozenset, sets))


def test_replicas_of_a_pipeline_rank_are_one_class() -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=3)
    program = layout_program(layout, "tp", "cp", "dp", "model", "world", "pp_next", "pp_previous", "embedding")
    rank_classes = symmetry_classes(program, {})
    assert rank_classes.count == 3
    assert partition(rank_classes.rank_colours) == partition(layout.mesh.rank_coordinates(PIPELINE))
    assert rank_classes.representative.tolist() == [16 * stage for stage in range(3) for _ in range(16)]


def test_equally_slow_groups_stay_equivalent() -> None:
    layout = Layout(tp=2, dp=2, pp=2)
    program = layout_program(layout, "tp", "dp")
    assert symmetry_classes(program, {"tp": np.full((4, 2), 3.0), "dp": np.full((4, 1), 2.0)}).count == 2


def test_a_slow_group_splits_only_its_members() -> None:
    """DP groups of tp 2 x dp 2 x pp 2 are 0 2 | 1 3 | 4 6 | 5 7; the second is slow; no other groups exist."""
    program = layout_program(Layout(tp=2, dp=2, pp=2), "dp")
    assert program.groups["dp"].members.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    rank_classes = symmetry_classes(program, {"dp": slow_groups(4, 1)})
    assert partition(rank_classes.rank_colours) == make_partition({0, 2}, {1, 3}, {4, 5, 6, 7})


def test_a_slow_group_splits_the_peers_of_its_members() -> None:
    """Pipeline neighbours of ranks 1 and 3 are 5 and 7: they wait for slow ranks, 4 and 6 do not."""
    program = layout_program(Layout(tp=2, dp=2, pp=2), "dp", "pp_next", "pp_previous")
    rank_classes = symmetry_classes(program, {"dp": slow_groups(4, 1)})
    assert partition(rank_classes.rank_colours) == make_partition({0, 2}, {1, 3}, {4, 6}, {5, 7})


def test_a_slow_pair_splits_a_chain_of_pairs() -> None:
    """0 -> 1 -> 2 and 3 -> 4 -> 5, where the pair 0 -> 1 is slow, and 6 alone."""
    program = make_program(7, {"pp_next": [[0, 1], [1, 2], [3, 4], [4, 5]]})
    assert partition(symmetry_classes(program, {}).rank_colours) == make_partition({0, 3}, {1, 4}, {2, 5}, {6})
    rank_classes = symmetry_classes(program, {"pp_next": slow_groups(4, 0)})
    assert partition(rank_classes.rank_colours) == make_partition({0}, {1}, {2}, {3}, {4}, {5}, {6})


def test_ordered_pairs_distinguish_sender_and_receiver() -> None:
    ranks = [[0, 1], [3, 2]]
    assert partition(symmetry_classes(make_program(4, {"pp_next": ranks}), {}).rank_colours) == make_partition(
        {0, 3}, {1, 2}
    )
    assert partition(symmetry_classes(make_program(4, {"dp": ranks}), {}).rank_colours) == make_partition({0, 1, 2, 3})


def test_ranks_without_a_group_differ_from_members() -> None:
    assert partition(symmetry_classes(make_program(4, {"dp": [[0, 1]]}), {}).rank_colours) == make_partition(
        {0, 1}, {2, 3}
    )


def test_groups_are_distinguished_by_their_member_multiset() -> None:
    """Two kinds; groups AAB, AAB and ABB: an A among As differs from an A among Bs."""
    program_index = [0, 0, 1, 0, 1, 0, 0, 1, 1]
    program = make_program(9, {"dp": [[0, 1, 2], [3, 4, 5], [6, 7, 8]]}, program_index)
    assert partition(symmetry_classes(program, {}).rank_colours) == make_partition({0, 1, 3, 5}, {2, 4}, {6}, {7, 8})


def test_unfolded_ranks_and_groups_are_singleton_classes() -> None:
    rank_classes = singleton_classes(layout_program(Layout(tp=2, dp=2), "tp", "dp"))
    assert rank_classes.count == 4
    assert rank_classes.representative.tolist() == [0, 1, 2, 3]
    assert rank_classes.group_colours["tp"].tolist() == [0, 1]


def test_sixteen_thousand_ranks_fold_to_their_pipeline_ranks() -> None:
    layout = Layout(tp=8, dp=128, pp=16)
    program = layout_program(layout, "tp", "dp", "model", "world", "pp_next", "pp_previous", "embedding")
    assert symmetry_classes(program, {}).count == 16
    rank_classes = symmetry_classes(program, {"tp": slow_groups(2048, 5)})
    assert 16 < rank_classes.count <= 64, "the slow group's pipeline, and whoever reduces with it"


Signature = Hashable


def reference_refinement(program: Program, costs: Mapping[str, np.ndarray]) -> Partition:
    """Textbook color refinement: labels are whole tuples, renumbered in each round."""
    labels: dict[int, int] = dict(enumerate(program.program_index.tolist()))
    while True:
        signatures: dict[int, Signature] = {
            rank: (labels[rank], _group_signatures(program, costs, labels, rank)) for rank in labels
        }
        new_labels = {signature: label for label, signature in enumerate(dict.fromkeys(signatures.values()))}
        if len(new_labels) == len(set(labels.values())):
            return partition(np.array(list(labels.values())))
        labels = {rank: new_labels[signatures[rank]] for rank in labels}


def _group_signatures(
    program: Program, costs: Mapping[str, np.ndarray], labels: dict[int, int], rank: int
) -> Signature:
    """Every group of a rank: its type, the rank's position if ordered, its cost and its members' labels."""
    signatures = []
    for comm_group, groups in program.groups.items():
        for group_index, members in enumerate(groups.members.tolist()):
            if rank in members:
                cost = tuple(costs[comm_group][group_index].tolist()) if comm_group in costs else ()
                member_labels = [labels[member] for member in members]
                position = members.index(rank) if groups.ordered else -1
                signatures.append(
                    (comm_group, position, cost, tuple(member_labels if groups.ordered else sorted(member_labels)))
                )
    return tuple(sorted(signatures))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, dict[str, np.ndarray]]:
    """Up to 10 ranks of up to 3 programs, in up to 3 group types and 2 pair types, at costs of 1 or 2."""
    ranks = draw(st.integers(1, 10))
    program_index = draw(st.lists(st.integers(0, draw(st.integers(0, 2))), min_size=ranks, max_size=ranks))
    groups = {comm_group: draw(_groups(ranks)) for comm_group in draw(st.sets(st.sampled_from(["tp", "dp", "world"])))}
    if ranks > 1:
        groups |= {
            comm_group: draw(_pairs(ranks)) for comm_group in draw(st.sets(st.sampled_from(["pp_next", "pp_previous"])))
        }
    seconds = st.sampled_from([1.0, 1.0, 1.0, 2.0])
    costs = {
        comm_group: np.array(draw(st.lists(st.tuples(seconds, seconds), min_size=len(members), max_size=len(members))))
        for comm_group, members in sorted(groups.items())
        if draw(st.booleans())
    }
    return make_program(ranks, groups, program_index), costs


@st.composite
def _groups(draw: st.DrawFn, ranks: int) -> list[list[int]]:
    """Some groups of one size, without overlap."""
    size = draw(st.integers(1, ranks))
    order = draw(st.permutations(range(ranks)))
    count = draw(st.integers(1, ranks // size))
    return [list(order[size * index : size * (index + 1)]) for index in range(count)]


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
    rank_classes = symmetry_classes(program, costs)
    assert partition(rank_classes.rank_colours) == reference_refinement(program, costs)
    lowest = [int(np.flatnonzero(rank_classes.rank_colours == label)[0]) for label in rank_classes.rank_colours]
    assert rank_classes.representative.tolist() == lowest


@given(cases())
@examples(200)
def test_groups_of_one_label_have_equal_costs_and_member_labels(
    case: tuple[Program, dict[str, np.ndarray]],
) -> None:
    program, costs = case
    rank_classes = symmetry_classes(program, costs)
    for comm_group, groups in program.groups.items():
        signatures: dict[int, Signature] = {}
        for group_index, label in enumerate(rank_classes.group_colours[comm_group].tolist()):
            member_labels = rank_classes.rank_colours[groups.members[group_index]].tolist()
            cost = tuple(costs[comm_group][group_index].tolist()) if comm_group in costs else ()
            signature = (cost, tuple(member_labels if groups.ordered else sorted(member_labels)))
            assert signatures.setdefault(label, signature) == signature
        assert len(set(signatures.values())) == len(signatures)
