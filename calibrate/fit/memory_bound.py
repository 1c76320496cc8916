"""Grid search for memory bandwidth and kernel latency of memory-bound kernels.

A memory-bound kernel takes its bytes over the reached bandwidth plus a latency for each device kernel that
it launches, and never less than the launches take on the host (see `cost.roofline`). Searched: the fraction
of memory bandwidth and the latency. Casts to block-scaled formats reach a fraction of that bandwidth. Kernels that
are bound by their elements (`cost.elementwise`) take at least the time of these, whatever the bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridOptimum, GridSearch, geometric_grid, linear_grid, select_supported
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.accelerator import Accelerator

SHARE_GRID: Final = geometric_grid(0.01, 1.0, 1.01)
CAST_SHARE_GRID: Final = linear_grid(0.4, 1.0, 0.01)


@dataclass(frozen=True, slots=True)
class MemoryBoundSample:
    """One measured memory-bound operator.

    moved_bytes: read and written; launch_count: number of device kernels; element_bytes: those of moved_bytes
    whose kernels take at least element_seconds.
    """

    moved_bytes: Bytes
    launch_count: int
    seconds: Seconds
    element_bytes: Bytes = 0.0
    element_seconds: Seconds = 0.0


def fit_memory_bound(
    accelerator: Accelerator, samples: Sequence[MemoryBoundSample], latencies: FloatArray
) -> GridOptimum:
    """Fraction of memory bandwidth and kernel latency, each only if the samples support it."""
    efficiency = accelerator.efficiency
    share, latency = np.array([efficiency.memory_bandwidth_fraction]), np.array([efficiency.kernel_latency])
    grids = ((share, latency), (SHARE_GRID, latency), (share, latencies), (SHARE_GRID, latencies))
    optima = [search_memory_bound(accelerator, samples, shares, latency_grid) for shares, latency_grid in grids]
    return select_supported(optima, np.array([sample.seconds for sample in samples]))


def fit_casts(accelerator: Accelerator, samples: Sequence[MemoryBoundSample]) -> GridOptimum:
    """Fraction of memory bandwidth of casts, if the samples support one of its own; all other constants are fixed."""
    efficiency = accelerator.efficiency
    latency, grids = (
        np.array([efficiency.kernel_latency]),
        (np.array([efficiency.quantization_bandwidth_ratio]), CAST_SHARE_GRID),
    )
    optima = [
        search_memory_bound(accelerator, samples, efficiency.memory_bandwidth_fraction * shares, latency)
        for shares in grids
    ]
    return select_supported(optima, np.array([sample.seconds for sample in samples]))


def search_memory_bound(
    accelerator: Accelerator, samples: Sequence[MemoryBoundSample], shares: FloatArray, latencies: FloatArray
) -> GridOptimum:
    """The best of these bandwidth fractions and latencies."""
    search = GridSearch(np.array([sample.seconds for sample in samples]))
    element_bytes = np.array([sample.element_bytes for sample in samples])
    streamed = (np.array([sample.moved_bytes for sample in samples]) - element_bytes) / accelerator.memory_bandwidth
    unvectorized = element_bytes / accelerator.memory_bandwidth
    element_seconds = np.array([sample.element_seconds for sample in samples])
    launch_counts = np.array([sample.launch_count for sample in samples])
    launch_seconds = launch_counts * accelerator.efficiency.launch_interval
    for latency in latencies:
        transfer_seconds = streamed / shares[:, None] + np.maximum(unvectorized / shares[:, None], element_seconds)
        seconds = transfer_seconds + launch_counts * latency
        labels = [(float(share), float(latency)) for share in shares]
        search.evaluate(labels, np.maximum(seconds, launch_seconds))
    return search.optimum()
