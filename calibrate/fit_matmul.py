"""Which matmul constants do published matmuls support?

Searched: share of the peak, perimeter, prologue (see `cost.roofline`) and the start of a kernel. Tiles and memory
bandwidth are given.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from calibrate.grid import GridSearch, Winner, steps
from calibrate.published_kernels import MatmulRow
from clustersim.cost.roofline import matmul_options
from clustersim.dtypes import DType
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import MatmulEfficiency
from clustersim.units import Seconds

FloatArray = NDArray[np.float64]

SHARES: Final = steps(0.35, 1.0, 0.01)
EDGES: Final = (0.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
PROLOGUES: Final = (0.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
LATENCIES: Final = steps(0.0, 8.0, 0.5) * 1e-6


def fit_matmul(
    accelerator: Accelerator, rows: Sequence[MatmulRow], latency: Seconds | None
) -> tuple[MatmulEfficiency, Seconds, Winner]:
    """Fit share, edge, prologue and kernel latency (unless given); fp8_share is set to the share."""
    search = GridSearch(np.array([row.seconds for row in rows]))
    latencies = LATENCIES if latency is None else np.array([latency])
    start = accelerator.efficiency.matmul
    for edge in EDGES:
        for prologue in PROLOGUES:
            constants = replace(start, edge=edge, prologue=prologue)
            for share, busy in _busy(accelerator, constants, rows):
                labels = [(share, edge, prologue, float(late)) for late in latencies]
                search.offer(labels, busy[None, :] + latencies[:, None])
    winner = search.winner()
    share, edge, prologue, late = winner.constants
    found = replace(start, share=share, fp8_share=share, edge=edge, prologue=prologue)
    return found, late, winner


def fit_fp8_share(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> tuple[MatmulEfficiency, Winner]:
    """Fit the share of the FP8 peak alone; all other constants are those of the dense formats."""
    search = GridSearch(np.array([row.seconds for row in rows]))
    constants = accelerator.efficiency.matmul
    for share, busy in _busy(accelerator, constants, rows):
        search.offer([(share,)], busy[None, :] + accelerator.efficiency.kernel_latency)
    winner = search.winner()
    return replace(constants, fp8_share=winner.constants[0]), winner


def matmul_seconds(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> FloatArray:
    """Seconds of every row as the accelerator's constants predict them; rows of one share of the peak (FP8 or not)."""
    compute, memory = _options(accelerator, rows)
    busy: FloatArray = np.maximum(compute, memory).min(axis=1)
    return busy + accelerator.efficiency.kernel_latency


def _busy(
    accelerator: Accelerator, constants: MatmulEfficiency, rows: Sequence[MatmulRow]
) -> list[tuple[float, FloatArray]]:
    """Seconds of every row for every share, without the start of the kernel."""
    full = replace(constants, share=1.0, fp8_share=1.0)
    whole = replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=full))
    compute, memory = _options(whole, rows)
    return [(float(share), np.maximum(compute / share, memory).min(axis=1)) for share in SHARES]


def _options(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> tuple[FloatArray, FloatArray]:
    shapes = [(row.shape.m, row.shape.n, row.shape.k, row.shape.batch) for row in rows]
    sizes, moved = np.array(shapes, dtype=np.float64).T, np.array([row.moved for row in rows])
    return matmul_options(accelerator, DType.FP8 if rows[0].dtype is DType.FP8 else DType.FP16, sizes, moved)
