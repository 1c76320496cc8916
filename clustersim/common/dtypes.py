"""Which number formats are there, and how wide are they?

Formats below 16 bits carry scales, and differ in which elements share a scale:

| format | elements | one scale per | scale size |
|---|---|---|---|
| fp8 | E4M3 or E5M2 | tensor | 4 bytes |
| fp8-rowwise | E4M3 | row, along the dimension that a matmul sums over | 4 bytes |
| fp8-blockwise | E4M3 | 128 of a row (weights: 128 x 128) | 4 bytes |
| mxfp8 | E4M3 | 32 of a row | 1 byte (E8M0) |
| nvfp4 | E2M1 | 16 of a row (weights: 16 x 16), and the tensor | 1 byte (E4M3), 4 bytes |

Sources: NVIDIA/TransformerEngine, docs/examples/fp8_primer and its recipes (fp8, mxfp8, nvfp4); DeepSeek-AI
2024, arXiv:2412.19437, section 3.3.2 (blocks); pytorch/ao, torchao/float8 (rows); Open Compute Project,
Microscaling Formats (MX) v1.0. Per-tensor and per-row scales are negligible and not counted.

NF4 is a storage format of weights, not a compute format (Dettmers et al. 2023, arXiv:2305.14314, section 3):
4 bits per element, an 8-bit scale per block of 64, and a 32-bit scale per 256 of these scales. INT8 is one, too, where
frozen weights have 8 bits and a scale a row (Dettmers et al. 2022, arXiv:2208.07339): its products are counted as a
dequantization and one in the compute format.
"""

from typing import Final

from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes


class DType(IdentityEnum):
    """A number format; the value is its name in files."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP8_ROWWISE = "fp8-rowwise"
    FP8_BLOCKWISE = "fp8-blockwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    NF4 = "nf4"
    INT8 = "int8"

    @property
    def bits(self) -> float:
        """Bits of one element in memory (tf32 is stored as fp32), including its share of its block's scales."""
        return _BITS[self]

    @property
    def bytes(self) -> Bytes:
        """Bytes of one element in memory; fractional for formats with scales or below one byte."""
        return self.bits / 8

    @property
    def unscaled_bytes(self) -> Bytes:
        """Bytes of one element without scales, which are stored separately."""
        return 1.0 if self in _EIGHT_BIT_DTYPES else 0.5 if self is DType.NVFP4 else self.bytes

    @property
    def peak_dtype(self) -> "DType":
        """The format whose peak FLOP/s bounds a matmul: scales are applied in parallel to the multiplications."""
        return DType.FP8 if self in _EIGHT_BIT_DTYPES else self


_BITS: Final = {
    DType.FP32: 32.0,
    DType.TF32: 32.0,
    DType.BF16: 16.0,
    DType.FP16: 16.0,
    DType.FP8: 8.0,
    DType.FP8_ROWWISE: 8.0,
    DType.FP8_BLOCKWISE: 8.0 + 32 / 128,
    DType.MXFP8: 8.0 + 8 / 32,
    DType.NVFP4: 4.0 + 8 / 16,
    DType.NF4: 4.0 + 8 / 64 + 32 / (64 * 256),
    DType.INT8: 8.0,
}
_EIGHT_BIT_DTYPES: Final = (DType.FP8, DType.FP8_ROWWISE, DType.FP8_BLOCKWISE, DType.MXFP8)
LOW_PRECISION_DTYPES: Final = (*_EIGHT_BIT_DTYPES, DType.NVFP4)
"""Compute formats whose elements share scales."""
STORED_WEIGHT_DTYPES: Final = (DType.NF4, DType.INT8)
"""Formats that frozen weights are only stored in."""
COMPUTE_DTYPES: Final = tuple(dtype for dtype in DType if dtype not in STORED_WEIGHT_DTYPES)
"""Formats that matmuls can be computed in."""
