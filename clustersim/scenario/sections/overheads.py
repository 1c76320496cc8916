"""What may a scenario file say of what its framework does in a step beside the model?

overheads: none              # nothing of it
overheads:                   # as the framework does it, but for
  zeroing: false
  accumulation: added
"""

from dataclasses import replace
from typing import Annotated

from clustersim.parallel.data import DataParallelism, FullyShard
from clustersim.scenario.section import Section, Tokens, member
from clustersim.workload.overheads import NONE, Accumulation, Batches, Grouping, LossReport, Overheads


class OverheadsSection(Section):
    """`training.overheads`: what differs from what the framework does."""

    accumulation: Annotated[Accumulation | None, member(Accumulation)] = None
    zeroing: bool | None = None
    averaging: bool | None = None
    checking: bool | None = None
    unscaling: bool | None = None
    widening: bool | None = None
    norm_sums: bool | None = None
    attention_copies: bool | None = None
    bias_adds: bool | None = None
    norm_twice: bool | None = None
    norm_in_linear: bool | None = None
    permute_unfused: bool | None = None
    router_unfused: bool | None = None
    router_fp32: bool | None = None
    router_loss: bool | None = None
    grouping: Annotated[Grouping | None, member(Grouping)] = None
    softmax_keys: Tokens | None = None
    loss: Annotated[LossReport | None, member(LossReport)] = None
    batches: Annotated[Batches | None, member(Batches)] = None

    def choice(self, framework: Overheads, data: DataParallelism) -> Overheads:
        """What is done under a strategy of data parallelism, where the framework does what the file does not name.

        FSDP2 copies gradients into the buffer that it reduces, whatever else is fused.
        """
        named = {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}
        copied = isinstance(data, FullyShard) and data.copies
        usual = replace(framework, accumulation=Accumulation.COPIED) if copied else framework
        return replace(usual, **named)


def overheads_of(section: OverheadsSection | None, framework: Overheads, data: DataParallelism) -> Overheads:
    """What a section says; none: nothing is done beside the model."""
    return NONE if section is None else section.choice(framework, data)
