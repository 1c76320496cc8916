"""A band holds the prediction, and is the wider the less was measured."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.uncertainty.prediction_interval import TERMS, Experience, Gap, Measured, loads, regimes
from clustersim.uncertainty.step_features import Facts, Trait
from clustersim.uncertainty.validated_domain import Known
from tests.conftest import examples

KNOWN = Known(frozenset({"h100"}), frozenset({"h200"}), frozenset({"DDP", "bf16"}), {"tokens": 8192, "tp": 8})
NO_TRAITS = dict.fromkeys(Trait, 0.0)
SEEN = Facts(frozenset({"h100"}), frozenset({"DDP"}), {"tokens": 4096, "tp": 8}, NO_TRAITS)


def experience(deviations: Mapping[str, float] | None = None) -> Experience:
    """One in which every term deviates by a tenth, but for those that are given by their words."""
    found = {term: (deviations or {}).get(term.value, 0.1) for term in TERMS}
    return Experience(100, 10, 2.0, 0.03, found, KNOWN, {})


shares = st.floats(0.0, 1.0)
steps = st.builds(
    Facts,
    st.frozensets(st.sampled_from(["h100", "h200", "mi300x", "mine"]), min_size=1),
    st.frozensets(st.sampled_from(["DDP", "bf16", "fp8", "ZeRO-3"])),
    st.fixed_dictionaries({"tokens": st.integers(1, 2**21), "tp": st.integers(1, 512)}),
    st.fixed_dictionaries(dict.fromkeys(Trait, shares)),
)
deviations = st.fixed_dictionaries({term.value: st.floats(0.0, 0.5) for term in TERMS})


@examples(200)
@given(steps, deviations, st.floats(0.0, 0.5), shares)
def test_a_band_holds_the_prediction(facts: Facts, found: dict[str, float], error: float, unknown: float) -> None:
    expected = experience(found).expected(facts, Measured(error, unknown))
    assert expected.low <= 1.0 <= expected.high
    assert expected.low * expected.high == pytest.approx(1.0)


@examples(200)
@given(steps, deviations, st.sampled_from(["accelerator", "kind", "tokens", "tp", "trait"]))
def test_what_was_not_measured_makes_no_band_narrower(facts: Facts, found: dict[str, float], more: str) -> None:
    """One thing more that nobody measured, or more of what is hard to predict."""
    changed = {
        "accelerator": replace(facts, accelerators=facts.accelerators | {"nobody's"}),
        "kind": replace(facts, kinds=facts.kinds | {"nobody's"}),
        "tokens": replace(facts, amounts={**facts.amounts, "tokens": 2 * facts.amounts["tokens"]}),
        "tp": replace(facts, amounts={**facts.amounts, "tp": 2 * facts.amounts["tp"]}),
        "trait": replace(facts, traits=dict.fromkeys(Trait, 1.0)),
    }[more]
    band = experience(found)
    assert band.variance(changed) >= band.variance(facts) * (1.0 - 1e-12)


@examples(100)
@given(steps, deviations, shares, shares)
def test_the_more_was_measured_here_the_narrower(
    facts: Facts, found: dict[str, float], one: float, other: float
) -> None:
    band = experience(found)
    less, more = sorted((one, other))
    assert band.variance(facts, less) <= band.variance(facts, more) * (1.0 + 1e-12)


def test_variances_add_up() -> None:
    """fp8 on a stranger (itself a kind that is not known) with four times the tokens: 1 + 1 + 2 + 2 tenths squared."""
    facts = Facts(frozenset({"mi300x"}), frozenset({"DDP", "fp8"}), {"tokens": 32768, "tp": 8}, NO_TRAITS)
    found = loads(facts, KNOWN)
    assert [found[gap] for gap in Gap] == [1.0, 1.0, 2.0, 2.0]
    assert experience().variance(facts) == pytest.approx(6 * 0.1**2)
    assert experience().expected(facts).high == pytest.approx(exp(2.0 * sqrt(6) * 0.1))
    assert experience().expected(SEEN).high == pytest.approx(exp(2.0 * 0.1))


def test_a_sibling_is_between_what_was_measured_and_a_stranger() -> None:
    widths = [experience().variance(replace(SEEN, accelerators=frozenset({name}))) for name in ("h100", "h200", "b200")]
    assert widths == pytest.approx([0.01, 0.02, 0.03])


def test_of_a_measured_machine_the_framework_remains() -> None:
    """Kernels' errors, 2 %, and a pipeline's tenth, beside what equal steps differ by; its pace is measured."""
    stranger = Facts(frozenset({"mi300x"}), frozenset(), {}, {**NO_TRAITS, Trait.PIPELINE: 1.0})
    known = replace(KNOWN, kinds=KNOWN.kinds | stranger.had)
    expected = replace(experience(), known=known).expected(stranger, Measured(error=0.02, unknown=0.0))
    kind = 0.1**2  # nobody measured steps on it
    assert expected.high == pytest.approx(1.02 * exp(2.0 * sqrt(0.03**2 + 0.1**2 + kind)))


def test_a_trait_that_no_step_had_is_unmeasured_too() -> None:
    facts = replace(SEEN, traits={**NO_TRAITS, Trait.TENSOR: 1.0})
    assert KNOWN.unmeasured(facts) == (Trait.TENSOR.value,)
    assert experience().variance(facts) == pytest.approx(3 * 0.1**2)


def test_regimes_are_told_in_words() -> None:
    facts = replace(SEEN, traits={**NO_TRAITS, Trait.PIPELINE: 1.0, Trait.LAUNCH: 0.01})
    assert regimes(facts, replace(KNOWN, kinds=KNOWN.kinds | facts.had)) == ("one node", Trait.PIPELINE.value)
    expected = experience().expected(replace(facts, amounts={"tokens": 16384}))
    assert Gap.DOUBLING.value in expected.regimes
    assert "tokens 16,384 (at most 8,192)" in expected.unmeasured
