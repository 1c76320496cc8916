"""In which order does 1F1B work whose forwards run beside backwards? One forward earlier, then in pairs.

In 1F1B's steady phase a rank runs a forward, then a backward that may need that very forward (on the last rank it
does). With one more forward before it the two are of different microbatches, so they can run side by side, and tokens
of one travel to experts while the other computes. A rank keeps the activations of one microbatch and chunk more for
that. All else is interleaved 1F1B's; without a pipeline it is forward 0, then forward i + 1 beside backward i.

Assumed, as in Megatron-LM: a pipeline has several chunks for it (`virtual_pipeline_model_parallel_size`).
Reference: Megatron-LM, `overlap_moe_expert_parallel_comm` in megatron/core/pipeline_parallel/schedules.py
(`get_pp_rank_microbatches`: one more warm-up) and combined_1f1b.py, and its checks in
megatron/core/transformer/transformer_config.py.
"""

from dataclasses import dataclass

from clustersim.program.action import ActionKind, OverlappedPair, PipelineOrder, ScheduleEntry, flatten_entries
from clustersim.program.placement import Placement
from clustersim.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Overlapped1F1B:
    """1F1B or its interleaved form, in pairs."""

    base: Schedule

    @property
    def name(self) -> str:
        """As the plain schedule is called."""
        return self.base.name

    def placement(self, ranks: int) -> Placement:
        """That of the plain schedule."""
        return self.base.placement(ranks)

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where the plain schedule does."""
        self.base.require_supported(ranks, microbatches)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The steps of every pipeline rank; raise InputError as `require` does."""
        return tuple(_pair_passes(entries) for entries in self.base.order(ranks, microbatches))


def _pair_passes(entries: tuple[ScheduleEntry, ...]) -> tuple[ScheduleEntry, ...]:
    """A rank's passes, from the first backward on in pairs with the forwards that are still to come then."""
    actions = flatten_entries(entries)
    forwards = [action for action in actions if action.kind is ActionKind.FORWARD]
    backwards = [action for action in actions if action.kind is not ActionKind.FORWARD]
    warmup = actions.index(backwards[0])
    pairs = [OverlappedPair(*passes) for passes in zip(forwards[warmup:], backwards, strict=False)]
    return (*forwards[:warmup], *pairs, *backwards[len(pairs) :])
