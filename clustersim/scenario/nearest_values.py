"""Which value near a wrong one would have been legal?"""

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def around(wanted: int, legal: Iterable[int]) -> str:
    """The nearest legal values below and above a wrong one, for a sentence.

    >>> around(6, divisors(32))
    '4 or 8'
    """
    values = sorted(legal)
    below = [value for value in values if value < wanted][-1:]
    above = [value for value in values if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)


def multiples_around(wanted: int, step: int) -> str:
    """The nearest positive multiples of `step` below and above a number that is none.

    >>> multiples_around(2050, 128)
    '2048 or 2176'
    """
    below = wanted // step * step
    return around(wanted, [value for value in (below, below + step) if value > 0])
