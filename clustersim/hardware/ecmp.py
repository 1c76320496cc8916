"""ECMP: which of several equally short routes does a transfer take?

A switch with parallel uplinks either spreads every transfer evenly over all of them (packet spraying,
adaptive routing: the bundle acts as one link of the summed bandwidth), or hashes each (source, target) pair
to one of them, so that two transfers may collide on one link while another idles. The hash is splitmix64 over
(seed, source, target): it is the same on every machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from clustersim.common.arrays import HashArray, IntArray
from clustersim.common.splitmix import splitmix64

MAX_REHASHES: Final = 32  # beyond it, routes are searched


class Ecmp(Protocol):
    """Protocol: how equal-cost paths are used."""

    def distinct_links(self, parallel_links: int) -> int:
        """Number of simulated links for `parallel_links` physical ones."""

    def choose_paths(self, sources: IntArray, targets: IntArray) -> HashArray:
        """An integer per transfer, [n]; modulo the number of paths it is the index of the transfer's path."""

    def rehashed(self) -> "Iterator[Ecmp]":
        """Other hashes, for transfers whose path has a dead link."""

    @property
    def file_keys(self) -> Mapping[str, str | int]:
        """Its keys and values in a cluster file."""


@dataclass(frozen=True, slots=True)
class SpreadEcmp:
    """Ideal ECMP: parallel links are one bundle; where a single route must be named, the first one."""

    def distinct_links(self, parallel_links: int) -> int:  # noqa: ARG002 - a bundle is one link however many links it has
        """One link for the whole bundle."""
        return 1

    def choose_paths(self, sources: IntArray, targets: IntArray) -> HashArray:  # noqa: ARG002 - the first way for everyone
        """Zero for every transfer."""
        return np.zeros(len(sources), np.uint64)

    def rehashed(self) -> Iterator[Ecmp]:
        """None: a bundle is one link."""
        return iter(())

    @property
    def file_keys(self) -> Mapping[str, str | int]:
        """Its keys and values in a cluster file."""
        return {"ecmp": "spread"}


@dataclass(frozen=True, slots=True)
class HashedEcmp:
    """Each (source, target) pair takes one path, chosen by a hash of the pair and the seed."""

    seed: int

    def distinct_links(self, parallel_links: int) -> int:
        """Every physical link is simulated as a link of its own."""
        return parallel_links

    def choose_paths(self, sources: IntArray, targets: IntArray) -> HashArray:
        """A 64-bit hash per transfer."""
        seed = splitmix64(np.full(len(sources), self.seed, np.uint64))
        return splitmix64(splitmix64(seed ^ sources.astype(np.uint64)) ^ targets.astype(np.uint64))

    def rehashed(self) -> Iterator[Ecmp]:
        """Other hashes of the same pairs: traffic hashed to a dead link is spread evenly over the alive ones."""
        for attempt in range(1, MAX_REHASHES + 1):
            yield HashedEcmp(int(splitmix64(np.array([self.seed, attempt], np.uint64)).sum() >> np.uint64(1)))

    @property
    def file_keys(self) -> Mapping[str, str | int]:
        """Its keys and values in a cluster file."""
        return {"ecmp": "hashed", "seed": self.seed}
