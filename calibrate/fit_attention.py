"""Which flash attention constants do published kernels support?

Searched: share of the peak, what a causal mask costs, what softmax and a block's start cost, and the rows that one
compute unit works on at a time (see `cost.roofline`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from calibrate.grid import GridSearch, Winner, combinations, steps
from calibrate.published_kernels import AttentionRow
from clustersim.cost.roofline import BACKWARD_MATMULS, FORWARD_MATMULS, attention_load
from clustersim.dtypes import DType
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency

FloatArray = NDArray[np.float64]

SHARES: Final = steps(0.35, 1.0, 0.01)
MASKS: Final = (0.8, 0.85, 0.9, 0.95, 1.0)
HEAD_OVERHEADS: Final = (0, 8, 16, 24, 32, 48, 64, 96)
KEY_OVERHEADS: Final = (0, 32, 64, 96, 128, 192, 256, 384, 512)
BLOCKS: Final = (64, 128, 256)


def fit_attention(
    accelerator: Accelerator, rows: Sequence[AttentionRow], unmasked: float
) -> tuple[AttentionEfficiency, Winner]:
    """Fit one direction's constants; unmasked: the causal factor to keep where no row has a causal mask."""
    search = GridSearch(np.array([row.seconds for row in rows]))
    causal = np.array([row.shape.causal for row in rows])
    masks = MASKS if causal.any() else (unmasked,)
    for head, key, block in combinations(HEAD_OVERHEADS, KEY_OVERHEADS, BLOCKS):
        constants = AttentionEfficiency(
            share=1.0, causal=1.0, head_overhead=float(head), key_overhead=float(key), block=int(block)
        )
        full = _full_rate(accelerator, constants, rows)
        for mask in masks:
            seconds = np.where(causal, full / mask, full)[None, :] / SHARES[:, None]
            labels = [(float(share), mask, float(head), float(key), float(block)) for share in SHARES]
            search.offer(labels, seconds + accelerator.efficiency.kernel_latency)
    winner = search.winner()
    share, mask, head, key, block = winner.constants
    found = replace(constants, share=share, causal=mask, head_overhead=head, key_overhead=key, block=int(block))
    return found, winner


def _full_rate(accelerator: Accelerator, constants: AttentionEfficiency, rows: Sequence[AttentionRow]) -> FloatArray:
    """Seconds of every row at a share of 1, without the start of the kernel."""
    peak, units = accelerator.peak_of(DType.BF16), accelerator.compute_units
    return np.array([row.flops / peak * attention_load(constants, row.shape, _scores(row), units) for row in rows])


def _scores(row: AttentionRow) -> float:
    return row.flops / (row.shape.head_dim * (BACKWARD_MATMULS if row.backward else FORWARD_MATMULS))
