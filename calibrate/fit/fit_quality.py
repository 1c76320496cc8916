"""How well does a model with fitted constants meet the measurements?

By accelerator and kind of kernel or collective: the mean absolute percentage error, and the same with each row (of
collectives, each table) predicted by constants fitted to all the others. Errors are parts: 0.1 is 10 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.fit.grid_search import GridOptimum
from calibrate.fit.published_kernels import (
    AttentionSample,
    CastSample,
    GroupedGemmSample,
    MatmulSample,
    MatmulSetSample,
)
from clustersim.common.arrays import FloatArray
from clustersim.hardware.efficiency import KernelEfficiency

PublishedSample = MatmulSample | MatmulSetSample | AttentionSample | GroupedGemmSample | CastSample
LARGE_MATMUL_FLOPS: Final = 1e12  # FLOP from which a matmul counts as large


@dataclass(frozen=True, slots=True)
class FitQuality:
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


def fit_quality(
    accelerator: str,
    kind: str,
    *,
    measured: FloatArray,
    predicted: FloatArray,
    leave_one_out: FloatArray,
    is_large: Sequence[bool],
) -> FitQuality:
    """Of rows that took, were predicted to take, and were predicted by the others to take so many seconds: [rows]."""
    error, loo_error = np.abs(predicted / measured - 1.0), np.abs(leave_one_out / measured - 1.0)
    large_mask = np.array(is_large)
    return FitQuality(
        accelerator,
        kind,
        n=len(error),
        mape=float(error.mean()),
        loo_mape=float(loo_error.mean()),
        large_n=int(large_mask.sum()),
        large_mape=float(error[large_mask].mean()) if large_mask.any() else None,
        large_loo_mape=float(loo_error[large_mask].mean()) if large_mask.any() else None,
    )


@dataclass(frozen=True, slots=True)
class KernelFitEvaluation:
    """One kind of kernel of one accelerator: its rows, and what is predicted for them."""

    accelerator: str
    kind: str
    samples: Sequence[PublishedSample]
    optimum: GridOptimum

    @property
    def quality(self) -> FitQuality:
        """How well the constants predict it."""
        large = [
            isinstance(sample, MatmulSample | MatmulSetSample) and sample.flops >= LARGE_MATMUL_FLOPS
            for sample in self.samples
        ]
        measured = np.array([sample.seconds for sample in self.samples])
        return fit_quality(
            self.accelerator,
            self.kind,
            measured=measured,
            predicted=self.optimum.predicted,
            leave_one_out=self.optimum.leave_one_out,
            is_large=large,
        )


@dataclass(frozen=True, slots=True)
class SourceErrors:
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
class AcceleratorFits:
    """Recommended constants by accelerator, and how well they predict."""

    efficiencies: Mapping[str, KernelEfficiency]
    evaluations: Sequence[KernelFitEvaluation]

    @property
    def qualities(self) -> tuple[FitQuality, ...]:
        """Of every accelerator and kind of kernel."""
        return tuple(evaluation.quality for evaluation in self.evaluations)

    @property
    def source_errors(self) -> tuple[SourceErrors, ...]:
        """Of every accelerator, kind of kernel and source."""
        return tuple(errors for evaluation in self.evaluations for errors in _errors_by_source(evaluation))


def _errors_by_source(evaluation: KernelFitEvaluation) -> Iterator[SourceErrors]:
    measured = np.array([sample.seconds for sample in evaluation.samples])
    publications = np.array([sample.publication for sample in evaluation.samples])
    optimum = evaluation.optimum
    for source in dict.fromkeys(publications.tolist()):
        is_source = publications == source
        error = optimum.predicted[is_source] / measured[is_source] - 1.0
        fields = (
            evaluation.accelerator,
            evaluation.kind,
            source,
            int(is_source.sum()),
            float(abs(error).mean()),
            float(error.mean()),
        )
        if optimum.source_held_out is None:
            yield SourceErrors(*fields, None, None)
            continue
        held_out_error = optimum.source_held_out[is_source] / measured[is_source] - 1.0
        yield SourceErrors(*fields, float(abs(held_out_error).mean()), float(held_out_error.mean()))


def source_error_table(source_errors: Sequence[SourceErrors]) -> str:
    """One line for each accelerator, kind and source: the fit's error and bias, and those with the source left out."""
    head = f"{'accelerator':<16}{'kind':<38}{'source':<30}{'n':>5}{'MAPE':>8}{'bias':>8}{'left out':>10}{'bias':>8}"
    return "\n".join([head, *map(_source_error_line, source_errors)])


def _source_error_line(errors: SourceErrors) -> str:
    line = f"{errors.accelerator:<16}{errors.kind:<38}{errors.source:<30}{errors.n:>5}{errors.mape:8.1%}{errors.bias:+8.1%}"
    if errors.unseen_mape is None or errors.unseen_bias is None:
        return line
    return f"{line}{errors.unseen_mape:10.1%}{errors.unseen_bias:+8.1%}"


def quality_table(qualities: Sequence[FitQuality]) -> str:
    """One line for each accelerator and kind."""
    head = f"{'accelerator':<16}{'kind':<40}{'n':>5}{'MAPE':>8}{'left out':>10}{'large':>7}{'MAPE':>8}{'left out':>10}"
    return "\n".join([head, *map(_quality_line, qualities)])


def _quality_line(item: FitQuality) -> str:
    line = f"{item.accelerator:<16}{item.kind:<40}{item.n:>5}{item.mape:8.1%}{item.loo_mape:10.1%}"
    if item.large_mape is None or item.large_loo_mape is None:
        return line
    return f"{line}{item.large_n:>7}{item.large_mape:8.1%}{item.large_loo_mape:10.1%}"
