"""Which allowed value is nearest to a wrong one? Helpers for error messages."""

from collections.abc import Iterable


def divisors(n: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_values(value: int, allowed: Iterable[int]) -> str:
    """The nearest allowed values below and above a wrong one, as text.

    >>> nearest_values(6, divisors(32))
    '4 or 8'
    """
    ordered = sorted(allowed)
    below = [candidate for candidate in ordered if candidate < value][-1:]
    above = [candidate for candidate in ordered if candidate > value][:1]
    return " or ".join(str(candidate) for candidate in below + above)


def nearest_multiples(value: int, step: int) -> str:
    """The nearest positive multiples of `step` below and above a value, as text.

    >>> nearest_multiples(2050, 128)
    '2048 or 2176'
    """
    below = value // step * step
    return nearest_values(value, [candidate for candidate in (below, below + step) if candidate > 0])
