"""A band holds the prediction, and is the wider the less was measured."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.uncertainty.prediction_interval import (
    VARIANCE_COMPONENTS,
    BaseComponent,
    LocalEvidence,
    UncertaintyModel,
    component_loads,
    strata_of,
)
from clustersim.uncertainty.step_features import Feature, StepFeatures
from clustersim.uncertainty.validated_domain import ValidatedDomain
from tests.conftest import examples

KNOWN = ValidatedDomain(frozenset({"h100"}), frozenset({"h200"}), frozenset({"DDP", "bf16"}), {"tokens": 8192, "tp": 8})
NO_TRAITS = dict.fromkeys(Feature, 0.0)
SEEN = StepFeatures(frozenset({"h100"}), frozenset({"DDP"}), {"tokens": 4096, "tp": 8}, NO_TRAITS)


def experience(deviations: Mapping[str, float] | None = None) -> UncertaintyModel:
    """One in which every term deviates by a tenth, but for those that are given by their words."""
    found = {term: (deviations or {}).get(term.value, 0.1) for term in VARIANCE_COMPONENTS}
    return UncertaintyModel(100, 10, 2.0, 0.03, found, KNOWN, {})


shares = st.floats(0.0, 1.0)
steps = st.builds(
    StepFeatures,
    st.frozensets(st.sampled_from(["h100", "h200", "mi300x", "mine"]), min_size=1),
    st.frozensets(st.sampled_from(["DDP", "bf16", "fp8", "ZeRO-3"])),
    st.fixed_dictionaries({"tokens": st.integers(1, 2**21), "tp": st.integers(1, 512)}),
    st.fixed_dictionaries(dict.fromkeys(Feature, shares)),
)
deviations = st.fixed_dictionaries({term.value: st.floats(0.0, 0.5) for term in VARIANCE_COMPONENTS})


@examples(200)
@given(steps, deviations, st.floats(0.0, 0.5), shares)
def test_a_band_holds_the_prediction(
    facts: StepFeatures, found: dict[str, float], error: float, unknown: float
) -> None:
    expected = experience(found).prediction_interval(facts, LocalEvidence(error, unknown))
    assert expected.low <= 1.0 <= expected.high
    assert expected.low * expected.high == pytest.approx(1.0)


@examples(200)
@given(steps, deviations, st.sampled_from(["accelerator", "kind", "tokens", "tp", "trait"]))
def test_what_was_not_measured_makes_no_band_narrower(facts: StepFeatures, found: dict[str, float], more: str) -> None:
    """One thing more that nobody measured, or more of what is hard to predict."""
    changed = {
        "accelerator": replace(facts, accelerators=facts.accelerators | {"nobody's"}),
        "kind": replace(facts, categories=facts.categories | {"nobody's"}),
        "tokens": replace(facts, quantities={**facts.quantities, "tokens": 2 * facts.quantities["tokens"]}),
        "tp": replace(facts, quantities={**facts.quantities, "tp": 2 * facts.quantities["tp"]}),
        "trait": replace(facts, feature_shares=dict.fromkeys(Feature, 1.0)),
    }[more]
    band = experience(found)
    assert band.error_variance(changed) >= band.error_variance(facts) * (1.0 - 1e-12)


@examples(100)
@given(steps, deviations, shares, shares)
def test_the_more_was_measured_here_the_narrower(
    facts: StepFeatures, found: dict[str, float], one: float, other: float
) -> None:
    band = experience(found)
    less, more = sorted((one, other))
    assert band.error_variance(facts, less) <= band.error_variance(facts, more) * (1.0 + 1e-12)


def test_variances_add_up() -> None:
    """fp8 on a stranger (itself a kind that is not known) with four times the tokens: 1 + 1 + 2 + 2 tenths squared."""
    facts = StepFeatures(frozenset({"mi300x"}), frozenset({"DDP", "fp8"}), {"tokens": 32768, "tp": 8}, NO_TRAITS)
    found = component_loads(facts, KNOWN)
    assert [found[gap] for gap in BaseComponent] == [1.0, 1.0, 2.0, 2.0]
    assert experience().error_variance(facts) == pytest.approx(6 * 0.1**2)
    assert experience().prediction_interval(facts).high == pytest.approx(exp(2.0 * sqrt(6) * 0.1))
    assert experience().prediction_interval(SEEN).high == pytest.approx(exp(2.0 * 0.1))


def test_a_sibling_is_between_what_was_measured_and_a_stranger() -> None:
    widths = [
        experience().error_variance(replace(SEEN, accelerators=frozenset({name}))) for name in ("h100", "h200", "b200")
    ]
    assert widths == pytest.approx([0.01, 0.02, 0.03])


def test_of_a_measured_machine_the_framework_remains() -> None:
    """Kernels' errors, 2 %, and a pipeline's tenth, beside what equal steps differ by; its pace is measured."""
    stranger = StepFeatures(frozenset({"mi300x"}), frozenset(), {}, {**NO_TRAITS, Feature.PIPELINE: 1.0})
    known = replace(KNOWN, categories=KNOWN.categories | stranger.all_categories)
    expected = replace(experience(), domain=known).prediction_interval(
        stranger, LocalEvidence(relative_error=0.02, unmeasured_share=0.0)
    )
    kind = 0.1**2  # nobody measured steps on it
    assert expected.high == pytest.approx(1.02 * exp(2.0 * sqrt(0.03**2 + 0.1**2 + kind)))


def test_a_trait_that_no_step_had_is_unmeasured_too() -> None:
    facts = replace(SEEN, feature_shares={**NO_TRAITS, Feature.TENSOR: 1.0})
    assert KNOWN.unmeasured_categories(facts) == (Feature.TENSOR.value,)
    assert experience().error_variance(facts) == pytest.approx(3 * 0.1**2)


def test_regimes_are_told_in_words() -> None:
    facts = replace(SEEN, feature_shares={**NO_TRAITS, Feature.PIPELINE: 1.0, Feature.LAUNCH: 0.01})
    assert strata_of(facts, replace(KNOWN, categories=KNOWN.categories | facts.all_categories)) == (
        "one node",
        Feature.PIPELINE.value,
    )
    expected = experience().prediction_interval(replace(facts, quantities={"tokens": 16384}))
    assert BaseComponent.DOUBLING.value in expected.strata
    assert "tokens 16,384 (at most 8,192)" in expected.extrapolations
