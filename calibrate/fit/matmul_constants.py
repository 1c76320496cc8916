"""Which matmul constants do measured matmuls support?

Searched: share of the peak, perimeter, prologue (see `cost.roofline`) and the start of a kernel. Tiles and memory
bandwidth are given.

Formats with scales have the constants of the others but for their share of the peak; where their rows support it, a
prologue and a start of their own, too: kernels of other libraries compute them (DeepGEMM's products in blocks of 128
add what each block gives to a sum elsewhere, and start behind their predecessors). A constant beyond the share is
taken where it predicts shapes that it has not seen better by a tenth (`grid.supported`), and where there are four
shapes for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridSearch, Winner, combinations, steps, supported
from calibrate.fit.published_kernels import MatmulRow, MatmulSet
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds
from clustersim.cost.matmul_tiles import alignment_rate, matmul_options
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import MatmulEfficiency

SHARES: Final = steps(0.35, 1.0, 0.01)
EDGES: Final = (0.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
PROLOGUES: Final = (0.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
LATENCIES: Final = steps(0.0, 8.0, 0.5) * 1e-6
NARROW_SHARES: Final = steps(0.2, 1.0, 0.01)
ENOUGH: Final = 4  # shapes for each constant of a format
Row = MatmulRow | MatmulSet


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    """What is searched; a constant that is given has one value. even: sources count alike, not rows."""

    shares: FloatArray
    edges: Sequence[float]
    prologues: Sequence[float]
    latencies: FloatArray
    even: bool = False


def own_matmul(accelerator: Accelerator, dtype: DType) -> MatmulGrid:
    """The accelerator's own constants of a format, nothing searched."""
    constants, latencies = accelerator.efficiency.matmul, np.array([accelerator.efficiency.kernel_latency_of(dtype)])
    share, prologue = np.array([constants.peak_fraction_of(dtype)]), constants.prologue_of(dtype)
    return MatmulGrid(share, (constants.edge,), (prologue,), latencies)


def search_matmul(accelerator: Accelerator, rows: Sequence[Row], grid: MatmulGrid, *, by_shape: bool = False) -> Winner:
    """The best share, edge, prologue and kernel latency of the grid; rows of formats with one peak.

    by_shape: rows of one shape are left out together.
    """
    alike = [tuple(product.shape for product in row.products) for row in rows] if by_shape else None
    measured, sources = np.array([row.seconds for row in rows]), [row.published for row in rows]
    search = GridSearch(measured, sources, even=grid.even, alike=alike)
    starts = np.cumsum([0, *(len(row.products) for row in rows[:-1])])
    floor = accelerator.efficiency.launch_interval
    for edge, prologue in combinations(grid.edges, grid.prologues):
        for share, busy in _busy(accelerator, edge, prologue, rows, grid.shares):
            labels = [(share, edge, prologue, float(late)) for late in grid.latencies]
            alone = np.maximum(busy[None, :] + grid.latencies[:, None], floor)
            search.offer(labels, np.add.reduceat(alone, starts, axis=1))
    return search.winner()


def fit_matmul(
    accelerator: Accelerator, rows: Sequence[MatmulRow], latency: Seconds | None, *, even: bool = False
) -> tuple[MatmulEfficiency, Seconds, Winner]:
    """Fit share, edge, prologue and kernel latency (unless given); of formats with scales the share is set to it."""
    latencies = LATENCIES if latency is None else np.array([latency])
    winner = search_matmul(accelerator, rows, MatmulGrid(SHARES, EDGES, PROLOGUES, latencies, even))
    share, edge, prologue, late = winner.constants
    found = replace(accelerator.efficiency.matmul.with_uniform_fraction(share), edge=edge, prologue=prologue)
    return found, late, winner


def fit_scaled(accelerator: Accelerator, rows: Sequence[Row]) -> tuple[MatmulEfficiency, Winner]:
    """Fit one format with scales: its share, and what else of its own its rows support."""
    dtype, matmul = rows[0].dtype, accelerator.efficiency.matmul
    own = own_matmul(accelerator, dtype)
    winner = _supported(accelerator, rows, replace(own, shares=NARROW_SHARES))
    share, _, prologue, start = winner.constants
    prologues = None if prologue == matmul.prologue else prologue
    starts = None if start == accelerator.efficiency.kernel_latency else start
    return matmul.with_peak_fraction(dtype, share).with_format_overheads(dtype, prologues, starts), winner


def _supported(accelerator: Accelerator, rows: Sequence[Row], grid: MatmulGrid) -> Winner:
    """The simplest search that the rows support: the share, with a start, with a prologue, with both."""
    shapes = len({tuple(product.shape for product in row.products) for row in rows})
    grids = [grid]
    if shapes >= 2 * ENOUGH:
        grids += [replace(grid, latencies=LATENCIES), replace(grid, prologues=PROLOGUES)]
    if shapes >= 3 * ENOUGH:
        grids.append(replace(grid, latencies=LATENCIES, prologues=PROLOGUES))
    winners = [search_matmul(accelerator, rows, matmul_grid, by_shape=True) for matmul_grid in grids]
    return supported(winners, np.array([row.seconds for row in rows]))


def matmul_seconds(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> FloatArray:
    """Seconds of every row as the accelerator's constants predict them; rows of formats with one peak."""
    compute, memory = _options(accelerator, rows)
    busy: FloatArray = np.maximum(compute, memory).min(axis=1)
    return np.maximum(busy + accelerator.efficiency.kernel_latency, accelerator.efficiency.launch_interval)


def _busy(
    accelerator: Accelerator, edge: float, prologue: float, rows: Sequence[Row], shares: FloatArray
) -> Iterator[tuple[float, FloatArray]]:
    """[products] seconds of those of every row for every share, without the start of the kernel."""
    matmul, dtype = accelerator.efficiency.matmul, rows[0].dtype
    known = matmul.with_peak_fraction(dtype, 1.0) if dtype in LOW_PRECISION_DTYPES else matmul
    full = replace(known.with_uniform_fraction(1.0), edge=edge, prologue=prologue, prologues={})
    whole = replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=full))
    compute, memory = _options(whole, [product for row in rows for product in row.products])
    for share in shares:
        yield float(share), np.maximum(compute / share, memory).min(axis=1)


def _options(accelerator: Accelerator, rows: Sequence[MatmulRow]) -> tuple[FloatArray, FloatArray]:
    shapes = [(row.shape.m, row.shape.n, row.shape.k, row.shape.batch) for row in rows]
    sizes, moved = np.array(shapes, dtype=np.float64).T, np.array([row.moved for row in rows])
    compute, memory = matmul_options(accelerator, rows[0].dtype, sizes, moved)
    rates = np.array([alignment_rate(accelerator, row.dtype, row.shape) for row in rows])[:, None]
    return compute / rates, memory / rates
