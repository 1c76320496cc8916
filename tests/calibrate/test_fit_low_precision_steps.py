"""Low-precision rates within training steps: recovered where known, and held out by source."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibrate.fit.low_precision_steps import (
    MIN_CASES,
    LowPrecisionStep,
    fit_low_precision_rates,
    low_precision_json,
    low_precision_lines,
    low_precision_quality,
    tabulate_low_precision,
)
from calibrate.fit.step_table import SUSTAINED_NODES
from clustersim.hardware.accelerator import load_accelerator
from clustersim.validation.steps import read_steps

H100, GB200, GB300 = "h100-sxm-80gb", "gb200", "gb300"


def low_precision_step(
    index: int, source: str, accelerator: str, rate: float, *, moe: bool = False
) -> LowPrecisionStep:
    """Matmuls take 2 s at rate 1, the remainder 1 s; measured at `rate`."""
    seconds = np.array([1.0 + 2.0 / item for item in SUSTAINED_NODES])
    return LowPrecisionStep(f"{source} {index}", source, accelerator, 1.0 + 2.0 / rate, seconds, moe)


def test_rate_is_fitted_to_dense_steps_only() -> None:
    dense = [low_precision_step(index, "one", GB200, 0.9) for index in range(MIN_CASES)]
    moe_steps = [low_precision_step(index, "two", GB200, 0.6, moe=True) for index in range(MIN_CASES)]
    assert fit_low_precision_rates([*dense, *moe_steps]) == {GB200: 0.9}


def test_rate_of_high_precision_steps_takes_precedence() -> None:
    assert fit_low_precision_rates([low_precision_step(index, "one", H100, 0.9) for index in range(MIN_CASES)]) == {}


def test_too_few_cases_are_not_fitted() -> None:
    assert (
        fit_low_precision_rates([low_precision_step(index, "one", GB200, 0.9) for index in range(MIN_CASES - 1)]) == {}
    )


def test_sources_have_equal_weight_whatever_their_case_count() -> None:
    """Sixteen cases at 0.8 and five at 1.0: the minimal sum of mean errors does not depend on the counts."""
    table = [low_precision_step(index, "many", GB200, 0.8) for index in range(16)]
    table += [low_precision_step(index, "few", GB200, 1.0) for index in range(5)]
    rate = fit_low_precision_rates(table)[GB200]
    assert 0.8 <= rate <= 1.0
    balanced_rate = fit_low_precision_rates([*table[:5], *table[16:]])[GB200]
    assert rate == balanced_rate


def test_single_source_is_held_out_with_the_packaged_rate() -> None:
    table = [low_precision_step(index, "one", GB300, 1.2) for index in range(MIN_CASES)]
    (quality,) = low_precision_quality(table)
    assert quality.mape == pytest.approx(0.0, abs=0.01)
    packaged_rate = load_accelerator(GB300).derating.sustained_ratio
    expected = (1.0 + 2.0 / packaged_rate) / (1.0 + 2.0 / 1.2) - 1.0
    assert quality.loo_bias == pytest.approx(expected)
    assert "gb300" in low_precision_lines(table)[0]
    assert '"gb300": 1.2' in low_precision_json(table)


def test_published_low_precision_steps_are_tabulated() -> None:
    """A higher rate is a shorter step; BF16 cases are excluded."""
    case_id = "mb-25.11-LLAMA3_8B-DGX-GB300-FP8_MX-8-gbs128-alt"
    cases = [
        case
        for case in read_steps()
        if case.text("case_id") in (case_id, "dgxc-v25.05-Nemotron4_15B-H100-bf16-16-gbs64")
    ]
    with ThreadPoolExecutor(1) as pool:
        (tabulated_step,) = tabulate_low_precision(cases, pool)
    assert tabulated_step.accelerator == GB300
    assert list(tabulated_step.predicted_seconds) == sorted(
        tabulated_step.predicted_seconds
    )  # rates are in descending order
    assert tabulated_step.predicted_seconds[0] < tabulated_step.predicted_seconds[-1]
