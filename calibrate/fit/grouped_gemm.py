"""Fit of the constants of experts' grouped matmuls.

For one matmul per expert, launched on several streams: fraction of peak, perimeter, prologue and host time
per call (see `cost.grouped_gemm`) are searched. For one grouped kernel only the fraction of peak is. Tiles,
memory bandwidth and kernel latency are those of other matmuls. Where all matmuls are too large to be
host-bound, the host time per call is given. In a block-scaled format the peak fraction of the grouped kernel
is searched if its samples support one of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridOptimum, GridSearch, combinations, linear_grid, select_supported
from calibrate.fit.published_kernels import GroupedGemmSample
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.grouped_gemm import grouped_seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import GroupedGemmEfficiency
from clustersim.model.kernels import MatmulShape

PEAK_SHARES: Final = linear_grid(0.3, 0.9, 0.02)
EDGES: Final = (0.0, 16.0, 32.0, 48.0)
PROLOGUES: Final = (0.0, 64.0, 128.0, 192.0, 256.0)
_Candidates = Mapping[tuple[float, ...], GroupedGemmEfficiency]
HOST_CALL_SECONDS: Final = tuple(call * 1e-6 for call in linear_grid(8.0, 10.0, 0.2))


def fit_streamed_gemm(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample], host_call_seconds: Seconds | None
) -> tuple[GroupedGemmEfficiency, GridOptimum]:
    """Best share, edge, prologue and host call time (unless given) of streamed matmuls; kernel_share: the share."""
    search, call_grid = _new_search(samples), HOST_CALL_SECONDS if host_call_seconds is None else (host_call_seconds,)
    for edge, prologue in combinations(EDGES, PROLOGUES):
        _evaluate_candidates(search, accelerator, samples, _candidates(PEAK_SHARES, edge, prologue, call_grid))
    optimum = search.optimum()
    share, edge, prologue, call_seconds = optimum.constants
    return GroupedGemmEfficiency(share, share, prologue, edge, round(call_seconds, 9)), optimum


def fit_low_precision_share(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample]
) -> tuple[GroupedGemmEfficiency, GridOptimum]:
    """Peak fraction of the grouped kernel in a block-scaled format, if the samples support one of its own."""
    current, dtype = accelerator.efficiency.expert_matmul, samples[0].dtype
    shared_candidate: _Candidates = {(): current}
    format_candidates: _Candidates = {
        (float(share),): current.with_kernel_fraction(dtype, float(share)) for share in PEAK_SHARES
    }
    optima = [
        _search_candidates(accelerator, samples, candidates) for candidates in (shared_candidate, format_candidates)
    ]
    optimum = select_supported(optima, np.array([sample.seconds for sample in samples]))
    return format_candidates.get(optimum.constants, current), optimum


def _search_candidates(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample], candidates: _Candidates
) -> GridOptimum:
    """The best of candidates that change only device time."""
    search = _new_search(samples)
    device_seconds = [_grouped_gemm_seconds(accelerator, samples, constants) for constants in candidates.values()]
    search.evaluate(list(candidates), np.array([_sample_seconds(samples, seconds, 0.0) for seconds in device_seconds]))
    return search.optimum()


def fit_kernel_share(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample]
) -> tuple[GroupedGemmEfficiency, GridOptimum]:
    """The best peak fraction of the grouped kernel; all other constants are fixed."""
    current, search = accelerator.efficiency.expert_matmul, _new_search(samples)
    _evaluate_candidates(
        search, accelerator, samples, _candidates(PEAK_SHARES, current.edge, current.prologue, (current.host_launch,))
    )
    optimum = search.optimum()
    return replace(current, kernel_peak_fraction=optimum.constants[0]), optimum


def _new_search(samples: Sequence[GroupedGemmSample]) -> GridSearch:
    return GridSearch(np.array([sample.seconds for sample in samples]), [sample.publication for sample in samples])


def _candidates(
    shares: Iterable[float], edge: float, prologue: float, calls: Iterable[float]
) -> list[tuple[float, ...]]:
    return [(float(share), edge, prologue, float(call)) for share in shares for call in calls]


def _evaluate_candidates(
    search: GridSearch,
    accelerator: Accelerator,
    samples: Sequence[GroupedGemmSample],
    candidates: Sequence[tuple[float, ...]],
) -> None:
    """Predict all samples with candidates that differ in share and host call time."""
    shares = sorted({share for share, *_ in candidates})
    device_seconds = {share: _device_seconds(accelerator, samples, (share, *candidates[0][1:])) for share in shares}
    predicted = np.array([_sample_seconds(samples, device_seconds[share], call) for share, _, _, call in candidates])
    search.evaluate(candidates, predicted)


def _device_seconds(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample], constants: tuple[float, ...]
) -> FloatArray:
    """Device seconds of the concatenated kernels of all samples: [kernels]."""
    share, edge, prologue, call = constants
    return _grouped_gemm_seconds(accelerator, samples, GroupedGemmEfficiency(share, share, prologue, edge, call))


def _grouped_gemm_seconds(
    accelerator: Accelerator, samples: Sequence[GroupedGemmSample], constants: GroupedGemmEfficiency
) -> FloatArray:
    """Seconds of the kernels of all samples with given grouped-matmul constants: [kernels]."""
    changed = replace(accelerator, efficiency=replace(accelerator.efficiency, grouped_gemm=constants))
    kernels = [kernel for sample in samples for kernel in sample.kernels]
    shapes = [kernel.shape for kernel in kernels if isinstance(kernel.shape, MatmulShape)]
    sizes = np.array([(shape.m, shape.n, shape.k, shape.batch) for shape in shapes], dtype=np.float64).T
    moved = np.array([kernel.bytes for kernel in kernels])
    compute, memory = grouped_seconds(changed, kernels[0].dtype, sizes, moved, multi_stream=samples[0].is_streamed)
    return np.hypot(compute, memory) + accelerator.efficiency.kernel_latency


def _sample_seconds(samples: Sequence[GroupedGemmSample], device_seconds: FloatArray, call: float) -> FloatArray:
    """Seconds of each sample, its kernels no shorter than the host's calls: [samples]."""
    kernels = [kernel for sample in samples for kernel in sample.kernels]
    groups = np.array(
        [grouped_kernel.shape.batch for grouped_kernel in kernels if isinstance(grouped_kernel.shape, MatmulShape)],
        dtype=np.float64,
    )
    floors = groups * call if samples[0].is_streamed else np.zeros(len(groups))
    sample_index = np.repeat(np.arange(len(samples)), [len(sample.kernels) for sample in samples])
    summed: FloatArray = np.bincount(
        sample_index, weights=np.maximum(device_seconds, floors), minlength=len(samples)
    ).astype(np.float64)
    return summed
