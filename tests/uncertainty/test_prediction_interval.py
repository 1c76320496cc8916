"""A prediction interval contains the prediction, and is the wider the less was measured."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log, sqrt
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.uncertainty.model_file import MODEL_NAMES, load_uncertainty_model
from clustersim.uncertainty.prediction_interval import (
    INTERVAL_COVERAGE,
    UNSTATED_SOFTWARE,
    VARIANCE_COMPONENTS,
    BaseComponent,
    ErrorQuantiles,
    LocalEvidence,
    UncertaintyModel,
    component_loads,
    strata_of,
)
from clustersim.uncertainty.reference_runs import Job, ReferenceRun, SameJobErrors
from clustersim.uncertainty.step_features import Feature, StepFeatures
from clustersim.uncertainty.validated_domain import ValidatedDomain
from tests.conftest import examples

DOMAIN = ValidatedDomain(
    frozenset({"h100"}), frozenset({"h200"}), frozenset({"DDP", "bf16"}), {"tokens": 8192, "tp": 8}
)
NO_TRAITS = dict.fromkeys(Feature, 0.0)
MEASURED_FEATURES = StepFeatures(frozenset({"h100"}), frozenset({"DDP"}), {"tokens": 4096, "tp": 8}, NO_TRAITS)


def make_model(deviations: Mapping[str, float] | None = None) -> UncertaintyModel:
    """A model in which every term deviates by a tenth, except those given by label."""
    term_deviations = {term: (deviations or {}).get(term.value, 0.1) for term in VARIANCE_COMPONENTS}
    quantiles, unstated = ErrorQuantiles(0.25, 1.75, 0.5), ErrorQuantiles(-0.5, 2.0, 0.25)
    return UncertaintyModel(100, 10, "publisher", quantiles, unstated, 0.03, term_deviations, DOMAIN, {})


fractions = st.floats(0.0, 1.0)
step_features = st.builds(
    StepFeatures,
    st.frozensets(st.sampled_from(["h100", "h200", "mi300x", "mine"]), min_size=1),
    st.frozensets(st.sampled_from(["DDP", "bf16", "fp8", "ZeRO-3"])),
    st.fixed_dictionaries({"tokens": st.integers(1, 2**21), "tp": st.integers(1, 512)}),
    st.fixed_dictionaries(dict.fromkeys(Feature, fractions)),
)
deviations = st.fixed_dictionaries({term.value: st.floats(0.0, 0.5) for term in VARIANCE_COMPONENTS})


@examples(200)
@given(step_features, deviations, st.floats(0.0, 0.5), fractions)
def test_an_interval_contains_the_prediction(
    features: StepFeatures, term_deviations: dict[str, float], error: float, unknown: float
) -> None:
    expected = make_model(term_deviations).prediction_interval(features, LocalEvidence(error, unknown))
    assert expected.low <= 1.0 <= expected.high
    fast, slow = (log(end / (1.0 + error)) for end in (1.0 / expected.low, expected.high))
    normal = (1.0 - unknown) * NormalDist().inv_cdf(0.95)  # of what was measured; 1.5 and 2 deviations of the rest
    assert max(1.5, normal) * slow == pytest.approx(2.0 * fast, abs=1e-12)


@examples(200)
@given(step_features, deviations, st.sampled_from(["accelerator", "kind", "tokens", "tp", "trait"]))
def test_unmeasured_features_never_narrow_the_interval(
    features: StepFeatures, term_deviations: dict[str, float], change: str
) -> None:
    """One more unmeasured feature, or more of what is hard to predict."""
    changed = {
        "accelerator": replace(features, accelerators=features.accelerators | {"nobody's"}),
        "kind": replace(features, categories=features.categories | {"nobody's"}),
        "tokens": replace(features, quantities={**features.quantities, "tokens": 2 * features.quantities["tokens"]}),
        "tp": replace(features, quantities={**features.quantities, "tp": 2 * features.quantities["tp"]}),
        "trait": replace(features, feature_shares=dict.fromkeys(Feature, 1.0)),
    }[change]
    model = make_model(term_deviations)
    assert model.error_variance(changed) >= model.error_variance(features) * (1.0 - 1e-12)


@examples(100)
@given(step_features, deviations, st.floats(-1.0, 1.0), st.floats(0.0, 0.5))
def test_a_run_of_the_same_job_narrows_the_interval_or_leaves_it(
    features: StepFeatures, term_deviations: dict[str, float], log_error: float, quantile: float
) -> None:
    """Both half widths are the run's error and the difference of two runs of a job, where that is narrower."""
    model = replace(make_model(term_deviations), same_job=SameJobErrors(40, 8, quantile, 0.9))
    job = Job(features.accelerators, features.categories, "", 1, 1, ())
    run = ReferenceRun("a", "b", "c", "A", log_error, 1.0, None, job)
    alone, narrowed = model.prediction_interval(features), model.prediction_interval(features, reference=run)
    half = abs(log_error) + quantile
    assert narrowed.is_of_same_job == (2.0 * half < log(alone.high / alone.low))
    if narrowed.is_of_same_job:
        assert (narrowed.low, narrowed.high) == pytest.approx((exp(-half), exp(half)))
        assert narrowed.likely == pytest.approx((exp(-half * 0.5 / 1.75), exp(half * 0.5 / 1.75)))
    else:
        assert narrowed == alone
    assert replace(model, same_job=None).prediction_interval(features, reference=run) == alone


@examples(100)
@given(step_features, deviations, fractions, fractions)
def test_more_measured_time_narrows_the_interval(
    features: StepFeatures, term_deviations: dict[str, float], first_unknown: float, second_unknown: float
) -> None:
    model = make_model(term_deviations)
    smaller, larger = sorted((first_unknown, second_unknown))
    assert model.error_variance(features, smaller) <= model.error_variance(features, larger) * (1.0 + 1e-12)


@examples(100)
@given(step_features, deviations)
def test_half_of_the_times_are_in_a_narrower_interval(
    features: StepFeatures, term_deviations: dict[str, float]
) -> None:
    """From -0.25 to 0.75 standard deviations, where nine of ten are in -1.5 to 2."""
    interval = make_model(term_deviations).prediction_interval(features)
    assert interval.likely == pytest.approx((interval.low ** (0.25 / 1.5), interval.high ** (0.75 / 2.0)))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_packaged_likely_intervals_are_narrower(name: str) -> None:
    model = load_uncertainty_model(name)
    for quantiles in (model.quantiles, model.unstated_quantiles):
        assert 0.0 < quantiles.likely < quantiles.interval


def test_the_interval_without_software_contains_both() -> None:
    """-1.5 to 2 deviations with it, -2.5 to 1.5 without; a center beyond the half width ends at the prediction."""
    model = make_model()
    stated, unstated = (
        model.prediction_interval(replace(MEASURED_FEATURES, states_software=states)) for states in (True, False)
    )
    assert (stated.low, stated.high) == pytest.approx((exp(-0.15), exp(0.2)))
    assert (unstated.low, unstated.high) == pytest.approx((exp(-0.25), exp(0.2)))
    assert unstated.likely == pytest.approx((exp(-0.075), exp(0.075)))
    assert UNSTATED_SOFTWARE in unstated.strata
    assert UNSTATED_SOFTWARE not in stated.strata
    assert ErrorQuantiles(-2.0, 1.5, 0.5).ends(INTERVAL_COVERAGE) == (-3.5, 0.0)


def test_variances_add_up() -> None:
    """fp8 on an unmeasured accelerator (an unknown kind too), four times the tokens: 1 + 1 + 2 + 2 tenths squared."""
    features = StepFeatures(frozenset({"mi300x"}), frozenset({"DDP", "fp8"}), {"tokens": 32768, "tp": 8}, NO_TRAITS)
    gap_loads = component_loads(features, DOMAIN)
    assert [gap_loads[gap] for gap in BaseComponent] == [1.0, 1.0, 2.0, 2.0]
    assert make_model().error_variance(features) == pytest.approx(6 * 0.1**2)
    assert make_model().prediction_interval(features).high == pytest.approx(exp(2.0 * sqrt(6) * 0.1))
    assert make_model().prediction_interval(MEASURED_FEATURES).high == pytest.approx(exp(2.0 * 0.1))


def test_a_sibling_is_between_measured_and_unmeasured_accelerators() -> None:
    variances = [
        make_model().error_variance(replace(MEASURED_FEATURES, accelerators=frozenset({name})))
        for name in ("h100", "h200", "b200")
    ]
    assert variances == pytest.approx([0.01, 0.02, 0.03])


def test_with_a_record_only_framework_terms_remain() -> None:
    """Kernel errors of 2 %, and a tenth for the pipeline, besides repeatability; the device rate is measured."""
    unmeasured = StepFeatures(frozenset({"mi300x"}), frozenset(), {}, {**NO_TRAITS, Feature.PIPELINE: 1.0})
    domain = replace(DOMAIN, categories=DOMAIN.categories | unmeasured.all_categories)
    expected = replace(make_model(), domain=domain).prediction_interval(
        unmeasured, LocalEvidence(relative_error=0.02, unmeasured_share=0.0)
    )
    kind_variance = 0.1**2  # nobody measured steps on it
    assert expected.high == pytest.approx(1.02 * exp(2.0 * sqrt(0.03**2 + 0.1**2 + kind_variance)))


def test_a_trait_that_no_step_had_is_unmeasured_too() -> None:
    features = replace(MEASURED_FEATURES, feature_shares={**NO_TRAITS, Feature.TENSOR: 1.0})
    assert DOMAIN.unmeasured_categories(features) == (Feature.TENSOR.value,)
    assert make_model().error_variance(features) == pytest.approx(3 * 0.1**2)


def test_strata_have_labels() -> None:
    features = replace(MEASURED_FEATURES, feature_shares={**NO_TRAITS, Feature.PIPELINE: 1.0, Feature.LAUNCH: 0.01})
    assert strata_of(features, replace(DOMAIN, categories=DOMAIN.categories | features.all_categories)) == (
        "single-node",
        Feature.PIPELINE.value,
    )
    expected = make_model().prediction_interval(replace(features, quantities={"tokens": 16384}))
    assert BaseComponent.DOUBLING.value in expected.strata
    assert "tokens 16,384 (validated up to 8,192)" in expected.extrapolations
