"""Pipeline placement: which pipeline rank holds which stage, and in which direction do messages go?

Stages are numbered through the model (virtual stages). A schedule places them: in a loop (rank r of p holds
r, r + p, ...), in a V (the second half comes back), or freely, as long as consecutive stages are on one rank
or on neighbouring ranks. The placement determines neighbours, local hand-overs and the chunk index of every
stage. A bidirectional pipeline (DualPipe) is two pipelines in opposite directions, which hold every stage
twice; each has half of the ranks, and what would be handed over within a rank is sent to the counterpart in
the other pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from clustersim.common.errors import InputError

COUNTERPART: Final = 2
"""Direction of a message to the same rank of the opposite pipeline (DualPipe)."""


@dataclass(frozen=True)
class Placement:
    """stage_ranks: [stages] pipeline rank of each stage in model order; every rank from 0 on holds at least one.

    bidirectional: hand-overs between two stages of one rank go to the counterpart rank of the opposite pipeline.

    >>> Placement((0, 1, 1, 0)).stages_on_rank(1)
    (1, 2)
    """

    stage_ranks: tuple[int, ...]
    bidirectional: bool = False

    def __post_init__(self) -> None:
        pipeline_size = self.pipeline_size
        if set(self.stage_ranks) != set(range(pipeline_size)):
            raise InputError(
                f"placement {self.stage_ranks}: every pipeline rank from 0 to {pipeline_size - 1} must hold a stage"
            )
        for stage, (source, target) in enumerate(zip(self.stage_ranks, self.stage_ranks[1:], strict=False)):
            if (target - source) % pipeline_size not in {0, 1, pipeline_size - 1}:
                raise InputError(
                    f"placement {self.stage_ranks}: stages {stage} and {stage + 1} follow each other, but pipeline "
                    "ranks "
                    f"{source} and {target} are no neighbours"
                )

    @cached_property
    def pipeline_size(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(self.stage_ranks, default=0)

    @cached_property
    def max_chunks(self) -> int:
        """Largest number of stages (model chunks) on one rank."""
        return max(map(len, self._rank_stages))

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in model order."""
        return self._rank_stages[rank]

    def chunk_index(self, stage: int) -> int:
        """Index of a stage among the stages of its rank (model chunk index)."""
        return self._rank_stages[self.stage_ranks[stage]].index(stage)

    def direction(self, source_stage: int, target_stage: int) -> int:
        """Direction of a message: next rank (1), previous rank (-1), same rank (0) or the `COUNTERPART`.

        With two ranks each is both neighbours of the other: there activations go to the next, gradients to the
        previous.
        """
        distance = (self.stage_ranks[target_stage] - self.stage_ranks[source_stage]) % self.pipeline_size
        if distance == 0:
            return COUNTERPART if self.bidirectional else 0
        directions = (1, -1) if target_stage > source_stage else (-1, 1)
        return next(step for step in directions if distance == step % self.pipeline_size)

    def edges(self, direction: int) -> tuple[tuple[int, int], ...]:
        """Ordered (sender, receiver) pairs of pipeline ranks with messages in a direction."""
        return tuple(
            sorted(
                {
                    (self.stage_ranks[a], self.stage_ranks[b])
                    for a, b in self._stage_edges()
                    if self.direction(a, b) == direction
                }
            )
        )

    @cached_property
    def _rank_stages(self) -> tuple[tuple[int, ...], ...]:
        rank_stages: list[list[int]] = [[] for _ in range(self.pipeline_size)]
        for stage, rank in enumerate(self.stage_ranks):
            rank_stages[rank].append(stage)
        return tuple(map(tuple, rank_stages))

    def _stage_edges(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver) pairs of stages: activations and gradients."""
        for stage in range(len(self.stage_ranks) - 1):
            yield stage, stage + 1
            yield stage + 1, stage


@cache
def looped_placement(pipeline_size: int, chunks_per_rank: int = 1) -> Placement:
    """Round-robin placement of stages (interleaved pipeline): rank r holds stages r, r + pipeline_size, ...

    >>> looped_placement(2, chunks_per_rank=2).stage_ranks
    (0, 1, 0, 1)
    """
    return Placement(tuple(range(pipeline_size)) * chunks_per_rank)
