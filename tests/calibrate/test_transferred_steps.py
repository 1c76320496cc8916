"""Mixtures and narrow formats are judged by constants that were fitted to others' steps, left out source by source."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibrate.fit.step_constants import transfer_quality
from calibrate.fit.transferred_steps import SustainedRates, evaluate_step, evaluate_transferred
from clustersim.validation.cases import ValidationCase
from clustersim.validation.steps import build_scenario, compare_step
from tests.validation.sample_cases import case

EXPERTS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2", "quality": "A"},
}


def mixture(source: str, **cells: str) -> ValidationCase:
    return case(**{**EXPERTS, "case_id": f"{source} {cells}", "source": source, **cells})


ONE = mixture("one")
NAME = build_scenario(ONE).cluster.accelerator.name


def test_a_mixture_is_left_out_by_the_constants_that_have_not_seen_its_source() -> None:
    """Arithmetic at half of its rate takes longer, but not twice as long, since not all of a step is arithmetic."""
    own = build_scenario(ONE).cluster.accelerator.derating.sustained_ratio
    without = {"one": SustainedRates({NAME: own / 2}), "other": SustainedRates({NAME: own / 4})}
    found = evaluate_step(ONE, SustainedRates({NAME: own}), without)
    predicted = compare_step(ONE).predicted
    assert found is not None
    assert predicted is not None
    assert 1.0 + found.in_sample_error == pytest.approx(predicted / ONE.positive_float("step_time_s"))
    assert 1.0 + found.in_sample_error < 1.0 + found.out_of_sample_error < 2.0 * (1.0 + found.in_sample_error)
    assert found.as_out_of_sample.log_error == pytest.approx(-np.log(1.0 + found.out_of_sample_error))


def test_constants_of_other_accelerators_and_sources_change_nothing() -> None:
    found = evaluate_step(
        ONE, SustainedRates({"a100-pcie-80gb": 0.1}, {NAME: 0.1}), {"other": SustainedRates({NAME: 0.1})}
    )
    assert found is not None
    assert (
        found.in_sample_error
        == found.out_of_sample_error
        == pytest.approx(compare_step(ONE).predicted / ONE.positive_float("step_time_s") - 1.0)
    )


def test_products_in_formats_with_scales_have_a_pace_of_their_own() -> None:
    """Which dense steps in BF16 say nothing of: only the products that have it are slower."""
    narrow = case(case_id="narrow", source="one", precision="fp8", gpu="h100-sxm-80gb", quality="A", year="2024")
    name = build_scenario(narrow).cluster.accelerator.name
    found = evaluate_step(narrow, SustainedRates(), {"one": SustainedRates(low_precision={name: 0.1})})
    assert found is not None
    assert found.model_name == "narrow"
    assert 1.2 < (1.0 + found.out_of_sample_error) / (1.0 + found.in_sample_error) < 10.0


def test_kinds_and_their_sources_are_counted_by_themselves_and_dense_steps_not_at_all() -> None:
    dense = case(case_id="dense", source="one", quality="A")
    unknown, refused = mixture("two", quality="C"), mixture("two", top_k="")
    with ThreadPoolExecutor(1) as pool:
        kinds = evaluate_transferred(
            [ONE, dense, mixture("two", seq="1024"), unknown, refused], SustainedRates(), {}, pool
        )
    ((kind, rows),) = kinds.items()
    assert (kind, [transferred_step.source for transferred_step in rows]) == ("mixtures", ["one", "two"])
    judged = transfer_quality([*rows, rows[0]])
    assert [(source_quality.source, source_quality.n) for source_quality in judged] == [("one", 2), ("two", 1)]
    assert judged[0].loo_bias == pytest.approx(rows[0].out_of_sample_error)
