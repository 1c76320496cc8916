"""How many images has each sequence of a step, and how evenly do they load ranks?

Counts are drawn once with the seed: from a list, each as likely as the others, or gamma variates with a mean and a
coefficient of variation, rounded up or down at random so that the mean stays, and at most as many as a sequence holds.

Ranks wait for each other: replicas in every microbatch where they exchange weights inside layers, else once a step.
The encoder is taken to last as on the replica that has most images, added up over these waits, in whole images a
microbatch (DistTrain, Zhang et al. 2024, arXiv:2408.04275, section 2.3); what a pipeline loses between unequal
microbatches is not counted, as with packed documents (`model.documents`). Memory is that of the largest microbatch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray

_CACHE_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """Images of a sequence: one of `counts`, or gamma variates of this mean and coefficient of variation."""

    counts: tuple[int, ...] = ()
    mean: float = 0.0
    variation: float = 0.0
    seed: int = 0

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


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of one step.

    most: images that a sequence holds; microbatches, replicas, microbatch: how many there are, and sequences in one;
    replicas_wait: replicas wait for each other in every microbatch.
    """

    counts: ImageCounts
    most: int
    microbatches: int
    replicas: int
    microbatch: int
    replicas_wait: bool

    @property
    def busiest(self) -> int:
        """Images of a microbatch on the replicas that others wait for, at least one."""
        return _loads(self)[0]

    @property
    def largest(self) -> int:
        """Images of the largest microbatch, at least one."""
        return _loads(self)[1]


@lru_cache(maxsize=_CACHE_SIZE)
def _loads(batch: ImageBatch) -> tuple[int, int]:
    shape = batch.microbatches, batch.replicas, batch.microbatch
    images = batch.counts.draw(batch.microbatches * batch.replicas * batch.microbatch, batch.most)
    loads = images.reshape(shape).sum(axis=2)
    busiest = loads.max(axis=1).mean() if batch.replicas_wait else loads.mean(axis=0).max()
    return max(1, round(float(busiest))), max(1, int(loads.max()))


@lru_cache(maxsize=_CACHE_SIZE)
def drawn_images(counts: ImageCounts, sequences: int, most: int) -> int:
    """Images of all sequences of a step together."""
    return int(counts.draw(sequences, most).sum())
