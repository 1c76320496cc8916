"""Grid search for the matmul constants of the roofline model.

Searched: fraction of peak, perimeter, prologue (see `cost.roofline`) and kernel latency. Tiles and memory
bandwidth are given.

Block-scaled formats have the constants of the others except their peak fraction; where their samples support
it, also a prologue and a latency of their own, since other libraries' kernels run them (DeepGEMM's matmuls
in blocks of 128 accumulate each block outside the tensor core, and overlap their start with the preceding
kernel). A constant beyond the peak fraction is accepted if it lowers the out-of-sample error of whole shapes
by a tenth (`grid_search.select_supported`) and there are four shapes per constant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridOptimum, GridSearch, combinations, linear_grid, select_supported
from calibrate.fit.published_kernels import MatmulSample, MatmulSetSample
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds
from clustersim.cost.matmul_tiles import alignment_rate, matmul_options
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import MatmulEfficiency

PEAK_SHARES: Final = linear_grid(0.35, 1.0, 0.01)
EDGES: Final = (0.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
PROLOGUES: Final = (0.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0)
LATENCIES: Final = linear_grid(0.0, 8.0, 0.5) * 1e-6
LOW_PRECISION_SHARES: Final = linear_grid(0.2, 1.0, 0.01)
MIN_SHAPES_PER_CONSTANT: Final = 4  # shapes required for each constant of a format
MatmulMeasurement = MatmulSample | MatmulSetSample


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    """Candidate values of each constant; a fixed constant has one value.

    equal_source_weights: every source has the same weight in the error, instead of every sample.
    """

    shares: FloatArray
    edges: Sequence[float]
    prologues: Sequence[float]
    latencies: FloatArray
    equal_source_weights: bool = False


def single_point_grid(accelerator: Accelerator, dtype: DType) -> MatmulGrid:
    """Grid of one point: the accelerator's current constants of a format."""
    constants, latencies = accelerator.efficiency.matmul, np.array([accelerator.efficiency.kernel_latency_of(dtype)])
    share, prologue = np.array([constants.peak_fraction_of(dtype)]), constants.prologue_of(dtype)
    return MatmulGrid(share, (constants.edge,), (prologue,), latencies)


def search_matmul(
    accelerator: Accelerator, samples: Sequence[MatmulMeasurement], grid: MatmulGrid, *, fold_by_shape: bool = False
) -> GridOptimum:
    """Best share, edge, prologue and kernel latency of the grid; samples of formats with one peak.

    fold_by_shape: samples of one shape are left out together.
    """
    fold_keys = [tuple(matmul.shape for matmul in sample.matmuls) for sample in samples] if fold_by_shape else None
    measured, sources = np.array([sample.seconds for sample in samples]), [sample.publication for sample in samples]
    search = GridSearch(measured, sources, equal_source_weights=grid.equal_source_weights, fold_keys=fold_keys)
    starts = np.cumsum([0, *(len(sample.matmuls) for sample in samples[:-1])])
    launch_interval = accelerator.efficiency.launch_interval
    for edge, prologue in combinations(grid.edges, grid.prologues):
        for share, device_seconds in _device_seconds(accelerator, edge, prologue, samples, grid.shares):
            labels = [(share, edge, prologue, float(latency)) for latency in grid.latencies]
            kernel_seconds = np.maximum(device_seconds[None, :] + grid.latencies[:, None], launch_interval)
            search.evaluate(labels, np.add.reduceat(kernel_seconds, starts, axis=1))
    return search.optimum()


def fit_matmul(
    accelerator: Accelerator,
    samples: Sequence[MatmulMeasurement],
    latency: Seconds | None,
    *,
    equal_source_weights: bool,
) -> tuple[MatmulEfficiency, Seconds, GridOptimum]:
    """Fit share, edge, prologue and kernel latency (unless given); the share also applies to scaled formats."""
    latencies = LATENCIES if latency is None else np.array([latency])
    optimum = search_matmul(
        accelerator, samples, MatmulGrid(PEAK_SHARES, EDGES, PROLOGUES, latencies, equal_source_weights)
    )
    share, edge, prologue, kernel_latency = optimum.constants
    constants = replace(accelerator.efficiency.matmul.with_uniform_fraction(share), edge=edge, prologue=prologue)
    return constants, kernel_latency, optimum


def fit_low_precision_matmul(
    accelerator: Accelerator, samples: Sequence[MatmulMeasurement]
) -> tuple[MatmulEfficiency, GridOptimum]:
    """Fit one block-scaled format: its peak fraction, and what else its samples support."""
    dtype, matmul = samples[0].dtype, accelerator.efficiency.matmul
    current = single_point_grid(accelerator, dtype)
    optimum = _search_supported(accelerator, samples, replace(current, shares=LOW_PRECISION_SHARES))
    share, _, prologue, latency = optimum.constants
    prologues = None if prologue == matmul.prologue else prologue
    latencies = None if latency == accelerator.efficiency.kernel_latency else latency
    return matmul.with_peak_fraction(dtype, share).with_format_overheads(dtype, prologues, latencies), optimum


def _search_supported(accelerator: Accelerator, samples: Sequence[MatmulMeasurement], grid: MatmulGrid) -> GridOptimum:
    """The most complex supported search: share; with latency; with prologue; with both."""
    shapes = len({tuple(matmul.shape for matmul in sample.matmuls) for sample in samples})
    grids = [grid]
    if shapes >= 2 * MIN_SHAPES_PER_CONSTANT:
        grids += [replace(grid, latencies=LATENCIES), replace(grid, prologues=PROLOGUES)]
    if shapes >= 3 * MIN_SHAPES_PER_CONSTANT:
        grids.append(replace(grid, latencies=LATENCIES, prologues=PROLOGUES))
    optima = [search_matmul(accelerator, samples, matmul_grid, fold_by_shape=True) for matmul_grid in grids]
    return select_supported(optima, np.array([sample.seconds for sample in samples]))


def matmul_seconds(accelerator: Accelerator, samples: Sequence[MatmulMeasurement]) -> FloatArray:
    """Predicted seconds of every sample with the accelerator's constants: [samples]; formats with one peak."""
    compute, memory = _tile_options(accelerator, [matmul for sample in samples for matmul in sample.matmuls])
    device_seconds: FloatArray = np.maximum(compute, memory).min(axis=1)
    efficiency = accelerator.efficiency
    kernels = np.maximum(device_seconds + efficiency.kernel_latency, efficiency.launch_interval)
    starts = np.cumsum([0, *(len(sample.matmuls) for sample in samples[:-1])])
    summed: FloatArray = np.add.reduceat(kernels, starts)
    return summed


def _device_seconds(
    accelerator: Accelerator, edge: float, prologue: float, samples: Sequence[MatmulMeasurement], shares: FloatArray
) -> Iterator[tuple[float, FloatArray]]:
    """Pairs of a share and the seconds of every matmul at that share, without kernel latency: [matmuls]."""
    matmul, dtype = accelerator.efficiency.matmul, samples[0].dtype
    base = matmul.with_peak_fraction(dtype, 1.0) if dtype in LOW_PRECISION_DTYPES else matmul
    full_rate = replace(base.with_uniform_fraction(1.0), edge=edge, prologue=prologue, prologue_by_format={})
    full_rate_accelerator = replace(accelerator, efficiency=replace(accelerator.efficiency, matmul=full_rate))
    compute, memory = _tile_options(
        full_rate_accelerator, [matmul_sample for sample in samples for matmul_sample in sample.matmuls]
    )
    for share in shares:
        yield float(share), np.maximum(compute / share, memory).min(axis=1)


def _tile_options(accelerator: Accelerator, samples: Sequence[MatmulSample]) -> tuple[FloatArray, FloatArray]:
    shapes = [(sample.shape.m, sample.shape.n, sample.shape.k, sample.shape.batch) for sample in samples]
    sizes, moved = np.array(shapes, dtype=np.float64).T, np.array([sample.moved_bytes for sample in samples])
    compute, memory = matmul_options(accelerator, samples[0].dtype, sizes, moved)
    rates = np.array([alignment_rate(accelerator, sample.dtype, sample.shape) for sample in samples])[:, None]
    return compute / rates, memory / rates
