"""Which flash attention constants do measured kernels support?

Searched: share of the peak, what a causal mask costs, what softmax and a block's start cost, and the rows that one
compute unit works on at a time (see `cost.roofline`). In formats with scales: how many times as fast it is, with all
else as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridSearch, Winner, combinations, steps
from calibrate.fit.published_kernels import AttentionRow
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.cost.roofline import attention_load
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency

SHARES: Final = steps(0.35, 1.0, 0.01)
MASKS: Final = (0.8, 0.85, 0.9, 0.95, 1.0)
HEAD_OVERHEADS: Final = (0, 8, 16, 24, 32, 48, 64, 96)
KEY_OVERHEADS: Final = (0, 32, 64, 96, 128, 192, 256, 384, 512)
BLOCKS: Final = (64, 128, 256)
FASTER: Final = steps(1.0, 3.0, 0.01)  # in formats with scales


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """What is searched; a constant that is given has one value. even: sources count alike, not rows."""

    shares: FloatArray
    masks: Sequence[float]
    heads: Sequence[float]
    keys: Sequence[float]
    blocks: Sequence[int]
    even: bool = False


def own_attention(constants: AttentionEfficiency) -> AttentionGrid:
    """Given constants, nothing searched."""
    return AttentionGrid(
        shares=np.array([constants.share]),
        masks=(constants.causal,),
        heads=(constants.head_overhead,),
        keys=(constants.key_overhead,),
        blocks=(constants.block,),
    )


def search_attention(accelerator: Accelerator, rows: Sequence[AttentionRow], grid: AttentionGrid) -> Winner:
    """The best share, causal factor, head and key overheads and block of the grid, of one direction."""
    search = GridSearch(np.array([row.seconds for row in rows]), [row.published for row in rows], even=grid.even)
    causal = np.array([row.shape.causal for row in rows])
    memory, start = _memory(accelerator, rows), accelerator.efficiency
    for head, key, block in combinations(grid.heads, grid.keys, grid.blocks):
        full = _full_rate(accelerator, _constants(1.0, 1.0, head, key, block), rows)
        for mask in grid.masks:
            compute = np.where(causal, full / mask, full)[None, :] / grid.shares[:, None]
            seconds = np.maximum(compute, memory) + start.kernel_latency
            labels = [(float(share), mask, float(head), float(key), float(block)) for share in grid.shares]
            search.offer(labels, np.maximum(seconds, start.launch_interval))
    return search.winner()


def attention_constants(winner: Winner) -> AttentionEfficiency:
    """The constants that a search found."""
    return _constants(*winner.constants)


def fit_attention(
    accelerator: Accelerator, rows: Sequence[AttentionRow], unmasked: float, *, even: bool = False
) -> tuple[AttentionEfficiency, Winner]:
    """Fit one direction's constants; unmasked: the causal factor to keep where no row has a causal mask."""
    masks = MASKS if any(row.shape.causal for row in rows) else (unmasked,)
    grid = AttentionGrid(SHARES, masks, HEAD_OVERHEADS, KEY_OVERHEADS, BLOCKS, even)
    winner = search_attention(accelerator, rows, grid)
    return attention_constants(winner), winner


def fit_faster(
    accelerator: Accelerator, rows: Sequence[AttentionRow], constants: AttentionEfficiency
) -> tuple[AttentionEfficiency, Winner]:
    """The constants of one direction, and how many times as fast it is in the format with scales of these rows."""
    search = GridSearch(np.array([row.seconds for row in rows]), [row.published for row in rows])
    wide = [replace(row, dtype=DType.BF16) for row in rows]
    compute = _full_rate(accelerator, constants, wide) / constants.share
    seconds = np.maximum(compute[None, :] / FASTER[:, None], _memory(accelerator, rows))
    search.offer([(float(item),) for item in FASTER], seconds + accelerator.efficiency.kernel_latency)
    winner = search.winner()
    return replace(constants, formats={**constants.formats, rows[0].dtype: winner.constants[0]}), winner


def _constants(share: float, causal: float, head: float, key: float, block: float) -> AttentionEfficiency:
    return AttentionEfficiency(share, causal, float(head), float(key), int(block))


def _full_rate(accelerator: Accelerator, constants: AttentionEfficiency, rows: Sequence[AttentionRow]) -> FloatArray:
    """Seconds of every row's arithmetic at a share of 1."""
    loads = (attention_load(accelerator, constants, row.shape, _scores(row)) for row in rows)
    peaks = (accelerator.peak_flops(row.dtype) for row in rows)
    return np.array([row.flops / peak * load for row, peak, load in zip(rows, peaks, loads, strict=True)])


def _memory(accelerator: Accelerator, rows: Sequence[AttentionRow]) -> FloatArray:
    """Seconds of every row's memory traffic."""
    return np.array([row.moved for row in rows]) / (accelerator.memory_bandwidth * accelerator.efficiency.memory)


def _scores(row: AttentionRow) -> float:
    return row.flops / row.shape.flops_per_score(backward=row.backward)
