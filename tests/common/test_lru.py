"""Tables of results that are bounded in size."""

import numpy as np
import pytest

from clustersim.common.arrays import FloatArray
from clustersim.common.lru import LruCache


def made(recent: LruCache[FloatArray], *keys: str) -> list[str]:
    """Ask for 80 bytes under each key in turn; return the keys under which they had to be made."""
    missed: list[str] = []

    def make(key: str) -> FloatArray:
        missed.append(key)
        return np.zeros(10)

    for key in keys:
        recent.get_or_compute((key,), lambda key=key: make(key))  # type: ignore[misc]
    return missed


def test_a_result_is_made_once() -> None:
    assert made(LruCache(1000), "a", "a", "b", "a") == ["a", "b"]


def test_what_was_asked_for_longest_ago_goes_first_where_there_is_no_room() -> None:
    assert made(LruCache(160), "a", "b", "a", "c", "a", "b") == ["a", "b", "c", "b"]


def test_a_result_without_room_is_made_each_time_and_drives_nothing_out() -> None:
    recent = LruCache[FloatArray](160)
    assert made(recent, "a", "b") == ["a", "b"]
    assert recent.get_or_compute(("large",), lambda: np.zeros(100)).nbytes == 800
    assert made(recent, "a", "b") == []


def test_bytes_of_a_key_take_room_too() -> None:
    recent = LruCache[FloatArray](200)
    for _ in range(2):
        recent.get_or_compute((b"x" * 100,), lambda: np.zeros(10))
        assert made(recent, "a") == ["a"]


def test_results_may_have_a_size_of_their_own() -> None:
    recent = LruCache[FloatArray](2, size=lambda _: 1)
    assert made(recent, "a", "b", "a", "c", "a", "b") == ["a", "b", "c", "b"]


def test_arrays_in_mappings_take_room_and_are_shared_too() -> None:
    recent = LruCache[dict[str, FloatArray]](100)
    found = recent.get_or_compute(("a",), lambda: {"first": np.zeros(10)})
    with pytest.raises(ValueError, match="read-only"):
        found["first"][0] = 1.0
    recent.get_or_compute(("b",), lambda: {"first": np.zeros(10)})
    assert recent.get_or_compute(("a",), lambda: {}) == {}, "80 bytes of each: there is room for one"


def test_nobody_writes_into_what_others_share() -> None:
    found = LruCache[FloatArray](1000).get_or_compute(("a",), lambda: np.zeros(10))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1.0
