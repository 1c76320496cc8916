"""Which of several equally short routes does a transfer take?

A switch with parallel ways up either spreads every transfer evenly over all of them (packet spraying, adaptive
routing: the bundle acts as one link of the whole bandwidth), or hashes each pair of ends to one of them, so that two
transfers may collide on one link while another idles. The hash is splitmix64 over (seed, source, target): it is the
same on every machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from clustersim.common.arrays import HashArray, IntArray
from clustersim.common.splitmix import splitmix64

MAX_REHASHES: Final = 32  # then the dead links are so many that routes are searched


class Ecmp(Protocol):
    """How equal-cost ways are used."""

    def distinct_links(self, parallel_links: int) -> int:
        """How many links of their own `parallel` physical links are."""

    def choose_paths(self, sources: IntArray, targets: IntArray) -> HashArray:
        """A number per transfer, [n]; modulo the ways it says which one the transfer takes."""

    def rehashed(self) -> "Iterator[Ecmp]":
        """Other choices, for transfers that met a dead link."""

    @property
    def file_keys(self) -> Mapping[str, str | int]:
        """What a cluster's file says of it."""


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
        """That they are spread."""
        return {"ecmp": "spread"}


@dataclass(frozen=True, slots=True)
class HashedEcmp:
    """Each pair of ends takes one way, chosen by a hash of the pair and the seed."""

    seed: int

    def distinct_links(self, parallel_links: int) -> int:
        """Every physical link is a link of its own."""
        return parallel_links

    def choose_paths(self, sources: IntArray, targets: IntArray) -> HashArray:
        """A 64-bit hash per transfer."""
        seed = splitmix64(np.full(len(sources), self.seed, np.uint64))
        return splitmix64(splitmix64(seed ^ sources.astype(np.uint64)) ^ targets.astype(np.uint64))

    def rehashed(self) -> Iterator[Ecmp]:
        """Other hashes of the same pairs: what is hashed to a dead link spreads evenly over the living ones."""
        for attempt in range(1, MAX_REHASHES + 1):
            yield HashedEcmp(int(splitmix64(np.array([self.seed, attempt], np.uint64)).sum() >> np.uint64(1)))

    @property
    def file_keys(self) -> Mapping[str, str | int]:
        """That they are hashed, and how."""
        return {"ecmp": "hashed", "seed": self.seed}
