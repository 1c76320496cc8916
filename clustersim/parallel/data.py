"""How do data-parallel replicas keep their weights equal?

Strategies are types. All of them average gradients over the data-parallel group (times the context-parallel one,
whose ranks hold the same weights); they differ in what each rank keeps, and in when it communicates.
`stage` is the ZeRO stage.
Reference: PyTorch Distributed (Li et al. 2020, bucketing), ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023).
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.units import Bytes

DDP_BUCKET: Bytes = 25 * 2.0**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, in MiB
MEGATRON_BUCKET = 40_000_000  # parameters: Megatron-LM, DistributedDataParallelConfig.bucket_size
MEGATRON_BUCKET_PER_RANK = 1_000_000  # ... or this many for each data-parallel rank, if that is more


@dataclass(frozen=True, slots=True)
class Replicated:
    """DDP: every rank keeps everything; bucketed all-reduce of gradients during the last backward.

    Gradients live in the buckets, as in Megatron-LM or with torch's gradient_as_bucket_view.
    """

    stage: ClassVar[int] = 0
    bucket: Bytes = DDP_BUCKET
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class Zero:
    """ZeRO: optimizer states (stage 1), gradients too (2), parameters too (3, FSDP) are sharded.

    prefetch: how many layers ahead stage 3 gathers; overlap: communication runs beside compute; copies:
    stage 3 copies what it gathered into each parameter's own memory (FSDP2's parameters; FSDP1's flat ones need none).
    """

    stage: int
    bucket: Bytes | None = None  # None: Megatron's rule, max(40M, 1M * ranks) elements
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = True
    copies: bool = False

    @property
    def ahead(self) -> int:
        """Layers that stage 3 gathers before they are needed."""
        return self.prefetch if self.overlap else 0

    def bucket_bytes(self, replicas: int, width: int) -> Bytes:
        """Size of a bucket of gradients of `width` bytes each."""
        rule = float(max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * replicas) * width)
        return rule if self.bucket is None else self.bucket


@dataclass(frozen=True, slots=True)
class NaiveDataParallel:
    """torch.nn.DataParallel: one process scatters inputs and weights and gathers outputs on its first GPU."""

    stage: ClassVar[int] = 0


DataParallelism = Replicated | Zero | NaiveDataParallel
