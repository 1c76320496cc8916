"""What may a scenario file say of what its framework does in a step beside the model?

overheads: none              # nothing of it
overheads:                   # as the framework does it, but for
  zeroing: false
  accumulation: added
"""

from dataclasses import replace
from typing import Annotated

from clustersim.model.overheads import NO_OVERHEADS, Accumulation, BatchTransfer, Grouping, LossReport, Overheads
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, FullyShard
from clustersim.scenario.config_reader import ConfigModel, TokenCount, enum_parser


class OverheadsConfig(ConfigModel):
    """`training.overheads`: what differs from what the framework does."""

    accumulation: Annotated[Accumulation | None, enum_parser(Accumulation)] = None
    """of weight gradients; left out: the framework's"""
    zeroing: bool | None = None
    """gradients are set to zero each step; left out: the framework's"""
    averaging: bool | None = None
    """gradients are divided by the number of replicas; left out: the framework's"""
    checking: bool | None = None
    """gradients are looked through for infinities; left out: the framework's"""
    unscaling: bool | None = None
    """gradients are divided by the loss scale; left out: the framework's"""
    widening: bool | None = None
    """gradients are copied into a wider format; left out: the framework's"""
    norm_sums: bool | None = None
    """partial gradients of norms are summed by kernels of their own; left out: the framework's"""
    attention_copies: bool | None = None
    """operands of attention are copied into its order; left out: the framework's"""
    bias_adds: bool | None = None
    """biases are added by kernels of their own; left out: the framework's"""
    norm_twice: bool | None = None
    """norms are computed again in backward; left out: the framework's"""
    norm_in_linear: bool | None = None
    """norms run as part of the product behind them; left out: the framework's"""
    permute_unfused: bool | None = None
    """tokens are ordered by expert by several kernels; left out: the framework's"""
    router_unfused: bool | None = None
    """the router runs one operation after the other; left out: the framework's"""
    router_fp32: bool | None = None
    """the router's scores are in FP32; left out: the framework's"""
    router_loss: bool | None = None
    """the loss of experts' load is computed; left out: the framework's"""
    grouping: Annotated[Grouping | None, enum_parser(Grouping)] = None
    """how products of experts are launched, and whether what is between them is in their kernels; left out: the
    framework's"""
    softmax_keys: TokenCount | None = None
    """keys up to which standard attention's softmax is one kernel; left out: the framework's"""
    loss: Annotated[LossReport | None, enum_parser(LossReport)] = None
    """when the loss is averaged over ranks; left out: the framework's"""
    batches: Annotated[BatchTransfer | None, enum_parser(BatchTransfer)] = None
    """how batches come to the device; left out: the framework's"""

    def with_framework_defaults(self, framework: Overheads, data: DataParallelStrategy) -> Overheads:
        """What is done under a strategy of data parallelism, where the framework does what the file does not name.

        FSDP2 copies gradients into the buffer that it reduces, whatever else is fused.
        """
        stated = {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}
        copies_gradients = isinstance(data, FullyShard) and data.copies
        defaults = replace(framework, accumulation=Accumulation.COPIED) if copies_gradients else framework
        return replace(defaults, **stated)


def resolve_overheads(config: OverheadsConfig | None, framework: Overheads, data: DataParallelStrategy) -> Overheads:
    """What a section says; none: nothing is done beside the model."""
    return NO_OVERHEADS if config is None else config.with_framework_defaults(framework, data)
