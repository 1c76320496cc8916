"""Which published kernel measurements does the project carry?

`published/kernels.csv` holds one matrix multiplication, attention kernel or transformer layer per row, with the paper
or repository that it comes from and the place in it; `published/bandwidth.csv` holds measured memory bandwidths. Rows
of a search's best shape are upper bounds, and are never fitted on.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clustersim.cost.roofline import BACKWARD_MATMULS, FORWARD_MATMULS
from clustersim.dtypes import DType
from clustersim.units import BytesPerSecond, Flop, FlopPerSecond, Seconds
from clustersim.workload.attention import Core
from clustersim.workload.kernels import AttentionShape, Kernel, MatmulShape, Operands

FOLDER: Final = Path(__file__).parents[1] / "published"
# cuBLAS names operands column by column, so that its TN is a linear layer's forward, as which those without count.
_OPERANDS: Final = {"TN": Operands.NT, "NN": Operands.NN, "NT": Operands.TN, "": Operands.NT}
_BEST_OF_SEARCH: Final = "best shape of a search"
# The text peak of FlashAttention-2 on A100 belongs to the longest sequence of the paper's setting: 16k tokens,
# hidden 2048, head dimension 128, no mask (arXiv:2307.08691, section 4.1 and figures 4-6).
_PEAK_SHAPE: Final = AttentionShape(batch=1, query=16384, key=16384, heads=16, kv_heads=16, head_dim=128, causal=False)


@dataclass(frozen=True, slots=True)
class MatmulRow:
    """One measured matmul. moved: bytes if every operand passes once."""

    accelerator: str
    shape: MatmulShape
    dtype: DType
    moved: float
    seconds: Seconds
    source: str = ""

    @property
    def flops(self) -> Flop:
        """FLOP of the product."""
        return 2.0 * self.shape.m * self.shape.n * self.shape.k * self.shape.batch


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One measured flash attention kernel.

    flops: executed, so half of the full matrix with a causal mask; moved: bytes if every operand passes once.
    """

    accelerator: str
    shape: AttentionShape
    dtype: DType
    backward: bool
    flops: Flop
    moved: float
    seconds: Seconds
    source: str = ""


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def matmuls() -> list[MatmulRow]:
    """Every measured matmul, without upper bounds."""
    rows = (row for row in _rows("kernels.csv") if row["op"] == "gemm")
    return [_matmul(row) for row in rows if row["implementation"] != _BEST_OF_SEARCH]


def best_rates() -> dict[tuple[str, DType], FlopPerSecond]:
    """Rate of the best matmul shape that a search found, by accelerator and number format."""
    rows = [row for row in _rows("kernels.csv") if row["implementation"] == _BEST_OF_SEARCH]
    return {(row["gpu"], DType(row["dtype"])): float(row["tflops"]) * 1e12 for row in rows}


def attentions() -> list[AttentionRow]:
    """Every measured flash attention kernel, and the peaks that the papers' texts state."""
    rows = _rows("kernels.csv")
    measured = [_attention(row) for row in rows if row["op"] == "attention"]
    return measured + [_peak(row) for row in rows if row["op"] == "attention_peak"]


def bandwidths() -> dict[str, list[BytesPerSecond]]:
    """Measured memory bandwidths by accelerator."""
    found: dict[str, list[BytesPerSecond]] = {}
    for row in _rows("bandwidth.csv"):
        found.setdefault(row["gpu"], []).append(float(row["bytes_per_second"]))
    return found


def _matmul(row: dict[str, str]) -> MatmulRow:
    operand, _, result = row["dtype"].partition(" -> ")
    # An FP32 result is the weight gradient, which is accumulated into: read and written.
    added = DType.FP32 if result == "fp32" else None
    operands = _OPERANDS[row["layout"]]
    shape = MatmulShape(int(row["m"]), int(row["n"]), int(row["k"]), operands=operands, accumulated=added)
    result_bytes = 2 * added.bytes if added else DType.BF16.bytes
    inputs = (shape.m + shape.n) * shape.k * DType(operand).bytes
    moved = inputs + shape.m * shape.n * result_bytes
    seconds = float(row["time_us"]) * 1e-6
    return MatmulRow(row["gpu"], shape, DType(operand), float(moved), seconds, _source(row))


def _attention(row: dict[str, str]) -> AttentionRow:
    sequence, heads, causal = int(row["seq"]), int(row["heads"]), row["causal"] == "yes"
    shape = AttentionShape(
        batch=int(row["batch"]),
        query=sequence,
        key=sequence,
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        head_dim=int(row["head_dim"]),
        causal=causal,
    )
    counted_twice = causal and "no causal halving" in row["flop_convention"]
    return _timed(row, shape, float(row["tflops"]) * 1e12 / (2.0 if counted_twice else 1.0))


def _peak(row: dict[str, str]) -> AttentionRow:
    return _timed(row, _PEAK_SHAPE, float(row["tflops"]) * 1e12)


def _timed(row: dict[str, str], shape: AttentionShape, rate: FlopPerSecond) -> AttentionRow:
    backward = row["direction"] == "bwd"
    per_score = (BACKWARD_MATMULS if backward else FORWARD_MATMULS) * shape.head_dim
    scores = shape.batch * shape.heads * shape.query * shape.key * (0.5 if shape.causal else 1.0)
    dtype = DType.FP16 if row["dtype"] == "fp16" else DType.BF16
    return AttentionRow(
        accelerator=row["gpu"],
        shape=shape,
        dtype=dtype,
        backward=backward,
        flops=scores * per_score,
        moved=flash_kernel(shape, dtype, backward=backward).bytes,
        seconds=scores * per_score / rate,
        source=_source(row),
    )


def _source(row: dict[str, str]) -> str:
    return f"{row['source']}: {row['locator']}"


def flash_kernel(shape: AttentionShape, dtype: DType, *, backward: bool) -> Kernel:
    """Flash attention of a shape as a training step runs it."""
    (operator,) = Core(shape, dtype, dropout=False, fused=True).flash()
    return operator.input_gradient[0] if backward else operator.forward[0]
