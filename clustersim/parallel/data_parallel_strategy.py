"""How do data-parallel replicas keep their weights equal?

Strategies are types. They differ in what each rank holds (`zero_stage`; `shards_parameters` at stage 3), in over
how many of the ranks with the same weights it is sharded (`shard_size`), in when gradients are reduced
(`gradient_sync`) and in whether ranks are processes (`is_single_process`: one has all GPUs); the parameter groups
say which ranks those are. All of them average gradients over the ranks that hold the same
weights.

Options left open follow the frameworks. Without a pipeline, ZeRO-2 and -3 reduce the gradients of every
microbatch (DeepSpeed; FSDP without `no_sync`). With one, gradients are accumulated unsharded and reduced by a
stage's last backward only, and the parameters of FSDP stay gathered from the first forward to the last
backward, as torch.distributed.pipelining has it (`_PipelineStageBase.backward_maybe_with_nosync` calls
`set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)` until the last; torchtitan's
`reshard_after_forward: default` is false then).
DeepSpeed runs no ZeRO-2 or -3 with its pipeline (`runtime/pipe/engine.py`).

Megatron-LM's buckets (core/distributed/distributed_data_parallel.py, since `--overlap-grad-reduce` of 2023):
the first model chunk of the first pipeline rank has buckets of `bucket_size` elements; all other chunks have
one bucket, because their communication overlaps the pipeline's drain.

Reference: PyTorch Distributed (Li et al. 2020, bucketing), ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al.
2023), MiCS (Zhang et al. 2022, arXiv:2205.00119), ZeRO++ (Wang et al. 2023, arXiv:2306.10209).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Final

from clustersim.common.units import Bytes

DDP_BUCKET_BYTES: Bytes = 25 * 2.0**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, in MiB
MEGATRON_BUCKET_SIZE = 40_000_000  # parameters: Megatron-LM, DistributedDataParallelConfig.bucket_size
MEGATRON_BUCKET_PER_RANK = 1_000_000  # ... or this many for each data-parallel rank, if that is more


class GradientSync(Enum):
    """When a strategy reduces gradients."""

    EVERY_BACKWARD = "during the backward of each microbatch"
    LAST_BACKWARD = "during the backward of a chunk's last microbatch"
    AFTER_BACKWARD = "after all backwards"


class ReductionFrequency(Enum):
    """After which microbatches gradients are reduced."""

    PER_MICROBATCH = "every_microbatch"
    LAST_MICROBATCH = "last_microbatch"


class _WholeParameters:
    """Answers of strategies whose ranks hold whole parameters, so that none are gathered.

    gathers_single_parameters: parameters are gathered one by one, not by unit; for the others see `FullyShard`.
    """

    __slots__ = ()
    shards_parameters: ClassVar[bool] = False
    gathers_single_parameters: ClassVar[bool] = False
    is_single_process: ClassVar[bool] = False
    zero_hpz_partition_size: ClassVar[int | None] = None
    prefetch_depth: ClassVar[int] = 0
    copies: ClassVar[bool] = False

    def reshards_parameters(self, *, is_pipelined: bool) -> bool:  # noqa: ARG002 - the same with and without a pipeline
        """Whether parameters gathered by forward are freed after it."""
        return False


@dataclass(frozen=True, slots=True)
class BucketedStrategy(_WholeParameters):
    """Gradients are reduced in buckets. overlap: communication overlaps compute.

    bucket: bytes of gradients; None is Megatron-LM's rule, `max(40M, 1M * ranks)` elements for the first chunk of
    the first pipeline rank and one bucket for every other.
    """

    bucket: Bytes | None = None
    overlap: bool = True

    def gradient_sync(self, *, is_pipelined: bool) -> GradientSync:  # noqa: ARG002 - the same with and without a pipeline
        """When gradients are reduced."""
        return GradientSync.LAST_BACKWARD if self.overlap else GradientSync.AFTER_BACKWARD

    def bucket_bytes(self, ranks: int, gradient_bytes: float, *, is_first_chunk: bool) -> Bytes:
        """Bytes of a bucket of gradients with `gradient_bytes` each, which `ranks` ranks reduce.

        is_first_chunk: whether they belong to the first chunk of the first pipeline rank.
        """
        if self.bucket is not None:
            return self.bucket
        if not is_first_chunk:
            return math.inf
        return float(max(MEGATRON_BUCKET_SIZE, MEGATRON_BUCKET_PER_RANK * ranks) * gradient_bytes)


@dataclass(frozen=True, slots=True)
class DdpStrategy(BucketedStrategy):
    """DDP: every rank holds everything; bucketed all-reduce of gradients during the last backward.

    Gradients live in the buckets, as in Megatron-LM or with torch's gradient_as_bucket_view.
    """

    zero_stage: ClassVar[int] = 0
    shard_size: ClassVar[int | None] = None
    bucket: Bytes | None = DDP_BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Zero1(BucketedStrategy):
    """ZeRO stage 1: optimizer states are sharded; gradients are reduced and updated parameters gathered in buckets.

    shard: number of ranks with the same weights to shard over, None: all (Megatron-LM's
    `num_distributed_optimizer_instances` are such groups); overlap_param_gather: gathers overlap with the forward that
    follows, as far as anything overlaps (Megatron-LM's flag of this name; FSDP that keeps gathered parameters),
    otherwise the step ends with them (DeepSpeed).
    """

    zero_stage: ClassVar[int] = 1
    shard: int | None = None
    overlap_param_gather: bool = False

    @property
    def gathers_in_forward(self) -> bool:
        """Whether updated parameters are gathered while the next forward runs."""
        return self.overlap and self.overlap_param_gather

    @property
    def shard_size(self) -> int | None:
        """Shard group size (HSDP; Megatron distributed-optimizer instances). None: the whole DP group."""
        return self.shard


@dataclass(frozen=True, slots=True)
class Zero2(Zero1):
    """ZeRO stage 2: gradients are sharded, too, so they are reduced after every microbatch.

    reduce: frequency of reduction; None: every microbatch, or the last with a pipeline, where no framework shards
    earlier.
    """

    zero_stage: ClassVar[int] = 2
    reduce: ReductionFrequency | None = None

    def gradient_sync(self, *, is_pipelined: bool) -> GradientSync:
        """When gradients are reduced."""
        if _reduction_frequency(self.reduce, is_pipelined=is_pipelined) is ReductionFrequency.PER_MICROBATCH:
            return GradientSync.EVERY_BACKWARD
        return GradientSync.LAST_BACKWARD if self.overlap else GradientSync.AFTER_BACKWARD


@dataclass(frozen=True, slots=True)
class FullyShard:
    """ZeRO stage 3 and FSDP: parameters are sharded, too; gathered unit by unit, and gradients reduced likewise.

    prefetch: number of units gathered ahead; overlap: communication overlaps compute; copies: gathered data is
    copied into each parameter's own memory (FSDP2's parameters; FSDP1's flat ones need no copy).
    reshard_after_forward: whether backward gathers parameters again, None: it does, except with a pipeline.
    shard: number of ranks with the same weights to shard over, None: all. Otherwise gradients are
    reduce-scattered within such groups and all-reduced across them (hybrid sharding); all_reduce: frequency of
    the latter. zero_hpz_partition_size: number of ranks over which backward's copy of the parameters is
    sharded, None: there is none (hpZ). reduce: frequency of gradient reduction, None: every microbatch, or the
    last with a pipeline. single_parameters: each parameter is gathered, and its gradient reduced, by a collective of
    its own (SimpleFSDP without bucketing, Zhang et al. 2024, arXiv:2411.00284). waits_for_reduction: compute waits for
    each reduction though the gathers overlap it (FSDP2 on a CPU, which has no streams); no scenario key sets it.
    """

    zero_stage: ClassVar[int] = 3
    shards_parameters: ClassVar[bool] = True
    gathers_single_parameters: ClassVar[bool] = False
    is_single_process: ClassVar[bool] = False
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool | None = None
    copies: bool = False
    shard: int | None = None
    zero_hpz_partition_size: int | None = None
    reduce: ReductionFrequency | None = None
    all_reduce: ReductionFrequency = ReductionFrequency.PER_MICROBATCH
    single_parameters: bool = False
    waits_for_reduction: bool = False

    @property
    def prefetch_depth(self) -> int:
        """Number of units that are gathered ahead of their use."""
        return self.prefetch if self.overlap else 0

    @property
    def shard_size(self) -> int | None:
        """Shard group size (HSDP, or hpZ's secondary shards). None: the whole DP group."""
        return self.shard or self.zero_hpz_partition_size

    def gradient_sync(self, *, is_pipelined: bool) -> GradientSync:
        """When gradients are reduced."""
        reduces_per_microbatch = (
            _reduction_frequency(self.reduce, is_pipelined=is_pipelined) is ReductionFrequency.PER_MICROBATCH
        )
        return GradientSync.EVERY_BACKWARD if reduces_per_microbatch else GradientSync.LAST_BACKWARD

    def reshards_parameters(self, *, is_pipelined: bool) -> bool:
        """Whether parameters gathered by forward are freed after it."""
        return not is_pipelined if self.reshard_after_forward is None else self.reshard_after_forward

    def keeps_unsharded(self, *, is_pipelined: bool) -> bool:
        """Whether parameters gathered by the first forward stay unsharded until the last backward."""
        return is_pipelined and not self.reshards_parameters(is_pipelined=is_pipelined)


@dataclass(frozen=True, slots=True)
class DeepspeedZero3Strategy(FullyShard):
    """ZeRO-3 as in DeepSpeed's first version (March 2021), parameter by parameter (`lowering.deepspeed_zero3`)."""

    gathers_single_parameters: ClassVar[bool] = True


def _reduction_frequency(configured: ReductionFrequency | None, *, is_pipelined: bool) -> ReductionFrequency:
    """Frequency of gradient reduction: as configured, else the frameworks' default."""
    return configured or (ReductionFrequency.LAST_MICROBATCH if is_pipelined else ReductionFrequency.PER_MICROBATCH)


@dataclass(frozen=True, slots=True)
class NaiveDataParallel(_WholeParameters):
    """torch.nn.DataParallel: one process scatters inputs and weights and gathers outputs on its first GPU."""

    zero_stage: ClassVar[int] = 0
    is_single_process: ClassVar[bool] = True
    shard_size: ClassVar[int | None] = None

    def gradient_sync(self, *, is_pipelined: bool) -> GradientSync:  # noqa: ARG002 - the same with and without a pipeline
        """When gradients are reduced."""
        return GradientSync.AFTER_BACKWARD


DataParallelStrategy = DdpStrategy | Zero1 | Zero2 | FullyShard | NaiveDataParallel
STRATEGY_BY_ZERO_STAGE: Final[Mapping[int, type[DdpStrategy | Zero1 | Zero2 | FullyShard]]] = MappingProxyType(
    {strategy.zero_stage: strategy for strategy in (DdpStrategy, Zero1, Zero2, FullyShard)}
)
"""The usual strategy of each ZeRO stage."""


def with_shard_size(strategy: DataParallelStrategy, shard_size: int | None) -> DataParallelStrategy:
    """The strategy with the given shard group size (hpZ: of its secondary shards); None: the whole DP group."""
    match strategy:
        case FullyShard(zero_hpz_partition_size=int()):
            return replace(strategy, zero_hpz_partition_size=shard_size)
        case Zero1() | FullyShard():
            return replace(strategy, shard=shard_size)
    return strategy


def with_overlap(strategy: DataParallelStrategy, *, overlap: bool) -> DataParallelStrategy:
    """The strategy with its communication overlapped with compute, or not; unchanged where it never overlaps."""
    return strategy if isinstance(strategy, NaiveDataParallel) else replace(strategy, overlap=overlap)
