"""Rates of narrow formats within a step: found again where they are known; left out where a source has all cases."""

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


def step(number: int, source: str, accelerator: str, rate: float, *, mixture: bool = False) -> LowPrecisionStep:
    """Products take 2 s at rate 1, all else 1 s; measured at a rate."""
    seconds = np.array([1.0 + 2.0 / item for item in SUSTAINED_NODES])
    return LowPrecisionStep(f"{source} {number}", source, accelerator, 1.0 + 2.0 / rate, seconds, mixture)


def test_the_rate_is_found_from_dense_steps_alone() -> None:
    dense = [step(number, "one", GB200, 0.9) for number in range(MIN_CASES)]
    others = [step(number, "two", GB200, 0.6, mixture=True) for number in range(MIN_CASES)]
    assert fit_low_precision_rates([*dense, *others]) == {GB200: 0.9}


def test_an_accelerator_whose_rate_wide_steps_say_keeps_it() -> None:
    assert fit_low_precision_rates([step(number, "one", H100, 0.9) for number in range(MIN_CASES)]) == {}


def test_too_few_cases_say_nothing() -> None:
    assert fit_low_precision_rates([step(number, "one", GB200, 0.9) for number in range(MIN_CASES - 1)]) == {}


def test_sources_count_alike_however_many_cases_they_have() -> None:
    """Sixteen cases at 0.8 and five at 1.0: the least sum of means lies with neither more than with the other."""
    table = [step(number, "many", GB200, 0.8) for number in range(16)]
    table += [step(number, "few", GB200, 1.0) for number in range(5)]
    found = fit_low_precision_rates(table)[GB200]
    assert 0.8 <= found <= 1.0
    alone = fit_low_precision_rates([*table[:5], *table[16:]])[GB200]
    assert found == alone


def test_without_its_only_source_an_accelerator_keeps_the_rate_of_other_products() -> None:
    table = [step(number, "one", GB300, 1.2) for number in range(MIN_CASES)]
    (judged,) = low_precision_quality(table)
    assert judged.mape == pytest.approx(0.0, abs=0.01)
    own = load_accelerator(GB300).derating.sustained_ratio
    expected = (1.0 + 2.0 / own) / (1.0 + 2.0 / 1.2) - 1.0
    assert judged.loo_bias == pytest.approx(expected)
    assert "gb300" in low_precision_lines(table)[0]
    assert '"gb300": 1.2' in low_precision_json(table)


def test_published_steps_are_tabulated_by_their_rate() -> None:
    """A faster rate is a shorter step; what is in BF16 is not asked for."""
    wanted = "mb-25.11-LLAMA3_8B-DGX-GB300-FP8_MX-8-gbs128-alt"
    cases = [
        case
        for case in read_steps()
        if case.text("case_id") in (wanted, "dgxc-v25.05-Nemotron4_15B-H100-bf16-16-gbs64")
    ]
    with ThreadPoolExecutor(1) as pool:
        (only,) = tabulate_low_precision(cases, pool)
    assert only.accelerator == GB300
    assert list(only.predicted_seconds) == sorted(only.predicted_seconds)  # rates descend
    assert only.predicted_seconds[0] < only.predicted_seconds[-1]
