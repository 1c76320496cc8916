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

FIRST: Final = 64.0  # bytes of the first factor of a pace


@dataclass(frozen=True, slots=True)
class Steps:
    """Chunks from the largest down: (bytes, times), for payloads below `times` what all channels held before."""

    largest: Bytes
    smaller: tuple[tuple[Bytes, float], ...]

    def of(self, payload: Bytes, beside: FloatArray) -> FloatArray:
        """Bytes of one chunk, where so many chunks move beside each other: [classes]."""
        chunk = np.full(beside.shape, self.largest)
        for size, times in self.smaller:
            chunk = np.where((payload < times * beside * chunk) & (chunk > size), size, chunk)
        return chunk


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of groups, [classes] each. ranks: members; rails: routes out of each domain; spans: domains."""

    ranks: IntArray
    rails: IntArray
    spans: IntArray

    @classmethod
    def beside(cls, parts: Sequence["Shapes"]) -> "Shapes":
        """Those of several sets."""
        columns = ((part.ranks, part.rails, part.spans) for part in parts)
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


def paced(pace: Sequence[float], payload: Bytes) -> float:
    """The part of its rate that a tree has at this size."""
    if not pace or payload <= 0.0:
        return 1.0
    place = np.log2(max(payload / FIRST, 1.0))
    return float(np.interp(place, np.arange(len(pace)), pace))
