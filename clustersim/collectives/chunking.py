"""How is a payload chunked, and what do chunks cost?

Two effects of NCCL that bandwidth and latency do not describe:

- NVLS is fed by channels, each of which passes a chunk to every member's share of the sum. Processing a chunk
  takes as long as moving `chunk_overhead_bytes` more bytes would, so smaller chunks are slower; and smaller
  payloads get smaller chunks, in steps. The pipeline fills by one chunk of every channel and share.
- Trees deviate from the linear model at medium sizes; NCCL multiplies its own estimate by a correction factor
  for each power of two, between which the factors are interpolated here.

Reference: NVIDIA/nccl@5067397c, calcCollChunking in src/enqueue.cc, treeCorrectionFactor in
src/graph/tuning.cc.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes

CORRECTION_BASE_BYTES: Final = 64.0  # bytes to which the first correction factor applies


@dataclass(frozen=True, slots=True)
class ChunkSizeSteps:
    """Chunk sizes in descending order.

    smaller_chunks: (bytes, times) pairs; a chunk of `bytes` is used for payloads below `times` what all channels
    held with the chunk size before.
    """

    largest_chunk: Bytes
    smaller_chunks: tuple[tuple[Bytes, float], ...]

    def chunk_bytes(self, payload: Bytes, concurrent_chunks: FloatArray) -> FloatArray:
        """Bytes of one chunk when `concurrent_chunks` move at once: [classes]."""
        chunk = np.full(concurrent_chunks.shape, self.largest_chunk)
        for size, times in self.smaller_chunks:
            chunk = np.where((payload < times * concurrent_chunks * chunk) & (chunk > size), size, chunk)
        return chunk


@dataclass(frozen=True, slots=True)
class GroupShapes:
    """Shapes of groups, [classes] each. ranks: members; rails: routes out of each domain; domain_counts: domains."""

    ranks: IntArray
    rails: IntArray
    domain_counts: IntArray

    @classmethod
    def concatenate(cls, shapes: Sequence["GroupShapes"]) -> "GroupShapes":
        """Concatenate the shapes of several sets of groups."""
        columns = ((shape.ranks, shape.rails, shape.domain_counts) for shape in shapes)
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


def correction_factor(factors: Sequence[float], payload: Bytes) -> float:
    """Bandwidth correction factor of a tree at this payload size (1 without factors)."""
    if not factors or payload <= 0.0:
        return 1.0
    position = np.log2(max(payload / CORRECTION_BASE_BYTES, 1.0))
    return float(np.interp(position, np.arange(len(factors)), factors))
