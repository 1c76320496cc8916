"""In-sample and cross-validated errors of fitted constants.

For each accelerator and kind of kernel or collective: mean absolute percentage error, and the same with each
sample (for collectives, each table's source) predicted by constants fitted to all others. Errors are
fractions: 0.1 is 10 %.
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
    """n: samples; mape: mean absolute percentage error of the fit; loo_mape: leave-one-out.

    large_n, large_mape, large_loo_mape: the same of matmuls from 1 TFLOP on. For collectives, errors are means
    over tables of the mean over a table's sizes.
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
    """Errors from measured, predicted and leave-one-out predicted seconds; all [samples]."""
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
    """One kind of kernel of one accelerator: its samples, and the fit's predictions for them."""

    accelerator: str
    kind: str
    samples: Sequence[PublishedSample]
    optimum: GridOptimum

    @property
    def quality(self) -> FitQuality:
        """Its prediction errors."""
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
    """Errors on one source's samples: of the fit, and of the fit to all other sources (None: no other).

    Errors are fractions of the measured time; mape: mean absolute error, bias: mean error.
    """

    accelerator: str
    kind: str
    source: str
    n: int
    mape: float
    bias: float
    held_out_mape: float | None
    held_out_bias: float | None


@dataclass(frozen=True, slots=True)
class AcceleratorFits:
    """Fitted constants by accelerator, and their evaluations."""

    efficiencies: Mapping[str, KernelEfficiency]
    evaluations: Sequence[KernelFitEvaluation]

    @property
    def qualities(self) -> tuple[FitQuality, ...]:
        """Errors by accelerator and kind of kernel."""
        return tuple(evaluation.quality for evaluation in self.evaluations)

    @property
    def source_errors(self) -> tuple[SourceErrors, ...]:
        """Errors by accelerator, kind of kernel and source."""
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
    """One line per accelerator, kind and source: error and bias of the fit, and with the source held out."""
    head = f"{'accelerator':<16}{'kind':<38}{'source':<30}{'n':>5}{'MAPE':>8}{'bias':>8}{'held out':>10}{'bias':>8}"
    return "\n".join([head, *map(_source_error_line, source_errors)])


def _source_error_line(errors: SourceErrors) -> str:
    line = (
        f"{errors.accelerator:<16}{errors.kind:<38}{errors.source:<30}{errors.n:>5}"
        f"{errors.mape:8.1%}{errors.bias:+8.1%}"
    )
    if errors.held_out_mape is None or errors.held_out_bias is None:
        return line
    return f"{line}{errors.held_out_mape:10.1%}{errors.held_out_bias:+8.1%}"


def quality_table(qualities: Sequence[FitQuality]) -> str:
    """One line per accelerator and kind."""
    head = f"{'accelerator':<16}{'kind':<40}{'n':>5}{'MAPE':>8}{'LOO':>10}{'large':>7}{'MAPE':>8}{'LOO':>10}"
    return "\n".join([head, *map(_quality_line, qualities)])


def _quality_line(quality: FitQuality) -> str:
    line = f"{quality.accelerator:<16}{quality.kind:<40}{quality.n:>5}{quality.mape:8.1%}{quality.loo_mape:10.1%}"
    if quality.large_mape is None or quality.large_loo_mape is None:
        return line
    return f"{line}{quality.large_n:>7}{quality.large_mape:8.1%}{quality.large_loo_mape:10.1%}"
