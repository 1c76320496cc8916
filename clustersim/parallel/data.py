"""How do data-parallel replicas keep their weights equal?

Strategies are types. All of them average gradients over the data-parallel group (times the context-parallel one,
whose ranks hold the same weights); they differ in what each rank keeps, and in when it communicates.
Reference: PyTorch Distributed (Li et al. 2020, bucketing), ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023).
"""

from dataclasses import dataclass

from clustersim.units import Bytes

DDP_BUCKET: Bytes = 25 * 2.0**20  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, in MiB


@dataclass(frozen=True, slots=True)
class Replicated:
    """DDP: every rank keeps everything; bucketed all-reduce of gradients during the last backward."""

    bucket: Bytes = DDP_BUCKET
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class Zero:
    """ZeRO: optimizer states (stage 1), gradients too (2), parameters too (3, FSDP) are sharded.

    prefetch: how many layers ahead stage 3 gathers; overlap: communication runs beside compute.
    """

    stage: int
    bucket: Bytes | None = None  # None: Megatron's rule, max(40M, 1M * ranks) elements
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = True


@dataclass(frozen=True, slots=True)
class NaiveDataParallel:
    """torch.nn.DataParallel: one process scatters inputs and weights and gathers outputs on its first GPU."""


DataParallelism = Replicated | Zero | NaiveDataParallel
