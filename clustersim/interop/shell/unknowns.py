"""How does a string say which parts of it are not known?

A shell string has no NUL, so a part that is not known is a *hole*: its number between two NULs. A hole is an
unknown value (a variable that only the environment gives, the output of a command), or a choice between two
values, of which a condition that is not known decides. `assuming` fixes decisions for a while; a value that does
not depend on a decision is known without it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

HOLE: Final = re.compile("\0(\\d+)(\\*?)\0")
"""A hole; with a star it is split into words, as an expansion without quotes is."""
_MAX_DECISIONS: Final = 10
"""Decisions on which one value may depend; beyond that it is unknown."""

Outcome = tuple[str, ...] | None
"""Words that a hole stands for; None: a variable that is not set."""
Text = TypeVar("Text")


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A value that is not known. label: as the script writes it; names: variables that would decide it."""

    label: str
    names: tuple[str, ...]
    line: int = field(compare=False)
    is_unset: bool
    """Whether it is a variable, or positional parameter, that the script never sets."""
    slot: int = 0
    """The line, where a value is another one each time; 0: it is one value everywhere."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A condition that is not known; outcome 0 is that it holds.

    names: variables that would decide it; default: the outcome where the environment sets nothing, if the
    condition asks for that.
    """

    number: int
    condition: str
    line: int
    names: tuple[str, ...]
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Two values, of which a decision selects one."""

    decision: Decision
    outcomes: tuple[Outcome, Outcome]
    name: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """A condition's truth, where a decision holds and where it does not."""

    decision: Decision
    outcomes: "tuple[Truth, Truth]"


Truth = bool | Undecided


def negate(truth: Truth) -> Truth:
    """Not."""
    if isinstance(truth, bool):
        return not truth
    return Undecided(truth.decision, (negate(truth.outcomes[0]), negate(truth.outcomes[1])))


def conjunction(first: Truth, second: Callable[[], Truth]) -> Truth:
    """And; the second is evaluated only where the first may hold."""
    if isinstance(first, bool):
        return second() if first else False
    return Undecided(first.decision, (conjunction(first.outcomes[0], second), conjunction(first.outcomes[1], second)))


@dataclass
class Unknowns:
    """All holes and decisions of a script, and the decisions that are assumed at present."""

    holes: list[UnknownValue | Choice] = field(default_factory=list)
    assumed: dict[int, int] = field(default_factory=dict)
    _numbers: dict[UnknownValue | Choice, int] = field(default_factory=dict)
    _decisions: dict[str, Decision] = field(default_factory=dict)

    def unknown(self, label: str, line: int, names: Sequence[str] = (), *, is_unset: bool = False) -> str:
        """A hole for a value that is not known."""
        return self._hole(UnknownValue(label, tuple(names), line, is_unset, 0 if is_unset else line))

    def unset_parameter(self, number: int) -> str:
        """A hole for a positional parameter that the user does not give."""
        return self.unknown(f"${number}", 1, (str(number),), is_unset=True)

    def choice(self, decision: Decision, first: Outcome, second: Outcome, name: str = "") -> str:
        """A hole for either of two values; the value itself if both are one word and equal."""
        if first == second and first is not None and len(first) == 1:
            return first[0]
        return self._hole(Choice(decision, (first, second), name))

    def decision(self, condition: str, line: int, names: Sequence[str], default: int | None = None) -> Decision:
        """The decision of a condition; one for each text, as equal conditions on equal values agree."""
        key = unmarked(condition)
        if key not in self._decisions:
            shown = self.described(condition)
            self._decisions[key] = Decision(len(self._decisions), shown, line, tuple(names), default)
        return self._decisions[key]

    @property
    def decisions(self) -> list[Decision]:
        """All decisions, in the order of their numbers."""
        return list(self._decisions.values())

    def _hole(self, value: UnknownValue | Choice) -> str:
        number = self._numbers.setdefault(value, len(self.holes))
        if number == len(self.holes):
            self.holes.append(value)
        return f"\0{number}\0"

    @contextmanager
    def assuming(self, decisions: Mapping[int, int]) -> Iterator[None]:
        """The given outcomes of decisions are taken as known inside."""
        saved = self.assumed
        self.assumed = {**saved, **decisions}
        try:
            yield
        finally:
            self.assumed = saved

    def settle(self, text: str) -> str:
        """The text as one word, with choices of assumed decisions made."""
        if "\0" not in text:
            return text
        return "".join(segment if segment[0] != "\0" else self._settled_hole(segment) for segment in _segments(text))

    def _settled_hole(self, segment: str) -> str:
        outcome = self._outcome(segment)
        return segment if outcome is None else self.settle(" ".join(outcome))

    def mapped(self, function: Callable[[str], str], text: str) -> str:
        """The text with a function applied to the words between which its choices choose."""
        return HOLE.sub(lambda match: self._mapped_hole(function, match), text) if "\0" in text else text

    def _mapped_hole(self, function: Callable[[str], str], match: re.Match[str]) -> str:
        hole = self.holes[int(match[1])]
        if not isinstance(hole, Choice):
            return match[0]
        first, second = (
            None if outcome is None else tuple(self.mapped(function, function(word)) for word in outcome)
            for outcome in hole.outcomes
        )
        marked = self.choice(hole.decision, first, second, hole.name)
        return mark_split(marked) if match[2] else marked

    def as_text(self, text: str) -> str:
        """The text as one value: lists in it are joined, and nothing in it is split."""
        return HOLE.sub(lambda match: self._text_hole(int(match[1])), text) if "\0" in text else text

    def joined(self, shell_words: Sequence[str]) -> str:
        """The words with spaces between them, as one value; of each outcome, where their number depends on one."""
        decision = self.counting_decision(shell_words)
        if decision is None:
            return self.as_text(" ".join(shell_words))
        outcomes = []
        for outcome in (0, 1):
            with self.assuming({decision.number: outcome}):
                outcomes.append((self.joined(self.settle_words(shell_words)),))
        return self.choice(decision, outcomes[0], outcomes[1])

    def _text_hole(self, number: int) -> str:
        hole = self.holes[number]
        if not isinstance(hole, Choice):
            return f"\0{number}\0"
        joined = [None if shell_words is None else (self.joined(shell_words),) for shell_words in hole.outcomes]
        return self.choice(hole.decision, joined[0], joined[1], hole.name)

    def settle_words(self, shell_words: Iterable[str]) -> list[str]:
        """The words, with choices of assumed decisions made, which may be any number of words each."""
        settled: list[str] = []
        for word in shell_words:
            settled += self._settled_words(word) if "\0" in word else [word]
        return settled

    def _settled_words(self, word: str) -> list[str]:
        builder = WordBuilder()
        for segment in _segments(word):
            outcome = self._outcome(segment) if segment[0] == "\0" else None
            if outcome is None:
                builder.append(segment)
            elif segment[-2] == "*":
                builder.append_split(" ".join(self.settle_words(outcome)))
            else:
                builder.append_list(self.settle_words(outcome))
        return builder.shell_words()

    def _outcome(self, segment: str) -> Outcome:
        """The words of an assumed choice, with unset variables as unknowns; None: the hole stays."""
        hole = self.holes[int(segment.strip("\0*"))]
        if not isinstance(hole, Choice) or hole.decision.number not in self.assumed:
            return None
        outcome = hole.outcomes[self.assumed[hole.decision.number]]
        if outcome is None:
            return (self.unknown(f"${hole.name}", hole.decision.line, (hole.name,), is_unset=True),)
        return tuple(mark_split(word) for word in outcome) if segment[-2] == "*" else outcome

    def hole_at(self, text: str) -> UnknownValue | Choice | None:
        """The hole that a text consists of; None where it is anything else."""
        match = HOLE.fullmatch(text)
        return self.holes[int(match[1])] if match else None

    def unknowns(self, text: str) -> list[UnknownValue]:
        """All unknown values in a text, those of its choices included."""
        unknown_values: list[UnknownValue] = []
        for match in HOLE.finditer(text):
            hole = self.holes[int(match[1])]
            if isinstance(hole, UnknownValue):
                unknown_values.append(hole)
            else:
                shell_words = (word for outcome in hole.outcomes for word in outcome or ())
                unknown_values += (value for word in shell_words for value in self.unknowns(word))
        return list(dict.fromkeys(unknown_values))

    def open_decision(self, texts: Iterable[str]) -> Decision | None:
        """The first decision on which texts depend and that is not assumed."""
        for text in texts:
            for match in HOLE.finditer(text) if "\0" in text else ():
                hole = self.holes[int(match[1])]
                if isinstance(hole, Choice) and hole.decision.number not in self.assumed:
                    return hole.decision
        return None

    def counting_decision(self, shell_words: Iterable[str]) -> Decision | None:
        """The first open decision on which the number of words depends."""
        for word in shell_words:
            for match in HOLE.finditer(word) if "\0" in word else ():
                hole = self.holes[int(match[1])]
                if not isinstance(hole, Choice) or hole.decision.number in self.assumed:
                    continue
                is_one_word = not match[2] and all(outcome is None or len(outcome) == 1 for outcome in hole.outcomes)
                if not is_one_word:
                    return hole.decision
        return None

    def lift(self, function: Callable[..., str], *texts: str) -> str:
        """A function of known texts, applied to texts with holes: a choice of its values, or unknown."""
        settled = [self.settle(text) for text in texts]
        decision = self.open_decision(settled)
        if decision is None or len(self.assumed) > _MAX_DECISIONS:
            return self._derived(settled) if any("\0" in text for text in settled) else function(*settled)
        values = []
        for outcome in (0, 1):
            with self.assuming({decision.number: outcome}):
                values.append(self.lift(function, *settled))
        return self.choice(decision, (values[0],), (values[1],))

    def lift_truth(
        self,
        function: Callable[..., bool],
        texts: Sequence[str],
        condition: str,
        line: int,
        default: Callable[..., int | None] = lambda *_texts: None,
    ) -> Truth:
        """A condition on texts with holes. default: its outcome, of the texts, where the environment sets nothing."""
        settled = [self.settle(text) for text in texts]
        decision = self.open_decision(settled)
        if decision is not None and len(self.assumed) <= _MAX_DECISIONS:
            truths: list[Truth] = []
            for outcome in (0, 1):
                with self.assuming({decision.number: outcome}):
                    truths.append(self.lift_truth(function, settled, condition, line, default))
            return truths[0] if truths[0] == truths[1] else Undecided(decision, (truths[0], truths[1]))
        if not any("\0" in text for text in settled):
            return function(*settled)
        return self.undecided(condition.format(*settled), line, self.names(settled), default(*settled))

    def undecided(self, condition: str, line: int, names: Sequence[str], default: int | None = None) -> Truth:
        """The truth of a condition that is not known, or as assumed."""
        decision = self.decision(condition, line, names, default)
        if decision.number in self.assumed:
            return self.assumed[decision.number] == 0
        return Undecided(decision, (True, False))

    def names(self, texts: Iterable[str]) -> tuple[str, ...]:
        """The variables that would make texts known."""
        return tuple(dict.fromkeys(name for text in texts for value in self.unknowns(text) for name in value.names))

    def _derived(self, texts: Sequence[str]) -> str:
        """A hole for what is computed from unknown values."""
        values = list(dict.fromkeys(value for text in texts for value in self.unknowns(text)))
        if len(values) == 1 and not values[0].is_unset:
            return self._hole(values[0])
        label = " and ".join(value.label for value in values) or "a value of many conditions"
        return self.unknown(label, values[0].line if values else 0, self.names(texts))

    def described(self, text: str) -> str:
        """The text with its holes as the script writes them."""

        def label(match: re.Match[str]) -> str:
            hole = self.holes[int(match[1])]
            return hole.label if isinstance(hole, UnknownValue) else f"${hole.name}" if hole.name else "..."

        return HOLE.sub(label, text)


def mark_split(text: str) -> str:
    """The text as an expansion without quotes: its holes are split into words when they are known."""
    return HOLE.sub(lambda match: f"\0{match[1]}*\0", text) if "\0" in text else text


def unmarked(text: str) -> str:
    """The text with holes that are not split, as where it is quoted."""
    return text.replace("*\0", "\0") if "\0" in text else text


def _segments(text: str) -> Iterator[str]:
    """Holes, and the texts between them."""
    start = 0
    for match in HOLE.finditer(text):
        if match.start() > start:
            yield text[start : match.start()]
        yield match[0]
        start = match.end()
    if start < len(text):
        yield text[start:]


class WordBuilder:
    """Joins literal text and expansions into words, as a shell does."""

    def __init__(self) -> None:
        self._shell_words: list[str] = []
        self._current: str | None = None

    def append(self, text: str) -> None:
        """Text that is not split; an empty one makes a word, too."""
        self._current = (self._current or "") + text

    def append_list(self, shell_words: Sequence[str]) -> None:
        """Words of a quoted list: the first joins what is before, the last what comes after."""
        for index, word in enumerate(shell_words):
            if index:
                self.end()
            self.append(word)

    def append_split(self, text: str) -> None:
        """Text that is split at white space."""
        shell_words = text.split()
        if text[:1].isspace():
            self.end()
        for index, word in enumerate(shell_words):
            if index:
                self.end()
            self.append(word)
        if shell_words and text[-1:].isspace():
            self.end()

    def end(self) -> None:
        """End the word that was begun."""
        if self._current is not None:
            self._shell_words.append(self._current)
        self._current = None

    def shell_words(self) -> list[str]:
        """All words."""
        self.end()
        return self._shell_words
