"""Link load matrices: which links does each group load, and which links are equivalent?

A group that communicates keeps links busy, each for some seconds per byte of its payload. Links start with
the colours that the fabric gives them (kind and bandwidth) and are refined together with ranks and groups
(`refinement`): links by the multiset of (group colour, seconds per byte) of the groups that load them, groups
by the multiset of (link colour, seconds per byte) of the links that they load. In a stable colouring, links
of one colour carry equal loads whenever ranks of one colour do the same, so max-min fair rates are equal too:
one link of each colour is simulated for all.

Multisets are compared by a 64-bit hash: the wrapping sum, which is independent of order, of the mixed hashes
of their members. Among n multisets the probability of any collision is about n²/2⁶⁵: 10⁻⁸ for a million.

Reference: as `refinement`; for the mixer `splitmix`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, HashArray, IntArray
from clustersim.common.splitmix import splitmix64, splitmix64_finalize
from clustersim.symmetry.labels import label_values, pair_labels


@dataclass(frozen=True, slots=True, eq=False)
class LinkLoadMatrix:
    """Sparse matrix (COO) of link load by group, for one kind of group: [entries] each; no duplicate entries.

    group_index: index among the kind's groups; link_index: in the fabric; seconds_per_byte: link busy time per
    payload byte. Compared by identity: comm ops that differ in nothing but payload share one matrix.
    """

    group_index: IntArray
    link_index: IntArray
    seconds_per_byte: FloatArray


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """All loads on links. link_colours: [links] initial colours, equal for links of equal kind and bandwidth.

    matrices: load matrices by kind of group.
    """

    link_colours: IntArray
    matrices: Mapping[str, Sequence[LinkLoadMatrix]]


NO_LINK_LOADS = LinkLoadMatrix(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
NO_TRAFFIC = LinkTraffic(np.zeros(0, np.int64), {})


class LinkColourRefinement:
    """Link colours during refinement; `group_counts` is the number of groups of each kind."""

    def __init__(self, traffic: LinkTraffic, group_counts: Mapping[str, int]) -> None:
        self.colour = traffic.link_colours
        self._group_offsets = dict(zip(group_counts, np.cumsum([0, *group_counts.values()])[:-1].tolist(), strict=True))
        self._group_counts = dict(group_counts)
        matrices = [
            (self._group_offsets[comm_group], matrix)
            for comm_group, group_matrices in traffic.matrices.items()
            for matrix in group_matrices
        ]
        self._group_index = np.concatenate(
            [NO_LINK_LOADS.group_index, *(offset + matrix.group_index for offset, matrix in matrices)]
        )
        self._link_index = np.concatenate([NO_LINK_LOADS.link_index, *(matrix.link_index for _, matrix in matrices)])
        matrix_label = np.repeat(np.arange(len(matrices)), [len(matrix.link_index) for _, matrix in matrices])
        seconds = np.concatenate([NO_LINK_LOADS.seconds_per_byte, *(matrix.seconds_per_byte for _, matrix in matrices)])
        self._entry_hashes = splitmix64_finalize(
            splitmix64_finalize(matrix_label.astype(np.uint64)) ^ seconds.view(np.uint64)
        )

    @property
    def count(self) -> int:
        """Number of link colours."""
        return int(self.colour.max(initial=-1)) + 1

    def group_colours(self) -> dict[str, IntArray]:
        """For each kind of group, [groups] colour of each group by the links that it loads."""
        mixed = splitmix64_finalize(self._entry_hashes ^ splitmix64(self.colour.astype(np.uint64))[self._link_index])
        hashes = _hash_sums(self._group_index, mixed, sum(self._group_counts.values()))
        colours = label_values(hashes)
        return {
            comm_group: colours[offset : offset + self._group_counts[comm_group]]
            for comm_group, offset in self._group_offsets.items()
        }

    def refine(self, group_colours: Mapping[str, IntArray]) -> None:
        """Refine link colours by the colours of the groups that load them."""
        if not len(self._link_index):
            return
        colour = np.concatenate([group_colours[comm_group] for comm_group in self._group_offsets])
        mixed = splitmix64_finalize(self._entry_hashes ^ splitmix64(colour.astype(np.uint64))[self._group_index])
        hashes = _hash_sums(self._link_index, mixed, len(self.colour))
        self.colour = pair_labels(self.colour, label_values(hashes))


def _hash_sums(bucket_index: IntArray, hashes: HashArray, bucket_count: int) -> HashArray:
    """Wrapping sum of the hashes in each bucket: [bucket_count], 0 for empty ones."""
    total = np.zeros(bucket_count, dtype=np.uint64)
    np.add.at(total, bucket_index, hashes)
    return total
