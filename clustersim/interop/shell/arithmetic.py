"""What is the value of an arithmetic expression of bash, in 64 bits?

Names are substituted before; an expression here has numbers and operators only.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from clustersim.common.errors import InputError

_TOKEN: Final = re.compile(r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&^|!~?:(),])")
_BITS: Final = 64
_MAX_DEPTH: Final = 100
_BINARY: Final[Mapping[str, tuple[int, Callable[[int, int], int]]]] = {
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "|": (3, lambda a, b: a | b),
    "^": (4, lambda a, b: a ^ b),
    "&": (5, lambda a, b: a & b),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    ">": (7, lambda a, b: int(a > b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << (b % _BITS)),
    ">>": (8, lambda a, b: a >> (b % _BITS)),
    "+": (9, lambda a, b: a + b),
    "-": (9, lambda a, b: a - b),
    "*": (10, lambda a, b: a * b),
    "/": (10, lambda a, b: _quotient(a, b)),
    "%": (10, lambda a, b: a - b * _quotient(a, b)),
    "**": (11, lambda a, b: _power(a, b)),
}
_UNARY: Final[Mapping[str, Callable[[int], int]]] = {
    "-": lambda value: -value,
    "+": lambda value: value,
    "!": lambda value: int(not value),
    "~": lambda value: ~value,
}


def evaluate_arithmetic(expression: str) -> int:
    """The value; raises InputError for what bash would not evaluate either.

    >>> evaluate_arithmetic("7 / -2 + 2 ** 3"), evaluate_arithmetic("0x10 > 15 ? 010 : 1"), evaluate_arithmetic("")
    (5, 8, 0)
    """
    tokens: list[str] = []
    position = 0
    stripped = expression.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None:
            raise InputError(f"{expression.strip()!r} is no arithmetic")
        tokens.append(match[1])
        position = match.end()
    if not tokens:
        return 0
    parser = _Parser(tokens)
    value = parser.comma()
    if parser.position < len(tokens):
        raise InputError(f"{expression.strip()!r} is no arithmetic")
    return value


class _Parser:
    """Precedence climbing."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.position = 0
        self._depth = 0

    def comma(self) -> int:
        value = self._conditional()
        while self._accept(","):
            value = self._conditional()
        return value

    def _conditional(self) -> int:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError("arithmetic is nested too deeply")
        value = self._binary(1)
        if self._accept("?"):
            first = self.comma()
            self._require(":")
            second = self._conditional()
            value = first if value else second
        self._depth -= 1
        return value

    def _binary(self, level: int) -> int:
        value = self._unary()
        while (entry := _BINARY.get(self._peek())) is not None and entry[0] >= level:
            operator = self._tokens[self.position]
            self.position += 1
            right = self._binary(entry[0] + (operator != "**"))
            value = _wrapped(entry[1](value, right))
        return value

    def _unary(self) -> int:
        signs: list[str] = []
        while self._peek() in _UNARY:
            signs.append(self._tokens[self.position])
            self.position += 1
        value = self._primary()
        for sign in reversed(signs):
            value = _wrapped(_UNARY[sign](value))
        return value

    def _primary(self) -> int:
        if self._accept("("):
            value = self.comma()
            self._require(")")
            return value
        token = self._peek()
        if not token[:1].isdigit():
            raise InputError("arithmetic lacks a number")
        self.position += 1
        return _number(token)

    def _peek(self) -> str:
        return self._tokens[self.position] if self.position < len(self._tokens) else ""

    def _accept(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self.position += 1
        return True

    def _require(self, token: str) -> None:
        if not self._accept(token):
            raise InputError(f"arithmetic lacks {token!r}")


def _number(token: str) -> int:
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            return _wrapped(int(digits, int(base)))
        if token[:2].casefold() == "0x":
            return _wrapped(int(token, 16))
        return _wrapped(int(token, 8 if token[0] == "0" else 10)) if len(token) < 40 else _too_long(token)
    except ValueError:
        raise InputError(f"{token!r} is no number") from None


def _too_long(token: str) -> int:
    raise InputError(f"a number of {len(token):,} digits is no number of 64 bits")


def _wrapped(value: int) -> int:
    return (value + (1 << (_BITS - 1))) % (1 << _BITS) - (1 << (_BITS - 1))


def _quotient(dividend: int, divisor: int) -> int:
    if not divisor:
        raise InputError("arithmetic divides by 0")
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise InputError("arithmetic has a negative exponent")
    return pow(base, exponent, 1 << _BITS)
