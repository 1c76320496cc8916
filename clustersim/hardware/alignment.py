"""For which sizes does an accelerator have fast kernels?

A matmul loads its operands and stores its result 16 bytes at a time. Where the rows of one of them start at
other multiples, the library falls back to slower kernels: on Ampere and later those made for Turing, because
the TMA of Hopper and Blackwell needs 16-byte strides too; for batched matmuls, in cuBLAS of 2022, those of
CUDA cores. Assumed: the worst-aligned row determines the slowdown. Tile and wave quantization is modelled in
`cost.roofline`. Multiples beyond 16 bytes, which NVIDIA's guide recommends, gain nothing here: on RTX 4090,
2056 is slower than 2055 (pytorch/pytorch issue 181718), but on A100, BLOOM's steps with head dimensions of
104 and 1800 columns per rank are no slower than others. Flash attention has kernels for some head dimensions;
smaller ones are zero-padded to the next.

References: NVIDIA, "Matrix Multiplication Background User's Guide", table 1; NVIDIA/Fuser pull request 3320
and NVIDIA/cutlass issue 2491 (TMA and strides); pytorch/pytorch issue 181718 (cuBLAS kernel selection and
rates); bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md; Dao-AILab/flash-attention,
csrc/flash_attn/src/static_switch.h and hopper/flash_api.cpp (head dimensions).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Bytes

ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class KernelAlignment:
    """Cost of misaligned sizes.

    unaligned_rate: rate of a matmul with rows that are not multiples of 16 bytes, relative to an aligned one;
    batched_unaligned_rate: the same for batched matmuls; head_dims: head dimensions with flash attention kernels,
    ascending (none: any, without padding).
    """

    unaligned_rate: float = 1.0
    batched_unaligned_rate: float = 1.0
    head_dims: tuple[int, ...] = ()

    def relative_rate(self, row_bytes: Iterable[Bytes], *, batched: bool = False) -> float:
        """Relative rate of a matmul; row_bytes: bytes of a row of each operand and of the result."""
        if all(size % ALIGNMENT_BYTES == 0 for size in row_bytes):
            return 1.0
        return self.batched_unaligned_rate if batched else self.unaligned_rate

    def padded_head_dim(self, head_dim: int) -> int:
        """The head dimension that flash attention computes; above its largest, a multiple of its last increment."""
        if not self.head_dims:
            return head_dim
        for supported in self.head_dims:
            if head_dim <= supported:
                return supported
        previous, last = (0, *self.head_dims)[-2:]
        return last + -(-(head_dim - last) // (last - previous)) * (last - previous)
