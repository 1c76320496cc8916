"""1F1B with forwards overlapped with backwards: one more warm-up forward, then pairs.

In 1F1B's steady phase a rank runs a forward, then a backward that may need that very forward (on the last
rank it does). With one more forward before it the two are of different microbatches, so they can overlap:
tokens of one are dispatched while the other computes. A rank keeps the activations of one more microbatch and
chunk for that. All else is interleaved 1F1B's; without a pipeline it is forward 0, then forward i + 1
overlapped with backward i.

Assumption, as in Megatron-LM: a pipeline has several chunks for it (`virtual_pipeline_model_parallel_size`).
Reference: Megatron-LM, `overlap_moe_expert_parallel_comm` in megatron/core/pipeline_parallel/schedules.py
(`get_pp_rank_microbatches`: one more warm-up) and combined_1f1b.py, and its checks in
megatron/core/transformer/transformer_config.py.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.program.action import ActionKind, OverlappedPair, PipelineOrder, ScheduleEntry, flatten_entries
from clustersim.program.placement import Placement
from clustersim.schedules.schedule import Schedule, ScheduleTraits


@dataclass(frozen=True, slots=True)
class Overlapped1F1B(ScheduleTraits):
    """1F1B or its interleaved form with overlapped pairs."""

    is_periodic: ClassVar[bool] = True
    may_pair_passes: ClassVar[bool] = True
    needs_chunks_to_pair: ClassVar[bool] = True
    base: Schedule

    @property
    def name(self) -> str:
        """Name of the base schedule."""
        return self.base.name

    def round_size(self, ranks: int) -> int:
        """That of the base schedule."""
        return self.base.round_size(ranks)

    def placement(self, ranks: int) -> Placement:
        """Placement of the base schedule."""
        return self.base.placement(ranks)

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where the base schedule does."""
        self.base.require_supported(ranks, microbatches)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The entries of every pipeline rank; raise InputError as `require_supported` does."""
        return tuple(_pair_passes(entries) for entries in self.base.order(ranks, microbatches))


def _pair_passes(entries: tuple[ScheduleEntry, ...]) -> tuple[ScheduleEntry, ...]:
    """A rank's passes; from the first backward on, backwards are paired with the remaining forwards."""
    actions = flatten_entries(entries)
    forwards = [action for action in actions if action.kind is ActionKind.FORWARD]
    backwards = [action for action in actions if action.kind is not ActionKind.FORWARD]
    warmup = actions.index(backwards[0])
    pairs = [OverlappedPair(*passes) for passes in zip(forwards[warmup:], backwards, strict=False)]
    return (*forwards[:warmup], *pairs, *backwards[len(pairs) :])
