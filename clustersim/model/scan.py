"""What do the kernels of a chunk-parallel scan compute, move and save?

A scan over states S [key_dim, value_dim] of each head runs in chunks of C tokens (Yang et al. 2024,
arXiv:2312.06635, section 4; Dao and Gu 2024, arXiv:2405.21060, section 6): products of C x C inside a chunk,
and products with the state that is handed from chunk to chunk. Each library has them in a few device kernels
that write what they hand to each other to memory: a mixer lists these as stages, with FLOP and bytes per token
and head, and states are written once per chunk. A kernel's time is the longer one of its products and its bytes,
at the share of these rates that its library reaches (`cost.scan_rates`). Assumed: operands that heads share are
read once; chunks divide the sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.units import Bytes, Flop
from clustersim.model.kernels import Kernel, KernelKind, ScanShape
from clustersim.model.operators import Operator, ParallelRegion, TpCollectives
from clustersim.model.sharded_layer import RankContext

FP32_BYTES: Final = 4
_NO_COLLECTIVES: Final = TpCollectives()


@dataclass(frozen=True, slots=True)
class ScanStage:
    """One device kernel of a scan, per token and head."""

    name: str
    flops: Flop
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan on one rank: its shape, and its kernels in both directions.

    saved_bytes: saved for backward, without its output, which the operator that reads it saves.
    """

    shape: ScanShape
    forward: tuple[ScanStage, ...]
    backward: tuple[ScanStage, ...]
    saved_bytes: Bytes

    @property
    def token_heads(self) -> int:
        """Tokens times heads on this rank."""
        return self.shape.batch * self.shape.sequence * self.shape.heads

    def operator(self, rank: RankContext, name: str, collectives: TpCollectives = _NO_COLLECTIVES) -> Operator:
        """The scan as one operator. Selective recomputation of operations runs it again."""
        backward_shape = replace(self.shape, backward=True)
        return Operator(
            name,
            ParallelRegion.SHARDED,
            tuple(self._kernels(rank, name, self.forward, self.shape)),
            tuple(self._kernels(rank, f"{name}.input_gradient", self.backward, backward_shape)),
            saved_bytes=self.saved_bytes,
            saves_outputs=True,
            tp_collectives=collectives,
        )

    def _kernels(self, rank: RankContext, name: str, stages: Iterable[ScanStage], shape: ScanShape) -> Iterable[Kernel]:
        count = self.token_heads
        for stage in stages:
            flops, moved_bytes = float(stage.flops * count), float(stage.bytes * count)
            yield Kernel(f"{name}.{stage.name}", KernelKind.SCAN, rank.dtype, flops, moved_bytes, shape)
