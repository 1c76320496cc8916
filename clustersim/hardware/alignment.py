"""For which sizes do the libraries of an accelerator have fast kernels?

A matrix product loads its operands and stores its result in vectors of 16 bytes, and memory moves in sectors of 32.
Where the rows of an operand begin at other multiples, the library takes kernels that load less at once, and which are
often those of an older architecture; on Hopper and Blackwell because the copy engine (TMA) wants strides of 16 bytes.
Assumed: a product takes as many times longer as its rows, its shortest alignment among operands and result, say; how
many rows there are is a matter of tiles (`cost.roofline`), not of alignment. Flash attention has kernels for some head
dimensions; it computes a smaller one as the next of them, filled up with zeros.

References: NVIDIA, "Matrix Multiplication Background User's Guide", table 1 (since cuBLAS 11 tensor cores compute any
size, but are most efficient with rows of 16 bytes, on A100 of 128); NVIDIA/Fuser pull request 3320 and NVIDIA/cutlass
issue 2491 (TMA and strides); pytorch/pytorch issue 181718 (which kernels cuBLAS takes, and their rates);
Dao-AILab/flash-attention, csrc/flash_attn/src/static_switch.h and hopper/heuristics.h (head dimensions).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Final

from clustersim.units import Bytes

VECTOR: Final = 16
SECTOR: Final = 32


@dataclass(frozen=True, slots=True)
class Alignment:
    """What sizes that fit badly cost. Rates are relative to those of products whose rows fill whole sectors.

    half_sector: of a product whose rows are multiples of 16 bytes, but not of 32; unaligned: whose rows are not even
    that; head_dims: head dimensions that flash attention has kernels for, ascending (none: it takes any as it is).
    """

    half_sector: float = 1.0
    unaligned: float = 1.0
    head_dims: tuple[int, ...] = ()

    def rate(self, rows: Iterable[Bytes]) -> float:
        """Rate of a product whose operands' and result's rows are so many bytes long, relative to a fitting one's."""
        common = gcd(*map(int, rows))
        if common % VECTOR:
            return self.unaligned
        return self.half_sector if common % SECTOR else 1.0

    @property
    def row(self) -> int:
        """Bytes of which rows should be a multiple; 1 if nothing is known to depend on it."""
        if self.half_sector < 1.0:
            return SECTOR
        return VECTOR if self.unaligned < 1.0 else 1

    def padded(self, head_dim: int) -> int:
        """The head dimension that flash attention computes; beyond its largest, a multiple of its last step."""
        for known in self.head_dims:
            if head_dim <= known:
                return known
        if not self.head_dims:
            return head_dim
        *_, last = (0, *self.head_dims)
        step = last - (0, *self.head_dims)[-2]
        return last + -(-(head_dim - last) // step) * step
