"""Which values would repair a problem? Those that every rule accepts, not only the one that refused.

A rule says what is wrong and which values it would accept itself (`Problem`). Where a scenario is read, each of
these is tried from the nearest on: the file is read again with that value, and the value is suggested only if the
problem is gone and no other has come. A degree of parallelism may need another dp, which is then part of the
suggestion. Where no single value helps, the message says so.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Final, Self

from clustersim.common.errors import InputError
from clustersim.scenario.resolved import ResolvedScenario

MAX_TRIES: Final = 32
"""Values that are tried below and above a wrong one."""
STRATEGY_KEY: Final = "layout.data.STRATEGY"
"""Key of the options of the data-parallel strategy, whose name in the file rules do not know."""
_DP_KEY: Final = "layout.dp"
_CHANGES_RANKS: Final = ("layout.tp", "layout.cp", "layout.pp", "cluster.gpus")
ReadVariant = Callable[[Sequence[str]], tuple[Sequence[str], ResolvedScenario]]
"""Reads the scenario with overrides: its problems, and what it resolves to; raises InputError if it is unreadable."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Values of a key that a rule would accept.

    key: dotted, as in `--set`; directions: of each, the first value that all rules accept is suggested.
    """

    key: str
    directions: tuple[tuple[Any, ...], ...]

    @classmethod
    def nearest(cls, key: str, value: int, allowed: Iterable[int]) -> Self:
        """The nearest allowed integers below and above a wrong one."""
        ordered = sorted(allowed)
        below, above = (
            [candidate for candidate in ordered if candidate < value],
            [candidate for candidate in ordered if candidate > value],
        )
        return cls(key, (tuple(below[: -MAX_TRIES - 1 : -1]), tuple(above[:MAX_TRIES])))

    @classmethod
    def multiples(cls, key: str, value: int, step: int, *, at_most: int | None = None) -> Self:
        """The nearest positive multiples of a step below and above a wrong value."""
        start = value // step
        allowed = (step * count for count in range(max(1, start - MAX_TRIES + 1), start + MAX_TRIES + 1))
        return cls.nearest(key, value, (size for size in allowed if at_most is None or size <= at_most))

    @property
    def name(self) -> str:
        """The key's last name, by which messages refer to it."""
        return self.key.rpartition(".")[2]


class Problem(str):
    """A sentence `key: what is wrong`; remedies: values that may repair it, the best first."""

    remedies: tuple[Remedy, ...]

    def __new__(cls, sentence: str, *remedies: Remedy) -> Self:
        """The sentence with its remedies."""
        problem = super().__new__(cls, sentence)
        problem.remedies = remedies
        return problem


class SizeProblem(Problem):
    """A problem without which no other rule can be applied, so that it hides theirs."""


def describe_problems(problems: Sequence[str], read_variant: ReadVariant) -> list[str]:
    """The problems, each with the nearest values that repair it."""
    return [_describe_problem(problem, problems, read_variant) for problem in problems]


def _describe_problem(problem: str, problems: Sequence[str], read_variant: ReadVariant) -> str:
    if not isinstance(problem, Problem) or not problem.remedies:
        return str(problem)
    other_keys = frozenset(map(problem_key, problems)) - {problem_key(problem)}
    criteria = [_LegalVariant(read_variant, problem_key(problem), other_keys)]
    if isinstance(problem, SizeProblem):  # else what it hides would exclude every value
        criteria.append(_LegalVariant(read_variant, problem_key(problem), None))
    for criterion, remedy in product(criteria, problem.remedies):
        suggestions = [
            suggestion for values in remedy.directions for suggestion in islice(criterion.values(remedy.key, values), 1)
        ]
        if suggestions:
            return f"{problem}; {_join(remedy.name, suggestions)} fits"
    names = dict.fromkeys(remedy.name for remedy in problem.remedies)
    return f"{problem}; no other {' or '.join(names)} alone fits"


def problem_key(problem: str) -> str:
    """The key that a problem is about."""
    return problem.partition(":")[0]


@dataclass(frozen=True, slots=True)
class _LegalVariant:
    """Which values repair a problem. other_keys: of problems that may stay; None: all but the value's own."""

    read_variant: ReadVariant
    repaired: str
    other_keys: frozenset[str] | None

    def values(self, key: str, values: Iterable[Any]) -> Iterator[tuple[Any, int | None]]:
        """Values that repair the problem, each with the dp that it needs (None: the file's)."""
        for value in values:
            override = f"{key}={json.dumps(value)}"
            if self._read(key, [override]) is not None:
                yield value, None
            elif key in _CHANGES_RANKS:
                resolved = self._read(key, [override, f"{_DP_KEY}=null"])
                if resolved is not None:
                    yield value, resolved.layout.as_configured.dp

    def _read(self, key: str, overrides: Sequence[str]) -> ResolvedScenario | None:
        """The scenario with overrides, if that repairs the problem."""
        try:
            problems, resolved = self.read_variant(overrides)
        except InputError:
            return None
        left = frozenset(map(problem_key, problems))
        is_legal = left.isdisjoint({self.repaired, key}) and (self.other_keys is None or left <= self.other_keys)
        return resolved if is_legal else None


def _join(name: str, legal: Sequence[tuple[Any, int | None]]) -> str:
    """Legal values as text: `tp 4 or 8`, `tp 4 with dp 2 or tp 8 with dp 1`."""
    if all(dp is None for _, dp in legal):
        return f"{name} {' or '.join(_format(value) for value, _ in legal)}"
    return " or ".join(f"{name} {_format(value)}{'' if dp is None else f' with dp {dp}'}" for value, dp in legal)


def _format(value: Any) -> str:
    """A value as it is written in a file."""
    return json.dumps(value).replace('"', "")
