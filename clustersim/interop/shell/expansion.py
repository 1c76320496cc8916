"""Which words does shell text expand to? Parameters, arithmetic, quotes and splitting.

Values that are not known become holes (`unknowns`). Command substitutions are the interpreter's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError
from clustersim.interop.shell.arithmetic import evaluate_arithmetic
from clustersim.interop.shell.patterns import CASES, REMOVALS, REPLACEMENTS
from clustersim.interop.shell.scanning import skip_bracketed, skip_quoted
from clustersim.interop.shell.state import ShellState, Value, Variant
from clustersim.interop.shell.unknowns import Unknowns, WordBuilder, mark_split

MAX_TEXT: Final = 1_000_000
"""Characters of any value; no launch script needs more."""
_MAX_DEPTH: Final = 40
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_PARAMETER: Final = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])")
_ARITHMETIC_NAME: Final = re.compile(r"(?<![\w#])[A-Za-z_]\w*")
_SEQUENCE: Final = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r", "0": ""}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word. words: of an expansion of a list in quotes, else one; is_split: at white space."""

    shell_words: tuple[str, ...]
    is_split: bool = False
    is_literal: bool = False


class Expander:
    """Expands text in a state. substitute: the output of a command, by its text and line."""

    def __init__(self, unknowns: Unknowns, state: ShellState, substitute: Callable[[str, int], str]) -> None:
        self.unknowns = unknowns
        self.state = state
        self.line = 0
        self._substitute = substitute
        self._depth = 0

    def shell_words(self, text: str) -> list[str]:
        """The words that one word of a command expands to."""
        builder = WordBuilder()
        for alternative in _brace_alternatives(text):
            for piece in self._pieces(alternative, quoted=False):
                if piece.is_split:
                    for index, word in enumerate(piece.shell_words):
                        if index:
                            builder.end()
                        builder.append_split(mark_split(word))
                else:
                    builder.append_list(piece.shell_words)
            builder.end()
        return self.unknowns.settle_words(builder.shell_words())

    def scalar(self, text: str, *, quoted: bool = False) -> str:
        """The value that text has in an assignment; quoted: as in a here-document."""
        value = "".join(" ".join(piece.shell_words) for piece in self._pieces(text, quoted=quoted, is_document=quoted))
        return self._bounded(self.unknowns.as_text(self.unknowns.settle(value)))

    def pattern(self, text: str) -> str:
        """Text as a pattern: what is quoted is matched literally."""
        segments = []
        for piece in self._pieces(text, quoted=False, keep_escapes=True):
            value = " ".join(piece.shell_words)
            segments.append(value if piece.is_split or piece.is_literal else re.sub(r"([*?\[\\])", r"\\\1", value))
        return self.unknowns.settle("".join(segments))

    def arithmetic(self, text: str) -> str:
        """The value of an arithmetic expression, assignments in it included."""
        expression = self.scalar(text.replace('"', ""), quoted=True)
        value = "0"
        for segment in _comma_parts(expression):
            value = self._arithmetic_part(segment)
        return value

    def _arithmetic_part(self, segment: str) -> str:
        assigned = re.fullmatch(r"\s*(\w+)(\[[^]]*\])?\s*([-+*/%&|^]|<<|>>)?=(?!=)(.*)", segment, re.DOTALL)
        if assigned and _NAME.fullmatch(assigned[1]):
            left = f"{assigned[1]}{assigned[3]}({assigned[4]})" if assigned[3] else assigned[4]
            value = self._arithmetic_value(left)
            self.state.assign(assigned[1], value, index=assigned[2][1:-1] if assigned[2] else None)
            return value
        stepped = re.fullmatch(r"\s*(\+\+|--)?\s*([A-Za-z_]\w*)\s*(\+\+|--)?\s*", segment)
        if stepped and (stepped[1] or stepped[3]):
            before = self._arithmetic_value(stepped[2])
            after = self._arithmetic_value(f"{stepped[2]}{(stepped[1] or stepped[3])[0]}1")
            self.state.assign(stepped[2], after)
            return after if stepped[1] else before
        return self._arithmetic_value(segment)

    def _arithmetic_value(self, expression: str) -> str:
        for _ in range(_MAX_DEPTH):
            substituted = _ARITHMETIC_NAME.sub(self._arithmetic_operand, expression)
            if substituted == expression:
                return self._bounded(self.unknowns.lift(self._known_arithmetic, expression))
            expression = self._bounded(substituted)
        raise InputError(f"line {self.line}: variables of arithmetic stand for each other")

    def _arithmetic_operand(self, match: re.Match[str]) -> str:
        if re.fullmatch(r"0[xX][0-9a-fA-F]+", match[0]):
            return match[0]
        value = self._lookup(match[0], None)
        text = " ".join(value[:1]) if isinstance(value, tuple) else value if isinstance(value, str) else None
        return f"({text or 0})" if text is not None else self._unset(match[0])

    def _known_arithmetic(self, expression: str) -> str:
        try:
            return str(evaluate_arithmetic(expression))
        except InputError as error:
            return self.unknowns.unknown(f"$(({expression.strip()})) ({error})", self.line)

    def _bounded(self, text: str) -> str:
        if len(text) > MAX_TEXT:
            raise InputError(f"line {self.line}: a value of more than {MAX_TEXT:,} characters; no script needs one")
        return text

    def _pieces(self, text: str, *, quoted: bool, keep_escapes: bool = False, is_document: bool = False) -> list[Piece]:
        """The pieces of text. is_document: double quotes are literal, as in a here-document."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError(f"line {self.line}: expansions are nested too deeply")
        try:
            return list(self._scan(text, quoted=quoted, keep_escapes=keep_escapes, is_document=is_document))
        finally:
            self._depth -= 1

    def _scan(self, text: str, *, quoted: bool, keep_escapes: bool, is_document: bool) -> Iterator[Piece]:
        """The pieces of text; inside double quotes apostrophes are literal."""
        position = 0
        while position < len(text):
            character = text[position]
            if character in '$`\\"' or (character == "'" and not quoted):
                is_plain = (quoted and text[position : position + 2] == "$'") or (is_document and character == '"')
                end = position + 1 if is_plain else skip_quoted(text, position)
                if is_plain:
                    yield Piece((character,))
                    position = end
                    continue
                yield from self._special(text[position:end], text, position, quoted=quoted, keep_escapes=keep_escapes)
                position = max(end, self._end)
            else:
                end = position + 1
                while end < len(text) and text[end] not in "$`\\\"'":
                    end += 1
                yield Piece((text[position:end],), is_literal=not quoted)
                position = end

    _end = 0

    def _special(self, segment: str, text: str, position: int, *, quoted: bool, keep_escapes: bool) -> Iterator[Piece]:
        """A quote, an escape or an expansion; sets where it ends."""
        self._end = position + len(segment)
        match segment[0]:
            case "\\":
                yield from self._escape(segment, quoted=quoted, keep=keep_escapes)
            case "'":
                yield Piece((segment[1:-1],))
            case '"':
                yield from self._quoted(segment[1:-1])
                self._end = position + len(segment)
            case "`":
                command = re.sub(r"\\([`$\\])", r"\1", segment[1:-1])
                yield Piece((self._substitute(command, self.line),), is_split=not quoted)
            case _:
                pieces, end = self._dollar(segment, text, position, quoted=quoted)
                yield from pieces
                self._end = end

    def _escape(self, segment: str, *, quoted: bool, keep: bool) -> Iterator[Piece]:
        escaped = segment[1:]
        if escaped == "\n":
            return
        if quoted and escaped not in ("$", "`", '"', "\\"):
            yield Piece((segment,))
        else:
            yield Piece((segment if keep and not quoted else escaped,), is_literal=keep)

    def _quoted(self, inner: str) -> Iterator[Piece]:
        pieces = self._pieces(inner, quoted=True)
        yield from pieces or ([] if "@" in inner else [Piece(("",))])  # a list without elements is no word

    def _dollar(self, segment: str, text: str, position: int, *, quoted: bool) -> tuple[Sequence[Piece], int]:
        end = position + len(segment)
        if segment.startswith("$((") and segment.endswith("))"):
            return [Piece((self.arithmetic(segment[3:-2]),), is_split=not quoted)], end
        if segment.startswith("$("):
            return [Piece((self._substitute(segment[2:-1], self.line),), is_split=not quoted)], end
        if segment.startswith("${"):
            return self._parameter(segment[2:-1], quoted=quoted), end
        if segment.startswith("$'"):
            return [Piece((_unescaped(segment[2:-1]),))], end
        match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, position)
        if match is None:
            is_translated = not quoted and text[position + 1 : position + 2] == '"'
            return ([] if is_translated else [Piece(("$",))]), position + 1
        value = self._lookup(match[1], None)
        joined = (self.unknowns.joined(value),) if match[1] == "*" and quoted and isinstance(value, tuple) else value
        return self._value_pieces(match[1], joined, quoted=quoted), match.end()

    def _parameter(self, inner: str, *, quoted: bool) -> Sequence[Piece]:
        """`${...}` without its braces."""
        match = _PARAMETER.match(inner)
        if match is None or (match[1] and not inner[match.end() - len(match[2]) :]):
            raise InputError(f"line {self.line}: ${{{inner}}} is no expansion")
        prefix, name, position = match[1], match[2], match.end()
        if prefix == "#" and inner[match.end() :][:1] in tuple(":-+?=%") and name in "@*#?$!-":
            raise InputError(f"line {self.line}: ${{{inner}}} is no expansion")
        index = None
        if inner[position : position + 1] == "[":
            end = _closing_bracket(inner, position)
            index, position = inner[position + 1 : end], end + 1
        rest = inner[position:]
        if prefix == "#":
            return [Piece((self._length(name, index),), is_split=not quoted)]
        if prefix == "!":
            return self._indirect(name, index, rest, quoted=quoted)
        pieces = self._operated(name, self._lookup(name, index), rest, quoted=quoted)
        if quoted and "*" in (name, index):
            return [Piece((self.unknowns.joined([word for piece in pieces for word in piece.shell_words]),))]
        return pieces

    def _indirect(self, name: str, index: str | None, rest: str, *, quoted: bool) -> Sequence[Piece]:
        """`${!name}` and `${!array[@]}`."""
        if index in ("@", "*"):
            keys = self.state.keys(name)
            return [Piece(tuple(keys), is_split=not quoted)]
        if rest in ("*", "@"):
            return [Piece(tuple(sorted(key for key in self.state.names() if key.startswith(name))), not quoted)]
        pointer = self.unknowns.settle(self._text(name, self._lookup(name, index)))
        if not _NAME.fullmatch(pointer):
            return [Piece((self.unknowns.unknown(f"${{!{name}}}", self.line, self.unknowns.names([pointer])),))]
        return self._operated(pointer, self._lookup(pointer, None), rest, quoted=quoted)

    def _length(self, name: str, index: str | None) -> str:
        value = self._lookup(name, index)
        if isinstance(value, Variant):
            lengths = [self._length_of(name, outcome, is_list=index in ("@", "*")) for outcome in value.outcomes]
            return self.unknowns.choice(value.decision, (lengths[0],), (lengths[1],))
        return self._length_of(name, value, is_list=index in ("@", "*"))

    def _length_of(self, name: str, value: "Value | tuple[str, ...]", *, is_list: bool) -> str:
        if isinstance(value, tuple) and (is_list or name in ("@", "*")):
            return self._count(name, value)
        if value is None:
            return self.unknowns.unknown(f"${{#{name}}}", self.line, (name,))
        return self.unknowns.lift(lambda text: str(len(text)), self._text(name, value))

    def _count(self, name: str, shell_words: Sequence[str]) -> str:
        """How many words there are, of which a condition may decide."""
        settled = self.unknowns.settle_words(shell_words)
        decision = self.unknowns.open_decision(settled)
        if decision is None:
            if not any("*\0" in word for word in settled):
                return str(len(settled))
            return self.unknowns.unknown(f"${{#{name}[@]}}", self.line, self.unknowns.names(settled))
        counts = []
        for outcome in (0, 1):
            with self.unknowns.assuming({decision.number: outcome}):
                counts.append(self._count(name, settled))
        return self.unknowns.choice(decision, (counts[0],), (counts[1],))

    def _operated(self, name: str, value: "Value | tuple[str, ...]", rest: str, *, quoted: bool) -> Sequence[Piece]:
        """The pieces of a value with an operator; each of two values that a condition decides has its own."""
        if isinstance(value, Variant) and rest:
            outcomes = []
            for number, outcome in enumerate(value.outcomes):
                with self.unknowns.assuming({value.decision.number: number}):
                    outcomes.append(self._piece_words(self._operated(name, outcome, rest, quoted=quoted)))
            word = self.unknowns.choice(value.decision, outcomes[0], outcomes[1], name)
            return [Piece((word,), is_split=not quoted)]
        if not rest:
            return self._value_pieces(name, value, quoted=quoted)
        for operator in (":-", ":=", ":?", ":+", "-", "=", "?", "+"):
            if rest.startswith(operator):
                return self._alternative(name, value, operator, rest[len(operator) :], quoted=quoted)
        shell_words = value if isinstance(value, tuple) else (self._text(name, value),)
        if rest.startswith(":"):
            return self._value_pieces(name, self._slice(name, value, rest[1:]), quoted=quoted)
        return self._value_pieces(name, tuple(self._transformed(word, rest) for word in shell_words), quoted=quoted)

    @staticmethod
    def _piece_words(pieces: Sequence[Piece]) -> tuple[str, ...]:
        builder = WordBuilder()
        for piece in pieces:
            builder.append_list(piece.shell_words)
        return tuple(builder.shell_words())

    def _alternative(
        self, name: str, value: "Value | tuple[str, ...]", operator: str, word: str, *, quoted: bool
    ) -> Sequence[Piece]:
        """`${X:-word}` and its kin; a variable that nobody sets is not set."""
        texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
        decision = self.unknowns.open_decision(texts)
        if decision is not None:
            outcomes = []
            for outcome in (0, 1):
                with self.unknowns.assuming({decision.number: outcome}):
                    settled = tuple(self.unknowns.settle_words(texts))
                    known_value = settled if isinstance(value, tuple) else " ".join(settled)
                    outcomes.append(
                        self._piece_words(self._alternative(name, known_value, operator, word, quoted=quoted))
                    )
            return [Piece((self.unknowns.choice(decision, outcomes[0], outcomes[1], name),), is_split=not quoted)]
        is_absent = value is None or (operator[0] == ":" and self._is_empty(value))
        match operator[-1]:
            case "+":
                return [] if is_absent else self._pieces(word, quoted=quoted)
            case "=" if is_absent:
                assigned = self.scalar(word)
                self.state.assign(name, assigned)
                return [Piece((assigned,), is_split=not quoted)]
            case "-" if is_absent:
                return self._pieces(word, quoted=quoted)
            case "?" if is_absent:
                return [Piece((self._unset(name),), is_split=not quoted)]
        return self._value_pieces(name, value, quoted=quoted)

    @staticmethod
    def _is_empty(value: "Value | tuple[str, ...]") -> bool:
        return not "".join(value) if isinstance(value, tuple) else not value

    def _slice(self, name: str, value: "Value | tuple[str, ...]", bounds: str) -> "Value | tuple[str, ...]":
        """`${X:offset:length}`."""
        offset_text, _, length_text = bounds.partition(":")
        texts = [self.arithmetic(offset_text), self.arithmetic(length_text) if length_text.strip() else ""]
        if any("\0" in text for text in texts):
            return self.unknowns.unknown(f"${{{name}:{bounds}}}", self.line, self.unknowns.names(texts))
        offset, length = int(texts[0]), int(texts[1]) if texts[1] else None
        if isinstance(value, tuple):
            shift = 1 if name in ("@", "*") else 0
            return tuple(_sliced(value, max(0, offset - shift), length))
        return self.unknowns.lift(lambda text: "".join(_sliced(text, offset, length)), self._text(name, value))

    def _transformed(self, word: str, rest: str) -> str:
        for operator, remove in REMOVALS.items():
            if rest.startswith(operator):
                return self.unknowns.lift(remove, word, self.pattern(rest[len(operator) :]))
        for operator, replace in REPLACEMENTS.items():
            if rest.startswith(operator):
                pattern, replacement = _replacement_parts(rest[len(operator) :])
                return self.unknowns.lift(replace, word, self.pattern(pattern), self.scalar(replacement))
        for operator, change in CASES.items():
            if rest == operator:
                return self.unknowns.lift(change, word)
        if rest.startswith("@"):
            return word
        raise InputError(f"line {self.line}: ${{...{rest}}} is no expansion")

    def _value_pieces(self, name: str, value: "Value | tuple[str, ...]", *, quoted: bool) -> Sequence[Piece]:
        if isinstance(value, tuple):
            return [Piece(value, is_split=not quoted)] if value else []
        return [Piece((self._text(name, value),), is_split=not quoted)]

    def _text(self, name: str, value: "Value | tuple[str, ...]") -> str:
        """A value as one text; that of an array is its first element."""
        if isinstance(value, Variant):
            texts = [None if outcome is None else (self._text(name, outcome),) for outcome in value.outcomes]
            return self.unknowns.choice(value.decision, texts[0], texts[1], name)
        if value is None:
            return self._unset(name)
        if isinstance(value, str):
            return value
        return next(iter(value.values() if isinstance(value, dict) else value), "")

    def _unset(self, name: str) -> str:
        """The hole of a variable or positional parameter that the script does not set."""
        if name == "?":
            return self.unknowns.unknown("$?", self.line)
        if name.isdecimal():
            name = str(int(name) + self.state.shifted)
        is_definable = _NAME.fullmatch(name) or name.isdecimal()
        return self.unknowns.unknown(f"${name}", self.line, (name,) if is_definable else (), is_unset=True)

    def _lookup(self, name: str, index: str | None) -> "Value | tuple[str, ...]":
        """The value of a parameter; a tuple for all elements of an array."""
        if not _NAME.fullmatch(name):
            return self._settled(self._special_parameter(name))
        value = self._settled(self.state.value(name, self.unknowns.assumed))
        if index is None:
            return value if not isinstance(value, tuple | dict) else self._text(name, value)
        if isinstance(value, Variant):
            outcomes = [self._element(name, outcome, index) for outcome in value.outcomes]
            return self._joined(value, outcomes, name)
        return self._element(name, value, index)

    def _settled(self, value: "Value | tuple[str, ...]") -> "Value | tuple[str, ...]":
        """A value with the choices of assumed decisions made."""
        if isinstance(value, str):
            return self.unknowns.settle(value)
        return tuple(self.unknowns.settle_words(value)) if isinstance(value, tuple) else value

    def _joined(
        self, value: Variant, outcomes: "Sequence[Value | tuple[str, ...]]", name: str
    ) -> "Value | tuple[str, ...]":
        """A list of which a condition decides, as a word that stands for either."""
        texts = [
            outcome if isinstance(outcome, tuple) or outcome is None else (self._text(name, outcome),)
            for outcome in outcomes
        ]
        return (self.unknowns.choice(value.decision, texts[0] or (), texts[1] or (), name),)

    def _element(self, name: str, value: Value, index: str) -> "Value | tuple[str, ...]":
        if isinstance(value, Variant):
            return self._joined(value, [self._element(name, outcome, index) for outcome in value.outcomes], name)
        if index in ("@", "*"):
            return self._elements(value)
        if isinstance(value, dict):
            return value.get(self.scalar(index))
        shell_words = (value,) if isinstance(value, str) else value
        return None if shell_words is None else self._indexed(name, shell_words, index)

    def _indexed(self, name: str, shell_words: Sequence[str], index: str) -> str:
        """An element of an array; unknown where its index is, or where a condition decides how many there are."""
        position = self.arithmetic(index)
        has_choice = len(shell_words) > 1 and self.unknowns.open_decision(shell_words) is not None
        if "\0" in position or has_choice:
            return self.unknowns.unknown(
                f"${{{name}[{index}]}}", self.line, self.unknowns.names([position, *shell_words])
            )
        number = int(position)
        return shell_words[number] if -len(shell_words) <= number < len(shell_words) else ""

    @staticmethod
    def _elements(value: Value) -> tuple[str, ...]:
        if isinstance(value, dict):
            return tuple(value.values())
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]

    def _special_parameter(self, name: str) -> "Value | tuple[str, ...]":
        positional = self.state.positional
        if name in ("@", "*"):
            return tuple(positional)
        if name == "#":
            known_value = self.state.has_arguments
            return (
                str(len(positional)) if known_value else self.unknowns.unknown("$#", self.line, ("1",), is_unset=True)
            )
        if name == "0":
            return self.state.script_name
        if name.isdecimal():
            number = int(name)
            if number <= len(positional):
                return positional[number - 1]
            return "" if self.state.has_arguments and self.state.is_called else None
        return self.unknowns.unknown(f"${name}", self.line)


def _closing_bracket(text: str, start: int) -> int:
    position, level = start, 0
    while position < len(text):
        if text[position] in "[]":
            level += 1 if text[position] == "[" else -1
            if not level:
                return position
            position += 1
        else:
            position = skip_quoted(text, position)
    raise InputError("a bracket is never closed")


def _replacement_parts(text: str) -> tuple[str, str]:
    """The pattern and the replacement of `${X/pattern/replacement}`."""
    position = 0
    while position < len(text):
        if text[position] == "/" and position:
            return text[:position], text[position + 1 :]
        position = skip_quoted(text, position)
    return text, ""


def _comma_parts(text: str) -> Iterator[str]:
    """Expressions between commas outside of brackets."""
    start = position = 0
    while position < len(text):
        if text[position] == "(":
            position = skip_bracketed(text, position)
            continue
        if text[position] == ",":
            yield text[start:position]
            start = position + 1
        position += 1
    yield text[start:]


def _sliced(value: Sequence[str], offset: int, length: int | None) -> Sequence[str]:
    if offset < 0:
        offset += len(value)
        if offset < 0:
            return ""
    rest = value[offset:]
    return rest if length is None else rest[:length] if length >= 0 else rest[: max(0, len(rest) + length)]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text)


def _brace_alternatives(text: str) -> list[str]:
    """The words that braces make of one: `{1..3}` and `{a,b}` outside of quotes."""
    opening = _brace_start(text)
    if opening is None:
        return [text]
    end = skip_bracketed(text, opening)
    before, inner, after = text[:opening], text[opening:end], text[end:]
    sequence = _SEQUENCE.fullmatch(inner)
    if sequence:
        segments = _number_sequence(int(sequence[1]), int(sequence[2]), abs(int(sequence[3] or 1)) or 1)
    else:
        segments = _top_level_parts(inner[1:-1])
        if len(segments) < 2:
            return [f"{before}{inner}{rest}" for rest in _brace_alternatives(after)]
    rests = _brace_alternatives(after)
    if len(segments) * len(rests) > 10_000:
        raise InputError("braces make more than 10,000 words")
    return [before + middle + rest for segment in segments for middle in _brace_alternatives(segment) for rest in rests]


def _brace_start(text: str) -> int | None:
    position = 0
    while position < len(text):
        if text[position] == "{":
            try:
                skip_bracketed(text, position)
            except InputError:
                return None
            return position
        position = skip_quoted(text, position)
    return None


def _number_sequence(first: int, last: int, step: int) -> list[str]:
    if abs(last - first) // step > 10_000:
        raise InputError("braces make more than 10,000 words")
    numbers = range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
    return [str(number) for number in numbers]


def _top_level_parts(text: str) -> list[str]:
    segments, start, position = [], 0, 0
    while position < len(text):
        if text[position] == "{":
            position = skip_bracketed(text, position)
            continue
        if text[position] == ",":
            segments.append(text[start:position])
            start = position + 1
        position = skip_quoted(text, position)
    return [*segments, text[start:]]
