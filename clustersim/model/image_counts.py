"""How many images has each sequence of a step, how large are they, and how evenly do they load ranks?

Counts are drawn once with the seed: from a list, each as likely as the others, or gamma variates with a mean and a
coefficient of variation, rounded up or down at random so that the mean stays, and at most as many as a sequence holds.
Sizes are drawn from a list, too. Images of unequal sizes are packed: every operator works on the tokens of all, and
attention stays within each image (kernels of variable length; NaViT, Dehghani et al. 2023, arXiv:2307.06304, section
2; Qwen2-VL's `cu_seqlens`), so that a large image is more work than its tokens.

Ranks wait for each other: replicas of the encoder that share a microbatch in every one, other replicas in every
microbatch where they exchange weights inside layers, else once a step. The encoder is taken to last as on the replica
that has most work, added up over these waits, in whole images a microbatch (DistTrain, Zhang et al. 2024,
arXiv:2408.04275, section 2.3); what a pipeline loses between unequal microbatches is not counted, as with packed
documents (`model.documents`). Memory is that of the largest microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.model.kernels import PackedKeys

_CACHE_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """Images of a sequence: one of `counts`, or gamma variates of this mean and coefficient of variation.

    tokens: of an image in the encoder, each as likely as the others; empty: all have as many.
    """

    counts: tuple[int, ...] = ()
    mean: float = 0.0
    variation: float = 0.0
    seed: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def expected(self) -> float:
        """Mean number of images of a sequence."""
        return sum(self.counts) / len(self.counts) if self.counts else self.mean

    def draw(self, sequences: int, most: int) -> IntArray:
        """Images of each of some sequences: [sequences]. most: that one holds."""
        generator = np.random.default_rng(self.seed)
        if self.counts:
            listed: IntArray = np.minimum(most, generator.choice(np.array(self.counts, dtype=np.int64), sequences))
            return listed
        shape = 1.0 / self.variation**2
        exact = generator.gamma(shape, self.mean / shape, sequences) + generator.random(sequences)
        drawn: IntArray = np.minimum(most, np.floor(exact).astype(np.int64))
        return drawn

    def draw_tokens(self, images: int, usual: int) -> IntArray:
        """Tokens of each of some images in the encoder: [images]. usual: those of all where there are no others."""
        sizes = np.array(self.tokens or (usual,), dtype=np.int64)
        drawn: IntArray = np.random.default_rng((self.seed, 1)).choice(sizes, images)
        return drawn


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Images of a microbatch on one rank.

    count: images; tokens: of each, in the mean; packed_keys: that a token attends to, None: all of its image, whose
    size is the usual one.
    """

    count: int
    tokens: int
    packed_keys: PackedKeys | None = None

    def keys(self, window: int | None) -> PackedKeys | None:  # noqa: ARG002 - encoders of images have none
        """Keys that tokens of these images attend to."""
        return self.packed_keys


@dataclass(frozen=True, slots=True)
class ImageWork:
    """FLOP of an image: for each of its tokens, and for each pair of them; tokens: of an image of the usual size."""

    per_token: float
    per_pair: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of one step.

    most: images that a sequence holds; microbatches, replicas, microbatch: how many there are, and sequences in one;
    replicas_wait: replicas wait for each other in every microbatch; shares: replicas of the encoder that share a
    microbatch, to which its images are dealt out in turn.
    """

    counts: ImageCounts
    work: ImageWork
    most: int
    microbatches: int
    replicas: int
    microbatch: int
    replicas_wait: bool
    shares: int = 1

    @property
    def busiest(self) -> PackedImages:
        """Images of a microbatch on the ranks that others wait for, at least one."""
        return _loads(self)[0]

    @property
    def largest(self) -> PackedImages:
        """Images of the largest microbatch, at least one."""
        return _loads(self)[1]

    @property
    def imbalance(self) -> float:
        """Work of the ranks that others wait for, over the mean of all."""
        return _loads(self)[2]


@lru_cache(maxsize=_CACHE_SIZE)
def _loads(batch: ImageBatch) -> tuple[PackedImages, PackedImages, float]:
    images, tokens, pairs = sums = _sums(batch)
    work = images if not batch.counts.tokens else batch.work.per_token * tokens + batch.work.per_pair * pairs
    share = work.argmax(axis=2)
    shared = work.max(axis=2)
    microbatches = np.arange(batch.microbatches)
    replica = shared.argmax(axis=1) if batch.replicas_wait else np.full(len(shared), shared.sum(axis=0).argmax())
    busiest = microbatches, replica, share[microbatches, replica]
    largest = np.unravel_index(tokens.argmax(), tokens.shape)
    mean_work = float(work.mean()) or 1.0  # there may be no images at all
    return (
        _packed(batch, tuple(total[busiest].mean() for total in sums)),
        _packed(batch, tuple(total[largest] for total in sums)),
        float(work[busiest].mean()) / mean_work,
    )


def _sums(batch: ImageBatch) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Images, their tokens, and pairs of tokens in one image: [microbatches, replicas, shares]."""
    shape = batch.microbatches, batch.replicas, batch.shares
    counts = batch.counts.draw(batch.microbatches * batch.replicas * batch.microbatch, batch.most)
    loads = counts.reshape(-1, batch.microbatch).sum(axis=1)
    first = np.repeat(np.cumsum(loads) - loads, loads)
    slot = np.repeat(np.arange(len(loads)) * batch.shares, loads) + (np.arange(len(first)) - first) % batch.shares
    tokens = batch.counts.draw_tokens(len(slot), batch.work.tokens).astype(np.float64)
    sums = (np.bincount(slot, weights, len(loads) * batch.shares) for weights in (None, tokens, tokens**2))
    images, all_tokens, pairs = (total.astype(np.float64).reshape(shape) for total in sums)
    return images, all_tokens, pairs


def _packed(batch: ImageBatch, sums: tuple[float, ...]) -> PackedImages:
    """Whole images of a rank with as many tokens and as many pairs of them. sums: images, tokens, pairs."""
    images, tokens, pairs = sums
    count = max(1, round(images))
    if not batch.counts.tokens or not tokens:
        return PackedImages(count, batch.work.tokens)
    keys = float(pairs / tokens)
    return PackedImages(count, max(1, round(tokens / count)), PackedKeys(keys / 2, keys, max(batch.counts.tokens)))


@lru_cache(maxsize=_CACHE_SIZE)
def drawn_images(counts: ImageCounts, sequences: int, most: int, usual: int) -> Mapping[int, int]:
    """Images of all sequences of a step together, by their tokens in the encoder. usual: see `draw_tokens`."""
    images = int(counts.draw(sequences, most).sum())
    tokens, number = np.unique(counts.draw_tokens(images, usual), return_counts=True)
    return MappingProxyType(dict(zip(tokens.tolist(), number.tolist(), strict=True)))
