"""Results of a method are computed once for each object and its arguments."""

import gc
from dataclasses import dataclass, replace

import pytest

from clustersim.common.cached_method import cached_by, cached_method


@dataclass(frozen=True)
class Scaled:
    """A method that lists its calls."""

    factor: int
    calls: list[int]

    @cached_method
    def times(self, value: int) -> int | None:
        self.calls.append(value)
        if value < 0:
            raise ValueError(value)
        return self.factor * value or None


def test_each_object_computes_each_result_once() -> None:
    double = Scaled(2, [])
    triple = replace(double, factor=3)  # shares nothing with the object that it is made from
    assert [double.times(5), double.times(5), triple.times(5), double.times(0), double.times(0)] == [
        10,
        10,
        15,
        None,
        None,
    ]
    assert double.calls == [5, 5, 0]
    assert double == Scaled(2, double.calls)


def test_errors_are_not_kept() -> None:
    scaled = Scaled(2, [])
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            scaled.times(-1)
    assert scaled.calls == [-1, -1]


def test_no_reference_cycle_is_made() -> None:
    gc.collect()
    scaled = Scaled(2, [])
    scaled.times(1)
    del scaled
    assert gc.collect() == 0


@dataclass(frozen=True)
class Absolute:
    """A method whose results depend on the size of its argument alone."""

    calls: list[int]

    @cached_by(lambda _, value, *, scale: (abs(value), scale))
    def scaled(self, value: int, *, scale: int) -> int:
        self.calls.append(value)
        return scale * abs(value)


def test_calls_with_equal_keys_share_a_result() -> None:
    absolute = Absolute([])
    assert [absolute.scaled(value, scale=scale) for value, scale in ((3, 2), (-3, 2), (-3, 5))] == [6, 6, 15]
    assert absolute.calls == [3, -3]
