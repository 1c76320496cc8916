"""How long are the documents that are packed into sequences, and how evenly does their attention load ranks?

Documents are packed end to end, cut where a sequence ends, and attention stays within each of them (kernels of
variable length: flash-attention's `flash_attn_varlen_func`, Transformer Engine's `thd` format): a document of d tokens
has d (d + 1) / 2 pairs of query and key, so equal numbers of tokens are unequal work. All other work depends on tokens
alone. Lengths are drawn once with the seed: log-normal with a mean and a shape sigma, or from a list.

Ranks wait for each other: context-parallel ranks in every microbatch, replicas in every microbatch where they exchange
weights or tokens of experts inside layers, else once a step. Attention is taken to last as on the ranks that have most
to do, added up over these waits (WLB-LLM, Wang et al. 2025, arXiv:2503.17924, sections 2 and 3); what a pipeline loses
between unequal microbatches is not counted. Of a sequence that context-parallel ranks share, each has its chunks
(`ContextSharding.SEQUENCE`) or its part of every document (DOCUMENT). Sequences go to microbatches in the order drawn,
or by their work, so that those of one microbatch are equal on all replicas (`SequenceOrder.WORK`).
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.model.kernels import PackedKeys

_CACHE_SIZE: Final = 64
MAX_DRAWN_DOCUMENTS: Final = 4_000_000
"""Documents of one step, at most."""


class ContextSharding(Enum):
    """What context-parallel ranks share evenly: the tokens of a SEQUENCE, in chunks, or those of each DOCUMENT."""

    SEQUENCE = "sequence"
    DOCUMENT = "document"


class SequenceOrder(Enum):
    """In which order sequences go to microbatches and replicas: as DRAWN, or by the WORK of their attention."""

    DRAWN = "drawn"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents that are packed into sequences.

    lengths: tokens, each as likely as the others; empty: log-normal with `mean` tokens and the standard deviation
    `sigma` of the logarithm. sharding: over context-parallel ranks; order: of sequences; draws: steps whose documents
    are drawn, each with the next seed.
    """

    lengths: tuple[int, ...] = ()
    mean: float = 0.0
    sigma: float = 0.0
    seed: int = 0
    sharding: ContextSharding = ContextSharding.SEQUENCE
    order: SequenceOrder = SequenceOrder.DRAWN
    draws: int = 1

    @property
    def other_draws(self) -> "tuple[Documents, ...]":
        """Those of the other steps that are drawn."""
        return tuple(replace(self, seed=self.seed + draw, draws=1) for draw in range(1, self.draws))

    def draw(self, tokens: int) -> IntArray:
        """Lengths of documents that have at least `tokens` tokens together."""
        generator = np.random.default_rng(self.seed)
        mean = float(np.mean(self.lengths)) if self.lengths else self.mean
        drawn: list[IntArray] = []
        total = 0
        while total < tokens:
            count = int(1.1 * (tokens - total) / mean) + 16
            if self.lengths:
                lengths = generator.choice(np.array(self.lengths, dtype=np.int64), count)
            else:
                location = np.log(self.mean) - self.sigma**2 / 2
                lengths = np.maximum(1, np.rint(generator.lognormal(location, self.sigma, count))).astype(np.int64)
            drawn.append(lengths)
            total += int(lengths.sum())
        return np.concatenate(drawn)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The sequences of one step, with packed documents.

    sequence: tokens; replicas, microbatches, microbatch: how many there are, of each replica, and sequences in one;
    ranks: context-parallel ranks that share a sequence in chunks (1: none, or heads are exchanged); zigzag: each has a
    chunk from both ends; replicas_wait: replicas wait for each other in every microbatch.
    """

    documents: Documents
    sequence: int
    replicas: int
    microbatches: int
    microbatch: int
    ranks: int = 1
    zigzag: bool = True
    replicas_wait: bool = False

    @property
    def sequence_count(self) -> int:
        """Sequences of a step."""
        return self.replicas * self.microbatches * self.microbatch

    def keys(self, window: int | None) -> PackedKeys:
        """Keys that queries of the busiest ranks attend to. window: of attention, None: there is none."""
        return _packed_keys(self, window)

    def piece_lengths(self) -> tuple[IntArray, IntArray]:
        """Distinct lengths of documents as they are cut by sequences, and how many there are of each."""
        return np.unique(_pieces(self)[1], return_counts=True)


@lru_cache(maxsize=_CACHE_SIZE)
def _pieces(batch: PackedBatch) -> tuple[IntArray, IntArray]:
    """Where documents begin, as sequences cut them, and their lengths: [pieces] each."""
    tokens = batch.sequence_count * batch.sequence
    ends = np.cumsum(batch.documents.draw(tokens))
    cuts = np.arange(1, batch.sequence_count + 1) * batch.sequence
    edges = np.unique(np.concatenate([[0], ends[ends < tokens], cuts]))
    return edges[:-1], np.diff(edges)


def _pairs(lengths: IntArray, window: int | None) -> FloatArray:
    """Pairs of query and key within the first `lengths` tokens of documents."""
    visible = lengths if window is None else np.minimum(lengths, window)
    return visible * (2.0 * lengths - visible + 1.0) / 2.0


@lru_cache(maxsize=_CACHE_SIZE)
def _packed_keys(batch: PackedBatch, window: int | None) -> PackedKeys:
    begins, lengths = _pieces(batch)
    work = _ordered(batch, _rank_work(batch, begins, lengths, window))
    per_wait = work.max(axis=2)  # context-parallel ranks wait in every microbatch
    busiest = per_wait.max(axis=1).sum() if batch.replicas_wait else per_wait.sum(axis=0).max()
    mean_keys = float(busiest) * batch.ranks / (batch.microbatches * batch.microbatch * batch.sequence)
    visible = lengths if window is None else np.minimum(lengths, window)
    full_ratio = float((lengths * visible).sum() / _pairs(lengths, window).sum())
    return PackedKeys(mean_keys, mean_keys * full_ratio, int(visible.max()))


def _rank_work(batch: PackedBatch, begins: IntArray, lengths: IntArray, window: int | None) -> FloatArray:
    """Pairs of query and key: [sequences, context-parallel ranks]."""
    sequences = begins // batch.sequence
    work = np.zeros((batch.sequence_count, batch.ranks))
    if batch.ranks == 1 or batch.documents.sharding is ContextSharding.DOCUMENT:
        totals = np.bincount(sequences, _pairs(lengths, window), batch.sequence_count)
        work += totals[:, None] / batch.ranks
        return work
    chunk_count = batch.ranks * (2 if batch.zigzag else 1)
    chunk = batch.sequence // chunk_count
    edges = np.unique(np.concatenate([begins, np.arange(batch.sequence_count * chunk_count) * chunk]))
    ends = np.append(edges[1:], batch.sequence_count * batch.sequence)
    starts = begins[np.searchsorted(begins, edges, side="right") - 1]
    chunks = edges % batch.sequence // chunk
    owners = np.minimum(chunks, chunk_count - 1 - chunks) if batch.zigzag else chunks
    np.add.at(work, (edges // batch.sequence, owners), _pairs(ends - starts, window) - _pairs(edges - starts, window))
    return work


def _ordered(batch: PackedBatch, work: FloatArray) -> FloatArray:
    """Work of each microbatch, replica and context-parallel rank: [microbatches, replicas, ranks]."""
    if batch.documents.order is SequenceOrder.DRAWN:
        shape = batch.microbatches, batch.replicas, batch.microbatch, batch.ranks
        drawn: FloatArray = work.reshape(shape).sum(axis=2)
        return drawn
    rounds = work[np.argsort(-work.sum(axis=1), kind="stable")].reshape(-1, batch.replicas, batch.ranks)
    rounds[1::2] = rounds[1::2, ::-1].copy()  # who had most of one round has least of the next
    shape = batch.microbatches, batch.microbatch, batch.replicas, batch.ranks
    by_work: FloatArray = rounds.reshape(shape).sum(axis=1)
    return by_work
