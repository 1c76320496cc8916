"""How do data-parallel replicas keep their weights equal?

Strategies are types. They differ in what each rank keeps (`stage`, ZeRO's number) and in when gradients are reduced
(`sync`); over which ranks is said by the parameter groups. All of them average gradients over the ranks that hold the
same weights. Reference: PyTorch Distributed (Li et al. 2020, bucketing), ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et
al. 2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Final

from clustersim.units import Bytes

DDP_BUCKET: Bytes = 25 * 2.0**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, in MiB
MEGATRON_BUCKET = 40_000_000  # parameters: Megatron-LM, DistributedDataParallelConfig.bucket_size
MEGATRON_BUCKET_PER_RANK = 1_000_000  # ... or this many for each data-parallel rank, if that is more


class GradientSync(Enum):
    """When a strategy reduces gradients."""

    EVERY_BACKWARD = "during the backward of each microbatch"
    LAST_BACKWARD = "during the backward of a chunk's last microbatch"
    AFTER_BACKWARD = "after all backwards"


@dataclass(frozen=True, slots=True)
class Replicated:
    """DDP: every rank keeps everything; bucketed all-reduce of gradients during the last backward.

    Gradients live in the buckets, as in Megatron-LM or with torch's gradient_as_bucket_view.
    """

    stage: ClassVar[int] = 0
    bucket: Bytes = DDP_BUCKET
    overlap: bool = True

    @property
    def sync(self) -> GradientSync:
        """When gradients are reduced."""
        return GradientSync.LAST_BACKWARD if self.overlap else GradientSync.AFTER_BACKWARD

    def bucket_bytes(self, ranks: int, width: float) -> Bytes:  # noqa: ARG002 - the same however many hold the weights
        """Size of a bucket of gradients of `width` bytes each, which `ranks` ranks reduce."""
        return self.bucket


@dataclass(frozen=True, slots=True)
class Zero1:
    """ZeRO stage 1: optimizer states are sharded; gradients are reduced and updated parameters gathered in buckets.

    bucket: None is Megatron's rule, max(40M, 1M * ranks) elements; overlap: communication runs beside compute.
    """

    stage: ClassVar[int] = 1
    bucket: Bytes | None = None
    overlap: bool = True

    @property
    def sync(self) -> GradientSync:
        """When gradients are reduced."""
        return GradientSync.LAST_BACKWARD if self.overlap else GradientSync.AFTER_BACKWARD

    def bucket_bytes(self, ranks: int, width: float) -> Bytes:
        """Size of a bucket of gradients of `width` bytes each, which `ranks` ranks reduce."""
        rule = float(max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * ranks) * width)
        return rule if self.bucket is None else self.bucket


@dataclass(frozen=True, slots=True)
class Zero2(Zero1):
    """ZeRO stage 2: gradients are sharded, too, so they are reduced after every microbatch."""

    stage: ClassVar[int] = 2

    @property
    def sync(self) -> GradientSync:
        """When gradients are reduced."""
        return GradientSync.EVERY_BACKWARD


@dataclass(frozen=True, slots=True)
class FullyShard:
    """ZeRO stage 3 and FSDP: parameters are sharded, too; unit by unit they are gathered, and gradients reduced.

    prefetch: how many units ahead are gathered; overlap: communication runs beside compute; copies: what is gathered is
    copied into each parameter's own memory (FSDP2's parameters; FSDP1's flat ones need none).
    """

    stage: ClassVar[int] = 3
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = True
    copies: bool = False

    @property
    def ahead(self) -> int:
        """Units that are gathered before they are needed."""
        return self.prefetch if self.overlap else 0


@dataclass(frozen=True, slots=True)
class NaiveDataParallel:
    """torch.nn.DataParallel: one process scatters inputs and weights and gathers outputs on its first GPU."""

    stage: ClassVar[int] = 0


DataParallelism = Replicated | Zero1 | Zero2 | FullyShard | NaiveDataParallel
BY_STAGE: Final[Mapping[int, type[Replicated | Zero1 | Zero2 | FullyShard]]] = MappingProxyType(
    {strategy.stage: strategy for strategy in (Replicated, Zero1, Zero2, FullyShard)}
)
"""The usual strategy of each of ZeRO's stages."""
