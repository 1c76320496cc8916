"""In what pieces does a payload travel, and what do pieces cost?

Two effects that a rate and a latency do not say, both of NCCL's own making:

- An adding switch is fed by channels, each of which hands a chunk of bytes to every member's share of the sum. Handling
  a chunk takes as long as moving `handling` more bytes would, so smaller chunks are slower; and smaller payloads get
  smaller chunks, by steps. A pipeline fills by one chunk of every channel and share.
- Trees do not stick to the model at medium sizes; NCCL corrects its own estimate by a factor for each power of two, its
  `pace` there, between which it is interpolated here.

Reference: NVIDIA/nccl@5067397c, calcCollChunking in src/enqueue.cc, treeCorrectionFactor in src/graph/tuning.cc.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes

CORRECTION_BASE_BYTES: Final = 64.0  # bytes of the first factor of a pace


@dataclass(frozen=True, slots=True)
class ChunkSizeSteps:
    """Chunks from the largest down: (bytes, times), for payloads below `times` what all channels held before."""

    largest_chunk: Bytes
    smaller_chunks: tuple[tuple[Bytes, float], ...]

    def chunk_bytes(self, payload: Bytes, concurrent_chunks: FloatArray) -> FloatArray:
        """Bytes of one chunk, where so many chunks move beside each other: [classes]."""
        chunk = np.full(concurrent_chunks.shape, self.largest_chunk)
        for size, times in self.smaller_chunks:
            chunk = np.where((payload < times * concurrent_chunks * chunk) & (chunk > size), size, chunk)
        return chunk


@dataclass(frozen=True, slots=True)
class GroupShapes:
    """Of groups, [classes] each. ranks: members; rails: routes out of each domain; spans: domains."""

    ranks: IntArray
    rails: IntArray
    domain_counts: IntArray

    @classmethod
    def concatenate(cls, shapes: Sequence["GroupShapes"]) -> "GroupShapes":
        """Those of several sets."""
        columns = ((shape.ranks, shape.rails, shape.domain_counts) for shape in shapes)
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


def correction_factor(factors: Sequence[float], payload: Bytes) -> float:
    """The part of its rate that a tree has at this size."""
    if not factors or payload <= 0.0:
        return 1.0
    position = np.log2(max(payload / CORRECTION_BASE_BYTES, 1.0))
    return float(np.interp(position, np.arange(len(factors)), factors))
