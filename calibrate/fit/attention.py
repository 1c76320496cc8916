"""Grid search for the flash attention constants of the roofline model.

Searched: fraction of peak, cost of a causal mask, overheads of softmax and of starting a block, and the
block of rows that one compute unit processes at a time (see `cost.roofline`). For block-scaled low-precision
formats only a speed-up is searched, all other constants staying as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridOptimum, GridSearch, combinations, linear_grid
from calibrate.fit.published_kernels import AttentionSample
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.cost.roofline import attention_load
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency

PEAK_SHARES: Final = linear_grid(0.35, 1.0, 0.01)
CAUSAL_FACTORS: Final = (0.8, 0.85, 0.9, 0.95, 1.0)
HEAD_OVERHEADS: Final = (0, 8, 16, 24, 32, 48, 64, 96)
KEY_OVERHEADS: Final = (0, 32, 64, 96, 128, 192, 256, 384, 512)
BLOCK_SIZES: Final = (64, 128, 256)
SPEEDUPS: Final = linear_grid(1.0, 3.0, 0.01)  # in block-scaled formats
UNEQUAL_HEAD_RATIOS: Final = linear_grid(0.1, 1.0, 0.01)


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """Candidate values of each constant; a fixed constant has one value.

    equal_source_weights: every source has the same weight in the error, instead of every sample.
    """

    shares: FloatArray
    causal_factors: Sequence[float]
    head_overheads: Sequence[float]
    key_overheads: Sequence[float]
    block_sizes: Sequence[int]
    equal_source_weights: bool = False


def single_point_grid(constants: AttentionEfficiency) -> AttentionGrid:
    """Grid of one point: the given constants."""
    return AttentionGrid(
        shares=np.array([constants.peak_fraction]),
        causal_factors=(constants.causal_ratio,),
        head_overheads=(constants.head_overhead,),
        key_overheads=(constants.key_overhead,),
        block_sizes=(constants.query_block,),
    )


def search_attention(accelerator: Accelerator, samples: Sequence[AttentionSample], grid: AttentionGrid) -> GridOptimum:
    """Best peak fraction, causal factor, head and key overheads and block size of the grid, for one direction."""
    search = GridSearch(
        np.array([sample.seconds for sample in samples]),
        [sample.publication for sample in samples],
        equal_source_weights=grid.equal_source_weights,
    )
    causal = np.array([sample.shape.causal for sample in samples])
    memory, efficiency = _memory_seconds(accelerator, samples), accelerator.efficiency
    for head_overhead, key_overhead, block in combinations(grid.head_overheads, grid.key_overheads, grid.block_sizes):
        full_rate_seconds = _compute_seconds_at_peak(
            accelerator, _efficiency(1.0, 1.0, head_overhead, key_overhead, block), samples
        )
        for causal_factor in grid.causal_factors:
            compute = (
                np.where(causal, full_rate_seconds / causal_factor, full_rate_seconds)[None, :] / grid.shares[:, None]
            )
            seconds = np.maximum(compute, memory) + efficiency.kernel_latency
            labels = [
                (float(share), causal_factor, float(head_overhead), float(key_overhead), float(block))
                for share in grid.shares
            ]
            search.evaluate(labels, np.maximum(seconds, efficiency.launch_interval))
    return search.optimum()


def winner_constants(optimum: GridOptimum) -> AttentionEfficiency:
    """The constants of a search's optimum."""
    return _efficiency(*optimum.constants)


def fit_attention(
    accelerator: Accelerator,
    samples: Sequence[AttentionSample],
    default_causal_factor: float,
    *,
    shares: FloatArray = PEAK_SHARES,
    equal_source_weights: bool,
) -> tuple[AttentionEfficiency, GridOptimum]:
    """Fit the constants of one direction.

    default_causal_factor: causal factor to use if no sample has a causal mask; shares: candidate fractions of the
    peak.
    """
    causal_factors = CAUSAL_FACTORS if any(sample.shape.causal for sample in samples) else (default_causal_factor,)
    grid = AttentionGrid(shares, causal_factors, HEAD_OVERHEADS, KEY_OVERHEADS, BLOCK_SIZES, equal_source_weights)
    optimum = search_attention(accelerator, samples, grid)
    return winner_constants(optimum), optimum


def fit_low_precision_speedup(
    accelerator: Accelerator, samples: Sequence[AttentionSample], constants: AttentionEfficiency
) -> tuple[AttentionEfficiency, GridOptimum]:
    """Constants of one direction with the speed-up of the scaled format of these samples (relative to BF16)."""
    search = GridSearch(np.array([sample.seconds for sample in samples]), [sample.publication for sample in samples])
    bf16_samples = [replace(sample, dtype=DType.BF16) for sample in samples]
    compute = _compute_seconds_at_peak(accelerator, constants, bf16_samples) / constants.peak_fraction
    seconds = np.maximum(compute[None, :] / SPEEDUPS[:, None], _memory_seconds(accelerator, samples))
    search.evaluate([(float(speedup),) for speedup in SPEEDUPS], seconds + accelerator.efficiency.kernel_latency)
    optimum = search.optimum()
    return replace(
        constants, speedup_by_format={**constants.speedup_by_format, samples[0].dtype: optimum.constants[0]}
    ), optimum


def fit_unequal_heads(
    accelerator: Accelerator, samples: Sequence[AttentionSample], constants: AttentionEfficiency
) -> tuple[AttentionEfficiency, GridOptimum]:
    """Constants of one direction with the rate of kernels whose heads of keys and values differ in size."""
    search = GridSearch(np.array([sample.seconds for sample in samples]), [sample.publication for sample in samples])
    compute = _compute_seconds_at_peak(accelerator, constants, samples) / constants.peak_fraction
    causal = np.array([sample.shape.causal for sample in samples])
    compute = np.where(causal, compute / constants.causal_ratio, compute)
    seconds = np.maximum(compute[None, :] / UNEQUAL_HEAD_RATIOS[:, None], _memory_seconds(accelerator, samples))
    search.evaluate([(float(ratio),) for ratio in UNEQUAL_HEAD_RATIOS], seconds + accelerator.efficiency.kernel_latency)
    optimum = search.optimum()
    return replace(constants, unequal_head_ratio=optimum.constants[0]), optimum


def _efficiency(
    share: float, causal: float, head_overhead: float, key_overhead: float, block: float
) -> AttentionEfficiency:
    return AttentionEfficiency(share, causal, float(head_overhead), float(key_overhead), int(block))


def _compute_seconds_at_peak(
    accelerator: Accelerator, constants: AttentionEfficiency, samples: Sequence[AttentionSample]
) -> FloatArray:
    """Seconds of each sample's arithmetic at 100 % of peak: [samples]."""
    loads = (attention_load(accelerator, constants, sample.shape, _score_count(sample)) for sample in samples)
    peaks = (accelerator.peak_flops(sample.dtype) for sample in samples)
    return np.array([sample.flops / peak * load for sample, peak, load in zip(samples, peaks, loads, strict=True)])


def _memory_seconds(accelerator: Accelerator, samples: Sequence[AttentionSample]) -> FloatArray:
    """Seconds of each sample's memory traffic: [samples]."""
    bandwidth = accelerator.efficiency.reached_bandwidth(accelerator.memory_bandwidth)
    return np.array([sample.moved_bytes for sample in samples]) / bandwidth


def _score_count(sample: AttentionSample) -> float:
    return sample.flops / sample.shape.flops_per_score(backward=sample.backward)
