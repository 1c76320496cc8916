"""Does a test hold? `[ ... ]`, `[[ ... ]]` and `test`, on values that may not be known."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from clustersim.common.errors import InputError
from clustersim.interop.shell.expansion import Expander
from clustersim.interop.shell.patterns import matches_pattern
from clustersim.interop.shell.unknowns import Truth, UnknownValue, conjunction, negate

_NUMBERS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "\\<": lambda a, b: a < b,
    "\\>": lambda a, b: a > b,
}
_FILE_TESTS: Final = frozenset(f"-{letter}" for letter in "abcdefghkprstuwxGLNOS")


class ConditionEvaluator:
    """Evaluates the words of a test. is_extended: of `[[ ]]`, where nothing is split and patterns match."""

    def __init__(self, expander: Expander, shell_words: Sequence[str], line: int, *, is_extended: bool) -> None:
        self._expander = expander
        self._unknowns = expander.unknowns
        self._shell_words = list(shell_words) if is_extended else _expanded(expander, shell_words)
        self._line = line
        self._is_extended = is_extended
        self._position = 0
        self._depth = 0

    def truth(self) -> Truth:
        """Whether the test holds; raises InputError for words that are no test."""
        if not self._shell_words:
            return False
        result = self._either()
        if self._position < len(self._shell_words):
            if not self._is_extended:  # a shell complains, and goes on as if it did not hold
                return False
            raise InputError(f"line {self._line}: {' '.join(self._shell_words)!r} is no test")
        return result

    def _either(self) -> Truth:
        self._depth += 1
        if self._depth > 50:
            raise InputError(f"line {self._line}: a test is nested too deeply")
        result = self._both()
        while self._peek() in ("||", "-o"):
            self._position += 1
            right = self._both()
            result = negate(conjunction(negate(result), lambda right=right: negate(right)))  # type: ignore[misc]
        self._depth -= 1
        return result

    def _both(self) -> Truth:
        result = self._negation()
        while self._peek() in ("&&", "-a"):
            self._position += 1
            right = self._negation()
            result = conjunction(result, lambda right=right: right)  # type: ignore[misc]
        return result

    def _negation(self) -> Truth:
        if self._peek() == "!" and self._position + 1 < len(self._shell_words):
            self._position += 1
            return negate(self._negation())
        return self._primary()

    def _primary(self) -> Truth:
        word, rest = self._peek(), self._shell_words[self._position + 1 :]
        operator = rest[0] if rest else ""
        if len(rest) > 1 and (operator in _NUMBERS or operator in _TEXTS or operator == "=~"):
            self._position += 3
            return self._binary(word, operator, rest[1])
        if word in ("(", "\\("):
            self._position += 1
            result = self._either()
            self._position += 1
            return result
        if rest and re.fullmatch(r"-[a-zA-Z]", word) and operator not in ("&&", "||", "-a", "-o"):
            self._position += 2
            return self._unary(word, operator)
        self._position += 1
        return self._unary("-n", word)

    def _peek(self) -> str:
        return self._shell_words[self._position] if self._position < len(self._shell_words) else ""

    def _value(self, word: str) -> str:
        return self._expander.scalar(word) if self._is_extended else word

    def _unary(self, operator: str, word: str) -> Truth:
        value = self._value(word)
        if operator in ("-z", "-n"):
            is_empty = self._unknowns.lift_truth(
                lambda text: not text, [value], "[ -z {0} ]", self._line, self._default_of_emptiness
            )
            return is_empty if operator == "-z" else negate(is_empty)
        if operator == "-v":
            return self._is_set(value)
        shown = self._unknowns.settle(value)
        if operator not in _FILE_TESTS:
            raise InputError(f"line {self._line}: {operator} is no test")
        return self._unknowns.undecided(f"[ {operator} {shown} ]", self._line, self._unknowns.names([shown]))

    def _is_set(self, name: str) -> Truth:
        value = self._expander.state.value(name, self._unknowns.assumed)
        if value is not None:
            return True
        return self._unknowns.undecided(f"[ -v {name} ]", self._line, [name], 1)

    def _default_of_emptiness(self, value: str) -> int | None:
        """The outcome of a test of emptiness where the environment sets nothing: it holds."""
        hole = self._unknowns.hole_at(value)
        return 0 if isinstance(hole, UnknownValue) and hole.is_unset else None

    def _binary(self, left: str, operator: str, right: str) -> Truth:
        first = self._value(left)
        shown = f"[ {{0}} {operator} {{1}} ]"
        if operator in _NUMBERS:
            return self._numbers(first, operator, right, shown)
        if operator not in ("=", "==", "!="):
            compare = _matches_expression if operator == "=~" else _TEXTS[operator]
            return self._unknowns.lift_truth(compare, [first, self._value(right)], shown, self._line)
        second = self._expander.pattern(right) if self._is_extended else self._value(right)
        holds = matches_pattern if self._is_extended else str.__eq__
        is_equal = self._unknowns.lift_truth(
            holds, [first, second], "[ {0} = {1} ]", self._line, self._default_of_equality
        )
        return negate(is_equal) if operator == "!=" else is_equal

    def _default_of_equality(self, first: str, second: str) -> int | None:
        """The outcome of a comparison that asks whether a variable is empty."""
        if first and second:
            return None
        return self._default_of_emptiness(first or second)

    def _numbers(self, first: str, operator: str, right: str, shown: str) -> Truth:
        second = self._value(right)
        texts = [self._expander.arithmetic(text) if self._is_extended else text for text in (first, second)]
        return self._unknowns.lift_truth(
            lambda a, b: _compare(_NUMBERS[operator], a, b),
            texts,
            shown,
            self._line,
            lambda *settled: self._count_default(settled, operator),
        )

    def _count_default(self, texts: Sequence[str], operator: str) -> int | None:
        """The outcome of a comparison with `$#` where there are no arguments."""
        holes = [self._unknowns.hole_at(text) for text in texts]
        if not any(isinstance(hole, UnknownValue) and hole.label == "$#" for hole in holes):
            return None
        known_value = ["0" if hole is not None else text for text, hole in zip(texts, holes, strict=True)]
        return (
            None if "\0" in "".join(known_value) else 1 - _compare(_NUMBERS[operator], known_value[0], known_value[1])
        )


def _expanded(expander: Expander, shell_words: Sequence[str]) -> list[str]:
    """The words of `[ ]`; quotes keep what they hold from being an operator."""
    return [word for raw in shell_words for word in expander.shell_words(raw)]


def _compare(function: Callable[[int, int], bool], first: str, second: str) -> bool:
    """A comparison of numbers, which fails where bash says that they are none."""
    try:
        return function(int(first or 0), int(second or 0))
    except ValueError:
        return False


def _matches_expression(text: str, expression: str) -> bool:
    """A POSIX regular expression, as far as Python's have the same form; quotes and long ones are not read."""
    if len(expression) > 200 or re.search(r"[*+}][*+]|\)[*+]", expression):
        raise InputError(f"the expression {expression[:60]!r} is not evaluated")
    translated = (
        expression.replace("[[:digit:]]", r"\d").replace("[[:space:]]", r"\s").replace("[[:alpha:]]", "[a-zA-Z]")
    )
    try:
        return re.search(translated, text) is not None
    except re.error:
        return False
