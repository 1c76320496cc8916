"""Which number formats are there, and how wide are they?

NF4 is a format that weights are stored in, not one that is computed with (Dettmers et al. 2023, arXiv:2305.14314,
section 3): 4 bits of each, an 8-bit scale of each block of 64, and a 32-bit scale of 256 of these scales.
"""

from enum import Enum
from typing import Final

from clustersim.units import Bytes


class DType(Enum):
    """A number format; the value is its name in files."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    NF4 = "nf4"

    @property
    def bits(self) -> float:
        """Bits of one element in memory (tf32 is stored as fp32), with its part of the scales of its block."""
        return {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}[
            self.value
        ]

    @property
    def bytes(self) -> Bytes:
        """Bytes of one element in memory; of formats narrower than a byte a fraction."""
        return self.bits / 8


COMPUTED: Final = tuple(dtype for dtype in DType if dtype is not DType.NF4)
"""The formats that are computed with."""
