"""For which sizes do the libraries of an accelerator have fast kernels?

A matrix product loads its operands and stores its result 16 bytes at a time. Where the rows of one of them begin at
other multiples, the library takes slower kernels: on Ampere and later those that were made for Turing, because the
copy engine of Hopper and Blackwell (TMA) wants strides of 16 bytes too; for many products in a batch, in cuBLAS of
2022, those of CUDA cores. Assumed: a product takes as many times longer as its worst row says. How many rows there are
is a matter of tiles (`cost.roofline`). Multiples beyond 16 bytes, which NVIDIA's guide recommends, cost nothing here:
on RTX 4090 2056 is slower than 2055 (pytorch/pytorch issue 181718), but on A100 BLOOM's steps with head dimensions of
104 and with 1800 columns a rank are no slower than others.
Flash attention has kernels for some head dimensions; it computes a smaller one as the next of them, filled up with
zeros.

References: NVIDIA, "Matrix Multiplication Background User's Guide", table 1; NVIDIA/Fuser pull request 3320 and
NVIDIA/cutlass issue 2491 (TMA and strides); pytorch/pytorch issue 181718 (which kernels cuBLAS takes, and their rates);
bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md; Dao-AILab/flash-attention,
csrc/flash_attn/src/static_switch.h and hopper/flash_api.cpp (head dimensions).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Bytes

ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class KernelAlignment:
    """What sizes that fit badly cost.

    unaligned: rate of a product with rows that are no multiples of 16 bytes, relative to one whose rows are; batched:
    the same where there are many in a batch; head_dims: head dimensions that flash attention has kernels for, ascending
    (none: it takes any as it is).
    """

    unaligned_rate: float = 1.0
    batched_unaligned_rate: float = 1.0
    head_dims: tuple[int, ...] = ()

    def relative_rate(self, row_bytes: Iterable[Bytes], *, batched: bool = False) -> float:
        """Relative rate of a product whose operands and result have rows of so many bytes."""
        if all(size % ALIGNMENT_BYTES == 0 for size in row_bytes):
            return 1.0
        return self.batched_unaligned_rate if batched else self.unaligned_rate

    def padded_head_dim(self, head_dim: int) -> int:
        """The head dimension that flash attention computes; beyond its largest, a multiple of its last step."""
        if not self.head_dims:
            return head_dim
        for supported in self.head_dims:
            if head_dim <= supported:
                return supported
        previous, last = (0, *self.head_dims)[-2:]
        return last + -(-(head_dim - last) // (last - previous)) * (last - previous)
