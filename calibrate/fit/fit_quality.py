"""How well does a model with fitted constants meet the measurements?

By accelerator and kind of kernel or collective: the mean absolute percentage error, and the same with each row (of
collectives, each table) predicted by constants fitted to all the others. Errors are parts: 0.1 is 10 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.fit.grid_search import Winner
from calibrate.fit.published_kernels import AttentionRow, CastRow, GroupedRow, MatmulRow, MatmulSet
from clustersim.common.arrays import FloatArray
from clustersim.hardware.efficiency import KernelEfficiency

Row = MatmulRow | MatmulSet | AttentionRow | GroupedRow | CastRow
LARGE: Final = 1e12  # FLOP from which a matmul counts as large


@dataclass(frozen=True, slots=True)
class Quality:
    """n: rows; mape: mean absolute percentage error of the fit; loo_mape: left out; large: matmuls from 1 TFLOP on.

    Of collectives, errors are means over tables of the means over a table's sizes.
    """

    accelerator: str
    kind: str
    n: int
    mape: float
    loo_mape: float
    large_n: int = 0
    large_mape: float | None = None
    large_loo_mape: float | None = None


def quality(
    accelerator: str,
    kind: str,
    *,
    measured: FloatArray,
    predicted: FloatArray,
    left_out: FloatArray,
    large: Sequence[bool],
) -> Quality:
    """Of rows that took, were predicted to take, and were predicted by the others to take so many seconds: [rows]."""
    error, left = np.abs(predicted / measured - 1.0), np.abs(left_out / measured - 1.0)
    which = np.array(large)
    return Quality(
        accelerator,
        kind,
        n=len(error),
        mape=float(error.mean()),
        loo_mape=float(left.mean()),
        large_n=int(which.sum()),
        large_mape=float(error[which].mean()) if which.any() else None,
        large_loo_mape=float(left[which].mean()) if which.any() else None,
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """One kind of kernel of one accelerator: its rows, and what is predicted for them."""

    accelerator: str
    kind: str
    rows: Sequence[Row]
    winner: Winner

    @property
    def quality(self) -> Quality:
        """How well the constants predict it."""
        large = [isinstance(row, MatmulRow | MatmulSet) and row.flops >= LARGE for row in self.rows]
        measured = np.array([row.seconds for row in self.rows])
        return quality(
            self.accelerator,
            self.kind,
            measured=measured,
            predicted=self.winner.predicted,
            left_out=self.winner.left_out,
            large=large,
        )


@dataclass(frozen=True, slots=True)
class Unseen:
    """How well the rows of one source are met: by the fit, and by that to all other sources (None: there is no other).

    Errors are parts of what was measured; mape: their mean size, bias: their mean.
    """

    accelerator: str
    kind: str
    source: str
    n: int
    mape: float
    bias: float
    unseen_mape: float | None
    unseen_bias: float | None


@dataclass(frozen=True, slots=True)
class Fits:
    """Recommended constants by accelerator, and how well they predict."""

    efficiencies: Mapping[str, KernelEfficiency]
    judged: Sequence[Judged]

    @property
    def qualities(self) -> tuple[Quality, ...]:
        """Of every accelerator and kind of kernel."""
        return tuple(judged.quality for judged in self.judged)

    @property
    def unseen(self) -> tuple[Unseen, ...]:
        """Of every accelerator, kind of kernel and source."""
        return tuple(unseen for judged in self.judged for unseen in _by_source(judged))


def _by_source(judged: Judged) -> Iterator[Unseen]:
    measured = np.array([row.seconds for row in judged.rows])
    names = np.array([row.published for row in judged.rows])
    winner = judged.winner
    for source in dict.fromkeys(names.tolist()):
        own = names == source
        error = winner.predicted[own] / measured[own] - 1.0
        known = (judged.accelerator, judged.kind, source, int(own.sum()), float(abs(error).mean()), float(error.mean()))
        if winner.unseen is None:
            yield Unseen(*known, None, None)
            continue
        left = winner.unseen[own] / measured[own] - 1.0
        yield Unseen(*known, float(abs(left).mean()), float(left.mean()))


def unseen_table(unseen: Sequence[Unseen]) -> str:
    """One line for each accelerator, kind and source: the fit's error and bias, and those with the source left out."""
    head = f"{'accelerator':<16}{'kind':<38}{'source':<30}{'n':>5}{'MAPE':>8}{'bias':>8}{'left out':>10}{'bias':>8}"
    return "\n".join([head, *map(_unseen_line, unseen)])


def _unseen_line(each: Unseen) -> str:
    known = f"{each.accelerator:<16}{each.kind:<38}{each.source:<30}{each.n:>5}{each.mape:8.1%}{each.bias:+8.1%}"
    if each.unseen_mape is None or each.unseen_bias is None:
        return known
    return f"{known}{each.unseen_mape:10.1%}{each.unseen_bias:+8.1%}"


def table(qualities: Sequence[Quality]) -> str:
    """One line for each accelerator and kind."""
    head = f"{'accelerator':<16}{'kind':<40}{'n':>5}{'MAPE':>8}{'left out':>10}{'large':>7}{'MAPE':>8}{'left out':>10}"
    return "\n".join([head, *map(_line, qualities)])


def _line(each: Quality) -> str:
    known = f"{each.accelerator:<16}{each.kind:<40}{each.n:>5}{each.mape:8.1%}{each.loo_mape:10.1%}"
    if each.large_mape is None or each.large_loo_mape is None:
        return known
    return f"{known}{each.large_n:>7}{each.large_mape:8.1%}{each.large_loo_mape:10.1%}"
