"""Link equivalence classes, by hand and against textbook color refinement."""

from collections.abc import Hashable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.symmetry.link_load_matrix import LinkColourRefinement, LinkLoadMatrix, LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes, symmetry_classes
from tests.conftest import examples

Entries = list[tuple[int, int, float]]
EMPTY_PROGRAM = RankProgram((), ())


def link_loads(*entries: tuple[int, int, float]) -> LinkLoadMatrix:
    """Entries of (group, link, seconds)."""
    group, link, seconds = zip(*entries, strict=True) if entries else ((), (), ())
    return LinkLoadMatrix(np.array(group, np.int64), np.array(link, np.int64), np.array(seconds, np.float64))


def make_program(ranks: int, groups: Mapping[str, list[list[int]]]) -> Program:
    groups_by_type = {
        comm_group: ProcessGroups(comm_group, np.array(members)) for comm_group, members in groups.items()
    }
    return Program((EMPTY_PROGRAM,), np.zeros(ranks, np.int64), groups_by_type)


def refine_classes(
    ranks: int, groups: Mapping[str, list[list[int]]], links: list[int], **entries: Entries
) -> SymmetryClasses:
    load_matrices = LinkTraffic(
        np.array(links), {comm_group: [link_loads(*entry)] for comm_group, entry in entries.items()}
    )
    return symmetry_classes(make_program(ranks, groups), {}, load_matrices)


def partition(labels: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist()))


def make_partition(*sets: set[int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, sets))


PAIRS = [[0, 1], [2, 3], [4, 5]]


def test_links_with_equal_loads_are_equivalent() -> None:
    rank_classes = refine_classes(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0)])
    assert rank_classes.count == 1
    assert rank_classes.link_colours.tolist() == [0, 0, 0]


def test_a_contended_link_distinguishes_its_users() -> None:
    """Pairs 0 and 1 share link 0, pair 2 has link 1 for itself, link 2 carries nothing."""
    rank_classes = refine_classes(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 0, 1.0), (2, 1, 1.0)])
    assert partition(rank_classes.rank_colours) == make_partition({0, 1, 2, 3}, {4, 5})
    assert partition(rank_classes.link_colours) == make_partition({0}, {1}, {2})


def test_load_distinguishes_links() -> None:
    rank_classes = refine_classes(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 2.0)])
    assert partition(rank_classes.rank_colours) == make_partition({0, 1, 2, 3}, {4, 5})


def test_initial_labels_distinguish_links() -> None:
    rank_classes = refine_classes(6, {"dp": PAIRS}, [0, 0, 1], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0)])
    assert partition(rank_classes.rank_colours) == make_partition({0, 1, 2, 3}, {4, 5})


def test_differences_propagate_through_shared_links() -> None:
    """A chain: pair 0 crosses links 0 and 1, pair 1 links 1 and 2, pair 2 link 3: nobody is alike."""
    rank_classes = refine_classes(
        6, {"dp": PAIRS}, [0] * 4, dp=[(0, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)]
    )
    assert partition(rank_classes.rank_colours) == make_partition({0, 1, 2, 3}, {4, 5})
    rank_classes = refine_classes(
        6, {"dp": PAIRS}, [1, 0, 0, 0], dp=[(0, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)]
    )
    assert partition(rank_classes.rank_colours) == make_partition({0, 1}, {2, 3}, {4, 5})


def test_group_types_are_distinguished() -> None:
    """Link 0 carries a group of dp, link 1 one of pp with the same members."""
    groups = {"dp": [[0, 1]], "pp": [[0, 1]]}
    rank_classes = refine_classes(2, groups, [0, 0], dp=[(0, 0, 1.0)], pp=[(0, 1, 1.0)])
    assert partition(rank_classes.link_colours) == make_partition({0}, {1})


def test_unfolded_links_are_singleton_classes() -> None:
    assert singleton_classes(make_program(2, {}), 3).link_colours.tolist() == [0, 1, 2]
    assert singleton_classes(make_program(2, {})).link_colours.tolist() == []


Signature = Hashable


def reference_refinement(
    ranks: int, groups: Mapping[str, list[list[int]]], links: list[int], entries: Mapping[str, Entries]
):
    """Labels are whole tuples, renumbered in each round; returns partitions of ranks and links."""
    rank_labels, link_labels = [0] * ranks, list(links)
    group_keys = [(comm_group, group_index) for comm_group in groups for group_index in range(len(groups[comm_group]))]
    group_labels: dict[tuple[str, int], int] = dict.fromkeys(group_keys, 0)
    while True:
        crossed = {(comm_group, group_index): [] for comm_group, group_index in group_keys}
        carried: list[list[Signature]] = [[] for _ in links]
        for comm_group, entry in entries.items():
            for group_index, link_id, seconds in entry:
                crossed[comm_group, group_index].append((link_labels[link_id], seconds))
                carried[link_id].append((comm_group, group_labels[comm_group, group_index], seconds))
        new_group = renumber(
            [
                (
                    group_labels[key],
                    key[0],
                    tuple(sorted(rank_labels[m] for m in groups[key[0]][key[1]])),
                    tuple(sorted(crossed[key])),
                )
                for key in group_keys
            ]
        )
        member = [
            tuple(
                group_labels[comm_group, group_index]
                for comm_group, group_index in group_keys
                if r in groups[comm_group][group_index]
            )
            for r in range(ranks)
        ]
        new_rank = renumber([(rank_labels[r], member[r]) for r in range(ranks)])
        new_link = renumber([(link_labels[link_id], tuple(sorted(carried[link_id]))) for link_id in range(len(links))])
        is_stable = [len(set(new)) == len(set(old)) for new, old in ((new_rank, rank_labels), (new_link, link_labels))]
        if all(is_stable) and len(set(new_group)) == len(set(group_labels.values())):
            return partition(np.array(rank_labels)), partition(np.array(link_labels))
        rank_labels, link_labels, group_labels = new_rank, new_link, dict(zip(group_keys, new_group, strict=True))


def renumber(signatures: list[Signature]) -> list[int]:
    labels = {signature: label for label, signature in enumerate(dict.fromkeys(signatures))}
    return [labels[signature] for signature in signatures]


@st.composite
def structures(draw: st.DrawFn):
    """Ranks in two types of pairs, routed over few links, mostly regularly."""
    ranks = draw(st.sampled_from([2, 4, 6, 8]))
    groups = {
        comm_group: np.array(draw(st.permutations(range(ranks)))).reshape(-1, 2).tolist() for comm_group in ("dp", "pp")
    }
    count = draw(st.integers(1, 6))
    entries: dict[str, Entries] = {}
    for comm_group, members in groups.items():
        hops = draw(st.lists(st.integers(0, 5), max_size=2, unique=True))
        groups_per_link = draw(st.integers(1, 3))
        regular = {
            (group_index, (group_index // groups_per_link + hop) % count)
            for group_index in range(len(members))
            for hop in hops
        }
        odd = draw(st.sets(st.tuples(st.integers(0, len(members) - 1), st.integers(0, count - 1)), max_size=1))
        entries[comm_group] = [(*pair, draw(st.sampled_from([1.0, 1.0, 2.0]))) for pair in sorted(regular | odd)]
    return ranks, groups, draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), entries


@given(structures())
@examples(300)
def test_rank_and_link_classes_equal_the_reference(case) -> None:
    ranks, groups, links, entries = case
    initial_labels = np.unique(links, return_inverse=True)[1].tolist()
    rank_classes = refine_classes(ranks, groups, initial_labels, **entries)
    assert (partition(rank_classes.rank_colours), partition(rank_classes.link_colours)) == reference_refinement(
        ranks, groups, initial_labels, entries
    )


def test_labels_do_not_depend_on_the_order_of_entries() -> None:
    rng = np.random.default_rng(1)
    entries = [
        (int(g), int(link), float(s)) for g, link, s in zip(*rng.integers(0, 9, (2, 50)), rng.random(50), strict=True)
    ]
    shuffled = [entries[index] for index in rng.permutation(50)]
    in_order, permuted = (
        LinkColourRefinement(LinkTraffic(np.zeros(9, np.int64), {"dp": [link_loads(*listed)]}), {"dp": 9})
        for listed in (entries, shuffled)
    )
    for refinement in (in_order, permuted):
        refinement.refine({"dp": np.arange(9) % 3})
    assert in_order.colour.tolist() == permuted.colour.tolist()
