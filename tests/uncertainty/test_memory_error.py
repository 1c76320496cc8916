"""How sure is it that a layout fits: probabilities and headroom from published errors of predicted peaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.uncertainty.memory_error import (
    MIN_HEADROOM,
    MIN_SOURCES,
    SAFE_PROBABILITY,
    MemoryErrorFamily,
    MemoryErrorModel,
    load_memory_error_model,
)

RATIOS = st.lists(st.floats(0.3, 3.0), min_size=1, max_size=6).map(tuple)
SOURCES = st.dictionaries(st.sampled_from("abcdefgh"), RATIOS, min_size=MIN_SOURCES)


def error_model(**ratios_by_source: tuple[float, ...]) -> MemoryErrorModel:
    return MemoryErrorModel((MemoryErrorFamily("one", frozenset({"one"}), ratios_by_source),))


@given(sources=SOURCES, capacity=st.floats(0.1, 10.0), more=st.floats(1.0, 2.0))
def test_probability_grows_with_capacity_and_is_never_certain(
    sources: dict[str, tuple[float, ...]], capacity: float, more: float
) -> None:
    model = error_model(**sources)
    probability = model.fit_probability("one", 1.0, capacity)
    assert 0.0 <= probability <= model.fit_probability("one", 1.0, capacity * more) < 1.0


@given(sources=SOURCES)
def test_default_headroom_is_safe_and_the_least_that_is(sources: dict[str, tuple[float, ...]]) -> None:
    model = error_model(**sources)
    headroom = model.default_headroom("one")
    assert MIN_HEADROOM <= headroom < 1.0
    if len([ratio for ratios in sources.values() for ratio in ratios]) >= MIN_SOURCES:
        assert model.fit_probability("one", 1.0 - headroom, 1.0) >= SAFE_PROBABILITY
    if headroom > MIN_HEADROOM:
        assert model.fit_probability("one", 1.0 - headroom + 0.002, 1.0) < SAFE_PROBABILITY


@given(sources=SOURCES, capacity=st.floats(0.1, 10.0))
def test_probability_is_below_the_share_of_published_runs_that_fit(
    sources: dict[str, tuple[float, ...]], capacity: float
) -> None:
    shares = [sum(ratio <= capacity * (1 + 1e-9) for ratio in ratios) / len(ratios) for ratios in sources.values()]
    assert error_model(**sources).fit_probability("one", 1.0, capacity) <= sum(shares) / len(shares) + 1e-12


def test_one_source_with_many_runs_does_not_outweigh_the_others() -> None:
    model = error_model(ci=(1.0,) * 1000, a=(1.2,), b=(1.2,), c=(1.2,))
    assert model.fit_probability("one", 1.0, 1.1) == pytest.approx(1 / 5)  # of four sources and the assumed one


def test_family_with_few_sources_takes_the_lowest_probability_of_the_others() -> None:
    good = MemoryErrorFamily("good", frozenset({"good"}), dict.fromkeys("abcd", (1.0,) * 9))
    bad = MemoryErrorFamily("bad", frozenset({"bad"}), dict.fromkeys("efgh", (1.5,) * 9))
    few = MemoryErrorFamily("few", frozenset({"few"}), {"i": (0.5,) * 9})
    model = MemoryErrorModel((good, bad, few))
    for framework in ("few", "of-a-users-own-file"):
        assert model.fit_probability(framework, 1.0, 1.2) == model.fit_probability("bad", 1.0, 1.2)
        assert model.default_headroom(framework) == model.default_headroom("bad")
    assert model.fit_probability("good", 1.0, 1.2) > model.fit_probability("bad", 1.0, 1.2)


def test_too_few_sources_are_an_error() -> None:
    with pytest.raises(InputError, match="no family has 4 sources"):
        error_model(a=(1.0,), b=(1.0,), c=(1.0,))


def test_packaged_errors_cover_sources_that_they_have_not_seen() -> None:
    model = load_memory_error_model()
    assert min(map(model.default_headroom, ("pytorch", "megatron"))) > MIN_HEADROOM
    for family in model.families:
        assert model.out_of_sample_coverage(family) >= SAFE_PROBABILITY
    left = 0.12 / 79.65  # what search once recommended
    assert model.fit_probability("megatron", 1.0 - left, 1.0) < SAFE_PROBABILITY
    assert model.fit_probability("pytorch", 1.0 - left, 1.0) < SAFE_PROBABILITY
