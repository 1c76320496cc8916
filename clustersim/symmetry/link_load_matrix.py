"""Which links does traffic cross, and which of them are alike?

A group that communicates keeps links busy, each for some seconds per byte of its payload. Links start with the colours
that the fabric gives them (what they can carry) and are refined, beside ranks and groups (`symmetry`), by the multiset
of (colour of the group, seconds per byte) of what crosses them; groups by the multiset of (colour of the link, seconds
per byte) of what they cross. In a stable colouring, links of one colour carry equal loads whenever ranks of one colour
do the same, so max-min fair rates are equal too: one link of each colour stands for all.

Multisets are compared by a 64-bit hash: the wrapping sum, which does not depend on order, of the mixed hashes of their
members. Of n multisets two different ones fall together with a probability of about n²/2⁶⁵: 10⁻⁸ for a million.

Reference: as `symmetry`; for the mixer `splitmix`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, HashArray, IntArray
from clustersim.common.splitmix import finalized, splitmix64
from clustersim.symmetry.labels import joined, ranked


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """Which groups of one role keep which links busy: [entries] each; a pair of group and link occurs once.

    group: row in the role's groups; link: number in the fabric; seconds: for each byte of the group's payload.
    Compared by identity: exchanges that differ in nothing but payload share one.
    """

    group: IntArray
    link: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that crosses links. links: [links] first colours, equal for links of equal kind and bandwidth."""

    links: IntArray
    crossings: Mapping[str, Sequence[Crossings]]


NOTHING = Crossings(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
NO_TRAFFIC = Traffic(np.zeros(0, np.int64), {})


class LinkColours:
    """Colours of links while they are refined; `groups` counts the groups of each role."""

    def __init__(self, traffic: Traffic, groups: Mapping[str, int]) -> None:
        self.colour = traffic.links
        self._first = dict(zip(groups, np.cumsum([0, *groups.values()])[:-1].tolist(), strict=True))
        self._groups = dict(groups)
        found = [(self._first[role], crossings) for role, listed in traffic.crossings.items() for crossings in listed]
        self._group = np.concatenate([NOTHING.group, *(first + item.group for first, item in found)])
        self._link = np.concatenate([NOTHING.link, *(element.link for _, element in found)])
        label = np.repeat(np.arange(len(found)), [len(entry.link) for _, entry in found])
        seconds = np.concatenate([NOTHING.seconds, *(each.seconds for _, each in found)])
        self._entry = finalized(finalized(label.astype(np.uint64)) ^ seconds.view(np.uint64))

    @property
    def count(self) -> int:
        """How many colours there are."""
        return int(self.colour.max(initial=-1)) + 1

    def groups(self) -> dict[str, IntArray]:
        """For each role the colour of every group by the links that it crosses: [groups]."""
        mixed = finalized(self._entry ^ splitmix64(self.colour.astype(np.uint64))[self._link])
        hashes = _sums(self._group, mixed, sum(self._groups.values()))
        colours = ranked(hashes)
        return {role: colours[first : first + self._groups[role]] for role, first in self._first.items()}

    def refine(self, groups: Mapping[str, IntArray]) -> None:
        """Refine links by the colours of the groups that cross them."""
        if not len(self._link):
            return
        colour = np.concatenate([groups[role] for role in self._first])
        mixed = finalized(self._entry ^ splitmix64(colour.astype(np.uint64))[self._group])
        hashes = _sums(self._link, mixed, len(self.colour))
        self.colour = joined(self.colour, ranked(hashes))


def _sums(number: IntArray, hashes: HashArray, buckets: int) -> HashArray:
    """Wrapping sum of the hashes that fall into each bucket: [buckets], 0 for empty ones."""
    total = np.zeros(buckets, dtype=np.uint64)
    np.add.at(total, number, hashes)
    return total
