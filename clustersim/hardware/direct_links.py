"""Direct links between the GPUs of a node without NVLink switches.

Some pairs have one or more links, and others none: the fully connected xGMI of MI300X, the hybrid cube mesh
of DGX-1. A transfer uses its pair's links only, so one pair has a fraction of a GPU's total bandwidth; where
there are none, the GPU between that has most of them relays it (NCCL's PATH_NVB). A collective can choose its
neighbours: the library searches rings over the members' links that share none in the same direction, and
gives each an equal share of the payload. The load of a pair is the share of the rings that pass it.

Assumption: as many rings as can be found are used. Where all pairs of a group have equally many links, rings
can use all of them evenly (the directed cycles through all members do, taken together); else they are
searched, as NCCL does. Without any ring, the members' own order is the ring, and GPUs between relay its
messages.
Reference: NVIDIA DGX-1 system architecture WP-08437-002 (three rings of single links); NVIDIA/nccl
src/graph/search.cc and paths.cc (v2.30); AMD CDNA 3 architecture whitepaper (seven links to seven GPUs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, runtime_checkable

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_method
from clustersim.common.pickling import FieldPickling

MAX_DOMAIN_GPUS: Final = 16
MAX_SEARCHED_GPUS: Final = 8  # GPUs of a domain whose pairs have unequal numbers of links
_MAX_SEARCH_STEPS: Final = 20_000  # limit of a ring search; then the largest set so far is used

Ring = tuple[int, ...]
"""GPU indices in the order in which data passes them, the smallest first."""


@dataclass(frozen=True)
class DirectLinks(FieldPickling):
    """link_counts: [domain GPUs][domain GPUs] links between two GPUs of a domain, symmetric.

    Not slotted: tables are computed once, on first access.
    """

    link_counts: tuple[tuple[int, ...], ...]

    @classmethod
    def fully_connected(cls, gpu_count: int) -> "DirectLinks":
        """One link for every pair."""
        return cls(tuple(tuple(int(source != target) for target in range(gpu_count)) for source in range(gpu_count)))

    @classmethod
    def from_pairs(cls, gpu_count: int, links: Sequence[tuple[int, int]]) -> "DirectLinks":
        """One link per listed pair; pairs that are listed twice have two."""
        counts = np.zeros((gpu_count, gpu_count), np.int64)
        for source, target in links:
            counts[source, target] += 1
            counts[target, source] += 1
        return cls(tuple(map(tuple, counts.tolist())))

    def restrict_to_first(self, gpu_count: int) -> "DirectLinks":
        """The links among the first `gpu_count` GPUs."""
        return DirectLinks(tuple(counts[:gpu_count] for counts in self.link_counts[:gpu_count]))

    @property
    def domain_size(self) -> int:
        """Number of GPUs of a domain."""
        return len(self.link_counts)

    @cached_property
    def link_matrix(self) -> IntArray:
        """[domain GPUs, domain GPUs] number of links of each pair."""
        return np.array(self.link_counts, np.int64)

    @property
    def max_links_per_gpu(self) -> int:
        """Number of links of the GPU that has most."""
        return int(self.link_matrix.sum(axis=1).max())

    @cached_property
    def distinct_link_counts(self) -> tuple[int, ...]:
        """The distinct numbers of links of linked pairs, ascending."""
        return tuple(int(link_count) for link_count in np.unique(self.link_matrix) if link_count)

    def pairs_with(self, link_count: int) -> IntArray:
        """Pairs with `link_count` links, [pairs, 2], the lower index first, ordered by the higher one."""
        high, low = np.nonzero(np.tril(self.link_matrix) == link_count)
        return np.stack([low, high], axis=1)

    @cached_property
    def pair_index(self) -> IntArray:
        """[domain GPUs, domain GPUs] index of each pair among those with as many links; -1 where there are no links."""
        pair_index = np.full_like(self.link_matrix, -1)
        for link_count in self.distinct_link_counts:
            low, high = self.pairs_with(link_count).T
            pair_index[low, high] = pair_index[high, low] = np.arange(len(low))
        return pair_index

    @cached_property
    def relay(self) -> IntArray:
        """[domain GPUs, domain GPUs] index of the GPU that relays from one to the other.

        It is the target itself where both are linked, and -1 where no GPU has links to both.
        """
        bottleneck = np.minimum(self.link_matrix[:, :, None], self.link_matrix[None, :, :])  # source, relay, target
        best = np.where(bottleneck.max(axis=1) > 0, bottleneck.argmax(axis=1), -1)
        targets = np.arange(self.domain_size)
        is_linked = (self.link_matrix > 0) | (targets[:, None] == targets[None, :])
        return np.where(is_linked, targets[None, :], best)

    @cached_method
    def ring_shares(self, members: int) -> FloatArray | None:
        """[domain GPUs, domain GPUs] fraction of each member's traffic sent to each other one.

        Members' rows sum to 1.

        members: bit mask of GPU indices; None where no ring passes through all.
        """
        group = [index for index in range(self.domain_size) if members >> index & 1]
        member_links = self.link_matrix[np.ix_(group, group)]
        row_indices, column_indices = np.ix_(group, group)
        ring_shares = np.zeros(self.link_matrix.shape)
        off_diagonal = member_links[~np.eye(len(group), dtype=np.bool_)]
        if (off_diagonal == off_diagonal[:1]).all():
            if not off_diagonal.any():
                return None
            ring_shares[row_indices, column_indices] = (1.0 - np.eye(len(group))) / (len(group) - 1)
            return ring_shares
        rings = max_disjoint_rings(member_links)
        for ring in rings:
            for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
                ring_shares[group[source], group[target]] += 1.0 / len(rings)
        return ring_shares if rings else None


@runtime_checkable
class HasDirectLinks(Protocol):
    """A fabric that may have direct links between GPUs."""

    @property
    def direct_links(self) -> DirectLinks | None:
        """None where switches join the GPUs of a domain."""

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of GPUs in the machine, domain by domain (any shape).

        Modulo `direct_links.domain_size` it is the index in a domain.
        """

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """GPUs at these positions (any shape); the inverse of `domain_slots`."""


def max_disjoint_rings(link_matrix: IntArray) -> list[Ring]:
    """The largest set of rings through all GPUs that share no link in the same direction.

    >>> max_disjoint_rings(np.array([[0, 1, 1], [1, 0, 2], [1, 2, 0]]))
    [(0, 1, 2), (0, 2, 1)]
    """
    candidates, bound = list(_enumerate_rings(link_matrix)), int(link_matrix.sum(axis=1).min())
    best: list[Ring] = []
    steps = 0
    pending: list[tuple[int, list[Ring], IntArray]] = [(0, [], link_matrix)]
    while pending and len(best) < bound and steps < _MAX_SEARCH_STEPS:
        start, chosen, free_links = pending.pop()
        steps += 1
        best = max(best, chosen, key=len)
        for index in range(
            len(candidates) - 1, start - 1, -1
        ):  # pushed in reverse, so that the first one is tried first
            remaining = _remove_ring(free_links, candidates[index])
            if remaining is not None and len(chosen) + 1 + int(remaining.sum(axis=1).min()) > len(best):
                pending.append((index, [*chosen, candidates[index]], remaining))
    return best


def _enumerate_rings(link_matrix: IntArray, prefix: Ring = (0,)) -> Iterator[Ring]:
    """Every ring from GPU 0 through all others over linked pairs (Hamiltonian cycles)."""
    if len(prefix) == len(link_matrix):
        if link_matrix[prefix[-1], 0]:
            yield prefix
        return
    for index in np.flatnonzero(link_matrix[prefix[-1]]).tolist():
        if index not in prefix:
            yield from _enumerate_rings(link_matrix, (*prefix, index))


def _remove_ring(free_links: IntArray, ring: Ring) -> IntArray | None:
    """The free links of each direction without those of a ring; None if it needs one that is not free."""
    remaining = free_links.copy()
    remaining[list(ring), [*ring[1:], ring[0]]] -= 1
    return remaining if remaining.min() >= 0 else None
