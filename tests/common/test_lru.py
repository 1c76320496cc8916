"""The size-bounded LRU cache."""

import numpy as np
import pytest

from clustersim.common.arrays import FloatArray
from clustersim.common.lru import LruCache


def computed_keys(cache: LruCache[FloatArray], *keys: str) -> list[str]:
    """Request 80 bytes under each key in turn; return the keys whose values had to be computed."""
    missed: list[str] = []

    def make(key: str) -> FloatArray:
        missed.append(key)
        return np.zeros(10)

    for key in keys:
        cache.get_or_compute((key,), lambda key=key: make(key))  # type: ignore[misc]
    return missed


def test_a_value_is_computed_once() -> None:
    assert computed_keys(LruCache(1000), "a", "a", "b", "a") == ["a", "b"]


def test_the_least_recently_used_value_is_evicted() -> None:
    assert computed_keys(LruCache(160), "a", "b", "a", "c", "a", "b") == ["a", "b", "c", "b"]


def test_a_value_larger_than_the_cache_is_not_stored() -> None:
    cache = LruCache[FloatArray](160)
    assert computed_keys(cache, "a", "b") == ["a", "b"]
    assert cache.get_or_compute(("large",), lambda: np.zeros(100)).nbytes == 800
    assert computed_keys(cache, "a", "b") == []


def test_bytes_of_keys_count_for_the_size() -> None:
    cache = LruCache[FloatArray](200)
    for _ in range(2):
        cache.get_or_compute((b"x" * 100,), lambda: np.zeros(10))
        assert computed_keys(cache, "a") == ["a"]


def test_the_size_function_can_be_replaced() -> None:
    cache = LruCache[FloatArray](2, size=lambda _: 1)
    assert computed_keys(cache, "a", "b", "a", "c", "a", "b") == ["a", "b", "c", "b"]


def test_arrays_in_mappings_count_for_the_size_and_are_read_only() -> None:
    cache = LruCache[dict[str, FloatArray]](100)
    value = cache.get_or_compute(("a",), lambda: {"first": np.zeros(10)})
    with pytest.raises(ValueError, match="read-only"):
        value["first"][0] = 1.0
    cache.get_or_compute(("b",), lambda: {"first": np.zeros(10)})
    assert cache.get_or_compute(("a",), lambda: {}) == {}, "80 bytes of each: there is room for one"


def test_cached_arrays_are_read_only() -> None:
    value = LruCache[FloatArray](1000).get_or_compute(("a",), lambda: np.zeros(10))
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 1.0
