"""Which matmul constants do measured matmuls support?

Searched: share of the peak, perimeter, prologue (see `cost.roofline`) and the start of a kernel. Tiles and memory
bandwidth are given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.grid import GridSearch, Winner, combinations, steps
from calibrate.fit.published_kernels import MatmulRow
from clustersim.arrays import FloatArray
from clustersim.cost.tiles import alignment_rate, matmul_options
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import MatmulEfficiency
from clustersim.units import Seconds

SHARES: Final = steps(0.35, 1.0, 0.01)
EDGES: Final = (0.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
PROLOGUES: Final = (0.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
LATENCIES: Final = steps(0.0, 8.0, 0.5) * 1e-6


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    """What is searched; a constant that is given has one value. even: sources count alike, not rows."""

    shares: FloatArray
    edges: Sequence[float]
    prologues: Sequence[float]
    latencies: FloatArray
    even: bool = False


def own_matmul(accelerator: Accelerator) -> MatmulGrid:
    """The accelerator's own constants (of a dense format), nothing searched."""
    constants = accelerator.efficiency.matmul
    latencies = np.array([accelerator.efficiency.kernel_latency])
    return MatmulGrid(np.array([constants.share]), (constants.edge,), (constants.prologue,), latencies)


def search_matmul(accelerator: Accelerator, rows: Sequence[MatmulRow], grid: MatmulGrid) -> Winner:
    """The best share, edge, prologue and kernel latency of the grid; rows of formats with one peak."""
    search = GridSearch(np.array([row.seconds for row in rows]), [row.published for row in rows], even=grid.even)
    floor = accelerator.efficiency.launch_interval
    for edge, prologue in combinations(grid.edges, grid.prologues):
        for share, busy in _busy(accelerator, edge, prologue, rows, grid.shares):
            labels = [(share, edge, prologue, float(late)) for late in grid.latencies]
            search.offer(labels, np.maximum(busy[None, :] + grid.latencies[:, None], floor))
    return search.winner()


def fit_matmul(
    accelerator: Accelerator, rows: Sequence[MatmulRow], latency: Seconds | None, *, even: bool = False
) -> tuple[MatmulEfficiency, Seconds, Winner]:
    """Fit share, edge, prologue and kernel latency (unless given); of formats with scales the share is set to it."""
    latencies = LATENCIES if latency is None else np.array([latency])
    winner = search_matmul(accelerator, rows, MatmulGrid(SHARES, EDGES, PROLOGUES, latencies, even))
    share, edge, prologue, late = winner.constants
    found = replace(accelerator.efficiency.matmul.at(share), edge=edge, prologue=prologue)
    return found, late, winner


def fit_share(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> tuple[MatmulEfficiency, Winner]:
    """Fit the share of one format with scales alone; all other constants are those of the other formats."""
    winner = search_matmul(accelerator, rows, replace(own_matmul(accelerator), shares=SHARES))
    return accelerator.efficiency.matmul.with_share(rows[0].dtype, winner.constants[0]), winner


def matmul_seconds(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> FloatArray:
    """Seconds of every row as the accelerator's constants predict them; rows of formats with one peak."""
    compute, memory = _options(accelerator, rows)
    busy: FloatArray = np.maximum(compute, memory).min(axis=1)
    return np.maximum(busy + accelerator.efficiency.kernel_latency, accelerator.efficiency.launch_interval)


def _busy(
    accelerator: Accelerator, edge: float, prologue: float, rows: Sequence[MatmulRow], shares: FloatArray
) -> Iterator[tuple[float, FloatArray]]:
    """Seconds of every row for every share, without the start of the kernel."""
    full = replace(accelerator.efficiency.matmul.at(1.0), edge=edge, prologue=prologue)
    whole = replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=full))
    compute, memory = _options(whole, rows)
    for share in shares:
        yield float(share), np.maximum(compute / share, memory).min(axis=1)


def _options(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> tuple[FloatArray, FloatArray]:
    shapes = [(row.shape.m, row.shape.n, row.shape.k, row.shape.batch) for row in rows]
    sizes, moved = np.array(shapes, dtype=np.float64).T, np.array([row.moved for row in rows])
    compute, memory = matmul_options(accelerator, rows[0].dtype, sizes, moved)
    rates = np.array([alignment_rate(accelerator, row.dtype, row.shape) for row in rows])[:, None]
    return compute / rates, memory / rates
