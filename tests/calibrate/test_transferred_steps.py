"""MoE and low-precision steps are evaluated with constants fitted to other steps, held out by source."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibrate.fit.step_constants import transfer_quality
from calibrate.fit.transferred_steps import SustainedRates, evaluate_step, evaluate_transferred
from clustersim.simulation import simulate
from clustersim.validation.cases import ValidationCase
from clustersim.validation.steps import build_scenario, compare_step, predicted_step_seconds
from tests.validation.sample_cases import step_case

MOE_COLUMNS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2", "quality": "A"},
}


def moe_case(source: str, **cells: str) -> ValidationCase:
    return step_case(**{**MOE_COLUMNS, "case_id": f"{source} {cells}", "source": source, **cells})


MOE_CASE = moe_case("one")
ACCELERATOR = build_scenario(MOE_CASE).cluster.accelerator.name


def test_moe_step_is_held_out_by_source() -> None:
    """At half the arithmetic rate a step takes longer, but less than twice as long, since it is not all arithmetic."""
    packaged_rate = build_scenario(MOE_CASE).cluster.accelerator.derating.sustained_ratio
    rates_by_held_out_source = {
        "one": SustainedRates({ACCELERATOR: packaged_rate / 2}),
        "other": SustainedRates({ACCELERATOR: packaged_rate / 4}),
    }
    step = evaluate_step(MOE_CASE, SustainedRates({ACCELERATOR: packaged_rate}), rates_by_held_out_source)
    predicted = compare_step(MOE_CASE).predicted
    assert step is not None
    assert predicted is not None
    assert 1.0 + step.in_sample_error == pytest.approx(predicted / MOE_CASE.positive_float("step_time_s"))
    assert 1.0 + step.in_sample_error < 1.0 + step.out_of_sample_error < 2.0 * (1.0 + step.in_sample_error)
    stated, unstated = step.out_of_sample
    assert stated.log_error == pytest.approx(-np.log(1.0 + step.out_of_sample_error))
    assert (stated.features.states_software, unstated.features.states_software) == (True, False)


def test_the_step_is_predicted_without_its_software_too() -> None:
    """As a user gets it who names no framework, relative to the prediction with it."""
    step = evaluate_step(MOE_CASE, SustainedRates(), {})
    assert step is not None
    stated, unstated = step.out_of_sample
    without, with_software = (
        predicted_step_seconds(simulate(build_scenario(MOE_CASE, states_software=states))) for states in (False, True)
    )
    assert without != with_software
    assert stated.log_error - unstated.log_error == pytest.approx(np.log(without / with_software))


def test_constants_of_other_accelerators_and_sources_have_no_effect() -> None:
    step = evaluate_step(
        MOE_CASE,
        SustainedRates({"a100-pcie-80gb": 0.1}, {ACCELERATOR: 0.1}),
        {"other": SustainedRates({ACCELERATOR: 0.1})},
    )
    assert step is not None
    assert (
        step.in_sample_error
        == step.out_of_sample_error
        == pytest.approx(compare_step(MOE_CASE).predicted / MOE_CASE.positive_float("step_time_s") - 1.0)
    )


def test_low_precision_matmuls_have_their_own_rate() -> None:
    """Dense BF16 steps do not determine it: only the low-precision matmuls are slower."""
    low_precision_case = step_case(
        case_id="narrow", source="one", precision="fp8", gpu="h100-sxm-80gb", quality="A", year="2024"
    )
    name = build_scenario(low_precision_case).cluster.accelerator.name
    step = evaluate_step(low_precision_case, SustainedRates(), {"one": SustainedRates(low_precision={name: 0.1})})
    assert step is not None
    assert step.model_name == "low_precision"
    assert 1.1 < (1.0 + step.out_of_sample_error) / (1.0 + step.in_sample_error) < 10.0


def test_kinds_and_sources_are_evaluated_separately_without_dense_steps() -> None:
    dense = step_case(case_id="dense", source="one", quality="A")
    unknown, unpredictable = moe_case("two", quality="C"), moe_case("two", top_k="")
    with ThreadPoolExecutor(1) as pool:
        steps_by_kind = evaluate_transferred(
            [MOE_CASE, dense, moe_case("two", seq="1024"), unknown, unpredictable], SustainedRates(), {}, pool
        )
    ((kind, steps),) = steps_by_kind.items()
    assert (kind, [step.source for step in steps]) == ("moe", ["one", "two"])
    qualities = transfer_quality([*steps, steps[0]])
    assert [(quality.source, quality.n) for quality in qualities] == [("one", 2), ("two", 1)]
    assert qualities[0].loo_bias == pytest.approx(steps[0].out_of_sample_error)
