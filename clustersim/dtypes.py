"""Which number formats are there, and how wide are they?"""

from enum import Enum

from clustersim.units import Bytes


class DType(Enum):
    """A number format; the value is its name in files."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def bits(self) -> int:
        """Bits of one element in memory (tf32 is stored as fp32)."""
        return {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8}[self.value]

    @property
    def bytes(self) -> Bytes:
        """Bytes of one element in memory; of formats narrower than a byte a fraction."""
        return self.bits / 8
