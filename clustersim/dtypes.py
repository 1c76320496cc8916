"""Which number formats are there, and how wide are they?"""

from enum import Enum


class DType(Enum):
    """A number format; the value is its name in files."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory (tf32 is stored as fp32)."""
        return {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[self.value]
