"""Which constants of products of experts do measured ones support?

Searched: share of the peak, perimeter, prologue and the host's call (see `cost.grouped`) for those on streams; the
share alone for those in one kernel. Tiles, memory bandwidth and the start of a kernel are those of other products.
Where all products are too large to wait for the host, its call is given. In a format with scales the share of one
kernel is searched where its rows support one of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridSearch, Winner, combinations, steps, supported
from calibrate.fit.published_kernels import GroupedRow
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.grouped_gemm import grouped_seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import GroupedGemmEfficiency
from clustersim.model.kernels import MatmulShape

SHARES: Final = steps(0.3, 0.9, 0.02)
EDGES: Final = (0.0, 16.0, 32.0, 48.0)
PROLOGUES: Final = (0.0, 64.0, 128.0, 192.0, 256.0)
_Candidates = Mapping[tuple[float, ...], GroupedGemmEfficiency]
CALLS: Final = tuple(call * 1e-6 for call in steps(8.0, 10.0, 0.2))


def fit_grouped(
    accelerator: Accelerator, rows: Sequence[GroupedRow], call: Seconds | None
) -> tuple[GroupedGemmEfficiency, Winner]:
    """The best share, edge, prologue and call (unless given) of those on streams; kernel_share is set to the share."""
    search, calls = _search(rows), CALLS if call is None else (call,)
    for edge, prologue in combinations(EDGES, PROLOGUES):
        _offer(search, accelerator, rows, _candidates(SHARES, edge, prologue, calls))
    winner = search.winner()
    share, edge, prologue, called = winner.constants
    return GroupedGemmEfficiency(share, share, prologue, edge, round(called, 9)), winner


def fit_scaled_kernel(accelerator: Accelerator, rows: Sequence[GroupedRow]) -> tuple[GroupedGemmEfficiency, Winner]:
    """Of one kernel in a format with scales: its own share, if that predicts unseen rows better than what is kept."""
    known, dtype = accelerator.efficiency.expert_matmul, rows[0].dtype
    kept: _Candidates = {(): known}
    own: _Candidates = {(float(share),): known.with_kernel_fraction(dtype, float(share)) for share in SHARES}
    winners = [_best_of(accelerator, rows, candidates) for candidates in (kept, own)]
    winner = supported(winners, np.array([row.seconds for row in rows]))
    return own.get(winner.constants, known), winner


def _best_of(accelerator: Accelerator, rows: Sequence[GroupedRow], candidates: _Candidates) -> Winner:
    """The best of constants that differ in what the device does."""
    search = _search(rows)
    busy = [_timed(accelerator, rows, constants) for constants in candidates.values()]
    search.offer(list(candidates), np.array([_seconds(rows, array, 0.0) for array in busy]))
    return search.winner()


def fit_kernel_share(accelerator: Accelerator, rows: Sequence[GroupedRow]) -> tuple[GroupedGemmEfficiency, Winner]:
    """The best share of one kernel for all experts; all other constants are known."""
    known, search = accelerator.efficiency.expert_matmul, _search(rows)
    _offer(search, accelerator, rows, _candidates(SHARES, known.edge, known.prologue, (known.call,)))
    winner = search.winner()
    return replace(known, kernel_share=winner.constants[0]), winner


def _search(rows: Sequence[GroupedRow]) -> GridSearch:
    return GridSearch(np.array([row.seconds for row in rows]), [row.published for row in rows])


def _candidates(
    shares: Iterable[float], edge: float, prologue: float, calls: Iterable[float]
) -> list[tuple[float, ...]]:
    return [(float(share), edge, prologue, float(call)) for share in shares for call in calls]


def _offer(
    search: GridSearch, accelerator: Accelerator, rows: Sequence[GroupedRow], candidates: Sequence[tuple[float, ...]]
) -> None:
    """Predict all rows by candidates that differ in share and call."""
    shares = sorted({share for share, *_ in candidates})
    busy = {share: _busy(accelerator, rows, (share, *candidates[0][1:])) for share in shares}
    predicted = np.array([_seconds(rows, busy[share], call) for share, _, _, call in candidates])
    search.offer(candidates, predicted)


def _busy(accelerator: Accelerator, rows: Sequence[GroupedRow], constants: tuple[float, ...]) -> FloatArray:
    """[kernels] of all rows, one behind the other: seconds on the device."""
    share, edge, prologue, call = constants
    return _timed(accelerator, rows, GroupedGemmEfficiency(share, share, prologue, edge, call))


def _timed(accelerator: Accelerator, rows: Sequence[GroupedRow], own: GroupedGemmEfficiency) -> FloatArray:
    """[kernels] of all rows, by constants of products of experts."""
    inside = replace(accelerator, efficiency=replace(accelerator.efficiency, grouped=own))
    kernels = [kernel for row in rows for kernel in row.kernels]
    shapes = [kernel.shape for kernel in kernels if isinstance(kernel.shape, MatmulShape)]
    sizes = np.array([(shape.m, shape.n, shape.k, shape.batch) for shape in shapes], dtype=np.float64).T
    moved = np.array([kernel.bytes for kernel in kernels])
    compute, memory = grouped_seconds(inside, kernels[0].dtype, sizes, moved, multi_stream=rows[0].streamed)
    return np.hypot(compute, memory) + accelerator.efficiency.kernel_latency


def _seconds(rows: Sequence[GroupedRow], busy: FloatArray, call: float) -> FloatArray:
    """[rows] what each takes, its kernels no less than the host's calls."""
    kernels = [kernel for row in rows for kernel in row.kernels]
    groups = np.array([item.shape.batch for item in kernels if isinstance(item.shape, MatmulShape)], dtype=np.float64)
    floors = groups * call if rows[0].streamed else np.zeros(len(groups))
    of = np.repeat(np.arange(len(rows)), [len(row.kernels) for row in rows])
    summed: FloatArray = np.bincount(of, weights=np.maximum(busy, floors), minlength=len(rows)).astype(np.float64)
    return summed
