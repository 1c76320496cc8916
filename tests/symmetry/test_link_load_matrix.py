"""Which links are alike? By hand, and against colour refinement as it is written in textbooks."""

from collections.abc import Hashable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.symmetry.link_load_matrix import LinkColourRefinement, LinkLoadMatrix, LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes, symmetry_classes
from tests.conftest import examples

Entries = list[tuple[int, int, float]]
NOTHING = RankProgram((), ())


def crossings(*entries: tuple[int, int, float]) -> LinkLoadMatrix:
    """Entries of (group, link, seconds)."""
    group, link, seconds = zip(*entries, strict=True) if entries else ((), (), ())
    return LinkLoadMatrix(np.array(group, np.int64), np.array(link, np.int64), np.array(seconds, np.float64))


def plain(ranks: int, groups: Mapping[str, list[list[int]]]) -> Program:
    made = {role: ProcessGroups(role, np.array(rows)) for role, rows in groups.items()}
    return Program((NOTHING,), np.zeros(ranks, np.int64), made)


def found(ranks: int, groups: Mapping[str, list[list[int]]], links: list[int], **entries: Entries) -> SymmetryClasses:
    traffic = LinkTraffic(np.array(links), {role: [crossings(*entry)] for role, entry in entries.items()})
    return symmetry_classes(plain(ranks, groups), {}, traffic)


def partition(colour: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(np.flatnonzero(colour == item).tolist()) for item in set(colour.tolist()))


def parts(*sets: set[int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, sets))


PAIRS = [[0, 1], [2, 3], [4, 5]]


def test_links_that_carry_the_same_are_alike() -> None:
    got = found(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0)])
    assert got.count == 1
    assert got.link_colours.tolist() == [0, 0, 0]


def test_a_crowded_link_tells_apart_who_crosses_it() -> None:
    """Pairs 0 and 1 share link 0, pair 2 has link 1 for itself, link 2 carries nothing."""
    got = found(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 0, 1.0), (2, 1, 1.0)])
    assert partition(got.rank_colours) == parts({0, 1, 2, 3}, {4, 5})
    assert partition(got.link_colours) == parts({0}, {1}, {2})


def test_how_busy_a_link_is_tells_too() -> None:
    got = found(6, {"dp": PAIRS}, [0, 0, 0], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 2.0)])
    assert partition(got.rank_colours) == parts({0, 1, 2, 3}, {4, 5})


def test_a_link_of_another_kind_tells_too() -> None:
    got = found(6, {"dp": PAIRS}, [0, 0, 1], dp=[(0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0)])
    assert partition(got.rank_colours) == parts({0, 1, 2, 3}, {4, 5})


def test_what_crosses_is_felt_through_other_links() -> None:
    """A chain: pair 0 crosses links 0 and 1, pair 1 links 1 and 2, pair 2 link 3: nobody is alike."""
    got = found(6, {"dp": PAIRS}, [0] * 4, dp=[(0, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)])
    assert partition(got.rank_colours) == parts({0, 1, 2, 3}, {4, 5})
    got = found(6, {"dp": PAIRS}, [1, 0, 0, 0], dp=[(0, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)])
    assert partition(got.rank_colours) == parts({0, 1}, {2, 3}, {4, 5})


def test_roles_are_not_mistaken_for_each_other() -> None:
    """Link 0 carries a group of dp, link 1 one of pp with the same members."""
    groups = {"dp": [[0, 1]], "pp": [[0, 1]]}
    got = found(2, groups, [0, 0], dp=[(0, 0, 1.0)], pp=[(0, 1, 1.0)])
    assert partition(got.link_colours) == parts({0}, {1})


def test_unfolded_every_link_is_its_own_class() -> None:
    assert singleton_classes(plain(2, {}), 3).link_colours.tolist() == [0, 1, 2]
    assert singleton_classes(plain(2, {})).link_colours.tolist() == []


Colour = Hashable


def textbook(ranks: int, groups: Mapping[str, list[list[int]]], links: list[int], entries: Mapping[str, Entries]):
    """Colours are whole tuples, numbered afresh in each round; returns partitions of ranks and links."""
    rank, link = [0] * ranks, list(links)
    rows = [(role, row) for role in groups for row in range(len(groups[role]))]
    group: dict[tuple[str, int], int] = dict.fromkeys(rows, 0)
    while True:
        crossed = {(role, row): [] for role, row in rows}
        carried: list[list[Colour]] = [[] for _ in links]
        for role, entry in entries.items():
            for row, number, seconds in entry:
                crossed[role, row].append((link[number], seconds))
                carried[number].append((role, group[role, row], seconds))
        new_group = numbered(
            [
                (
                    group[key],
                    key[0],
                    tuple(sorted(rank[m] for m in groups[key[0]][key[1]])),
                    tuple(sorted(crossed[key])),
                )
                for key in rows
            ]
        )
        member = [tuple(group[role, row] for role, row in rows if r in groups[role][row]) for r in range(ranks)]
        new_rank = numbered([(rank[r], member[r]) for r in range(ranks)])
        new_link = numbered([(link[number], tuple(sorted(carried[number]))) for number in range(len(links))])
        done = [len(set(new)) == len(set(old)) for new, old in ((new_rank, rank), (new_link, link))]
        if all(done) and len(set(new_group)) == len(set(group.values())):
            return partition(np.array(rank)), partition(np.array(link))
        rank, link, group = new_rank, new_link, dict(zip(rows, new_group, strict=True))


def numbered(colours: list[Colour]) -> list[int]:
    numbers = {colour: number for number, colour in enumerate(dict.fromkeys(colours))}
    return [numbers[item] for item in colours]


@st.composite
def structures(draw: st.DrawFn):
    """Ranks in two roles of pairs, routed over few links, mostly regularly."""
    ranks = draw(st.sampled_from([2, 4, 6, 8]))
    groups = {role: np.array(draw(st.permutations(range(ranks)))).reshape(-1, 2).tolist() for role in ("dp", "pp")}
    count = draw(st.integers(1, 6))
    entries: dict[str, Entries] = {}
    for role, rows in groups.items():
        hops = draw(st.lists(st.integers(0, 5), max_size=2, unique=True))
        wide = draw(st.integers(1, 3))
        regular = {(row, (row // wide + hop) % count) for row in range(len(rows)) for hop in hops}
        odd = draw(st.sets(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, count - 1)), max_size=1))
        entries[role] = [(*pair, draw(st.sampled_from([1.0, 1.0, 2.0]))) for pair in sorted(regular | odd)]
    return ranks, groups, draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), entries


@given(structures())
@examples(300)
def test_ranks_and_links_fold_as_the_textbook_says(case) -> None:
    ranks, groups, links, entries = case
    first = np.unique(links, return_inverse=True)[1].tolist()
    got = found(ranks, groups, first, **entries)
    assert (partition(got.rank_colours), partition(got.link_colours)) == textbook(ranks, groups, first, entries)


def test_the_order_of_entries_changes_no_colour() -> None:
    rng = np.random.default_rng(1)
    entries = [
        (int(g), int(link), float(s)) for g, link, s in zip(*rng.integers(0, 9, (2, 50)), rng.random(50), strict=True)
    ]
    shuffled = [entries[place] for place in rng.permutation(50)]
    once, again = (
        LinkColourRefinement(LinkTraffic(np.zeros(9, np.int64), {"dp": [crossings(*listed)]}), {"dp": 9})
        for listed in (entries, shuffled)
    )
    for colours in (once, again):
        colours.refine({"dp": np.arange(9) % 3})
    assert once.colour.tolist() == again.colour.tolist()
