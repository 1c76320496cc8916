"""Fit of the in-training rate of matmuls in block-scaled formats to published steps.

`derating.low_precision_ratio` is fitted with all other constants at the values of the accelerator's file, to
published dense steps in FP8 and narrower formats, so nothing of BF16 changes: for accelerators whose rate of
other matmuls no step has determined (it is carried over from another chip). For those where steps in BF16
have (`FITTED_ACCELERATORS`), cases published in both formats show that the rate is the same: of 34 pairs the
speed-up is met within 5 % that way, and within 11 % with the rate that fits FP8 steps best, which only
compensates errors of the BF16 steps. A step is predicted at three rates and interpolated linearly in the
time per FLOP. The rate with the least macro-averaged error is taken.

Cross-validation leaves out one source at a time. An accelerator with fewer than `MIN_CASES` cases keeps the
rate of its other matmuls.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.step_table import FITTED_ACCELERATORS, SAME_CHIP, SUSTAINED_NODES
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.hardware.accelerator import load_accelerator
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import LOW_PRECISION_MOE_STEPS, LOW_PRECISION_STEPS
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.steps import build_scenario, predicted_step_seconds

RATES: Final = np.round(np.arange(0.6, 1.2501, 0.01), 2)
MIN_CASES: Final = 10
"""Cases that a rate needs: with fewer, held-out cases were predicted worse with it than without."""
_INTERPOLATION_NODES: Final = 1.0 / np.array(SUSTAINED_NODES)


@dataclass(frozen=True, slots=True)
class LowPrecisionStep:
    """One step. predicted_seconds: [SUSTAINED] at each rate; is_moe: it has experts, and is not used in the fit."""

    case_id: str
    source: str
    accelerator: str
    measured_seconds: Seconds
    predicted_seconds: FloatArray
    is_moe: bool

    def log_errors(self, rates: FloatArray) -> FloatArray:
        """Logarithm of predicted over measured time at some rates: [rates]."""
        logarithms: FloatArray = np.log(
            np.interp(1.0 / rates, _INTERPOLATION_NODES, self.predicted_seconds) / self.measured_seconds
        )
        return logarithms


def tabulate_low_precision(cases: Iterable[ValidationCase], pool: Executor) -> list[LowPrecisionStep]:
    """The measured low-precision steps of quality A and B that can be predicted, each predicted at every rate."""
    tabulated_steps = pool.map(
        _tabulate,
        [case for case in cases if case_uncertainty_model(case) in (LOW_PRECISION_STEPS, LOW_PRECISION_MOE_STEPS)],
    )
    return [step for step in tabulated_steps if step is not None]


def _tabulate(case: ValidationCase) -> LowPrecisionStep | None:
    try:
        scenario, measured = build_scenario(case), case.positive_float("step_time_s")
    except CannotPredictError:
        return None
    accelerator_name = scenario.cluster.accelerator.name
    seconds = np.array([_step_seconds(scenario, rate) for rate in SUSTAINED_NODES])
    name, source = SAME_CHIP.get(accelerator_name, accelerator_name), case.text("source")
    return LowPrecisionStep(case.text("case_id"), source, name, measured, seconds, has_experts(case))


def _step_seconds(scenario: Scenario, rate: float) -> Seconds:
    accelerator = scenario.cluster.accelerator
    changed = replace(accelerator, derating=replace(accelerator.derating, low_precision_ratio=rate))
    return predicted_step_seconds(simulate(replace(scenario, cluster=replace(scenario.cluster, accelerator=changed))))


def fit_low_precision_rates(steps: Sequence[LowPrecisionStep]) -> dict[str, float]:
    """The rate of each accelerator that has enough dense cases."""
    dense_steps = [step for step in steps if not step.is_moe]
    names = sorted({step.accelerator for step in dense_steps} - set(FITTED_ACCELERATORS))
    groups = {name: [step for step in dense_steps if step.accelerator == name] for name in names}
    return {
        name: _best_rate(accelerator_steps)
        for name, accelerator_steps in groups.items()
        if len(accelerator_steps) >= MIN_CASES
    }


def _best_rate(steps: Sequence[LowPrecisionStep]) -> float:
    """The rate with the least mean absolute error, equal source weights."""
    sources = [step.source for step in steps]
    loss = sum(np.abs(step.log_errors(RATES)) / sources.count(step.source) for step in steps)
    return float(RATES[int(np.argmin(loss))])


@dataclass(frozen=True, slots=True)
class LowPrecisionQuality:
    """Steps of one source: mean error and bias, in sample and with the source held out."""

    source: str
    is_moe: bool
    n: int
    mape: float
    bias: float
    loo_mape: float
    loo_bias: float


def low_precision_quality(steps: Sequence[LowPrecisionStep]) -> list[LowPrecisionQuality]:
    """Errors of each source, dense and MoE steps separately."""
    rates = fit_low_precision_rates(steps)
    group_keys = dict.fromkeys((step.source, step.is_moe) for step in steps)
    qualities = []
    for source, is_moe in group_keys:
        group = [step for step in steps if (step.source, step.is_moe) == (source, is_moe)]
        held_out_rates = fit_low_precision_rates([step for step in steps if step.source != source])
        in_sample, out_of_sample = (
            np.array([_relative_error(step, candidate_rates) for step in group])
            for candidate_rates in (rates, held_out_rates)
        )
        means = (np.abs(in_sample).mean(), in_sample.mean(), np.abs(out_of_sample).mean(), out_of_sample.mean())
        qualities.append(LowPrecisionQuality(source, is_moe, len(group), *map(float, means)))
    return qualities


def _relative_error(step: LowPrecisionStep, rates: Mapping[str, float]) -> float:
    default = load_accelerator(step.accelerator).derating.sustained_ratio
    return float(np.expm1(step.log_errors(np.array([rates.get(step.accelerator, default)]))[0]))


def low_precision_lines(steps: Sequence[LowPrecisionStep]) -> list[str]:
    """Fitted rates and their errors as text."""
    rates = fit_low_precision_rates(steps)
    lines = [f"{name:20s} low_precision_ratio {rate:.2f}" for name, rate in rates.items()]
    qualities = low_precision_quality(steps)
    for is_moe in (False, True):
        selected = [quality for quality in qualities if quality.is_moe is is_moe]
        if not selected:
            continue
        lines += ["", f"{'MoE' if is_moe else 'dense':24s} cases    MAPE    bias  held out    bias"]
        lines += [
            _quality_line(quality.source, quality.n, (quality.mape, quality.bias, quality.loo_mape, quality.loo_bias))
            for quality in selected
        ]
        columns = zip(
            *((quality.mape, quality.bias, quality.loo_mape, quality.loo_bias) for quality in selected), strict=True
        )
        lines.append(_quality_line("macro mean", None, tuple(float(np.mean(column)) for column in columns)))
    return lines


def _quality_line(name: str, n: int | None, values: tuple[float, ...]) -> str:
    mape, bias, loo_mape, loo_bias = values
    return f"{name:24s} {n or '':5}  {mape:6.1%}  {bias:+6.1%}    {loo_mape:6.1%}  {loo_bias:+6.1%}"


def low_precision_json(steps: Sequence[LowPrecisionStep]) -> str:
    """Fitted rates and their errors as JSON."""
    by_source = [asdict(quality) for quality in low_precision_quality(steps)]
    return json.dumps({"low_precision_ratio": fit_low_precision_rates(steps), "by_source": by_source}, indent=2) + "\n"
