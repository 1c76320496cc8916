"""Which memory bandwidth and kernel latency do measured streaming kernels support?

A streaming kernel takes its bytes over the bandwidth that such kernels reach, plus a latency for each device kernel
that it launches, and never less than the launches take on the host (see `cost.roofline`). Searched: the part of the
memory bandwidth, and the latency. Casts into formats with scales reach a part of that again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridSearch, Winner, factors, steps, supported
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.accelerator import Accelerator

SHARES: Final = factors(0.01, 1.0, 1.01)
CAST_PARTS: Final = steps(0.4, 1.0, 0.01)


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One measured streaming kernel. moved: bytes read and written; launches: device kernels that it is."""

    moved: Bytes
    launches: int
    seconds: Seconds


def fit_streaming(accelerator: Accelerator, rows: Sequence[StreamRow], latencies: FloatArray) -> Winner:
    """Part of the memory bandwidth, and kernel latency: what of the two the rows support, else the accelerator's."""
    own = accelerator.efficiency
    share, latency = np.array([own.memory]), np.array([own.kernel_latency])
    grids = ((share, latency), (SHARES, latency), (share, latencies), (SHARES, latencies))
    winners = [search_streaming(accelerator, rows, shares, starts) for shares, starts in grids]
    return supported(winners, np.array([row.seconds for row in rows]))


def fit_casts(accelerator: Accelerator, rows: Sequence[StreamRow]) -> Winner:
    """Part of the memory bandwidth that casts reach, where they support one of their own; all else is known."""
    own = accelerator.efficiency
    latency, parts = np.array([own.kernel_latency]), (np.array([own.casts]), CAST_PARTS)
    winners = [search_streaming(accelerator, rows, own.memory * array, latency) for array in parts]
    return supported(winners, np.array([row.seconds for row in rows]))


def search_streaming(
    accelerator: Accelerator, rows: Sequence[StreamRow], shares: FloatArray, latencies: FloatArray
) -> Winner:
    """The best of these parts of the memory bandwidth and latencies."""
    search = GridSearch(np.array([row.seconds for row in rows]))
    moving = np.array([row.moved for row in rows]) / accelerator.memory_bandwidth
    launches = np.array([row.launches for row in rows])
    floor = launches * accelerator.efficiency.launch_interval
    for latency in latencies:
        seconds = moving / shares[:, None] + launches * latency
        labels = [(float(share), float(latency)) for share in shares]
        search.offer(labels, np.maximum(seconds, floor))
    return search.winner()
