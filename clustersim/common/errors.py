"""Exceptions that clustersim raises, and helpers for their messages.

    ClusterSimError
    ├── InputError        the user's file, option or value is wrong (exit status 2)
    │   └── CombinedInputError    several things of one file are
    ├── MemoryFitError    the job does not fit in memory, so it has no such result (exit status 3)
    └── OutputError       a result cannot be written to the given path (exit status 2)

`format_value` formats a rejected value; `suggest_nearest` says what would be legal.
"""

import difflib
import math
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Self

_MAX_PRINTED_BITS: Final = 128  # of a whole number, beyond which it is described
_MAX_SUGGESTED: Final = 4  # names after "did you mean"
_MAX_LISTED: Final = 12  # names of a full list, where a command lists them too
MAX_PROBLEMS: Final = 20
"""Problems of one kind in a file that are described one by one."""


class ClusterSimError(Exception):
    """Base of every error that clustersim raises on purpose; its text is meant for a user."""


class InputError(ClusterSimError):
    """A scenario, topology, model or option that is invalid."""


class CombinedInputError(InputError):
    """Several problems of one file. source: the file, empty where the caller names it; problems: one sentence each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        heading = f"{source}: {len(problems)} problems" if source else f"{len(problems)} problems"
        super().__init__("\n  - ".join((heading, *problems)))
        self.source, self.problems = source, tuple(problems)

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[str, ...]]]:
        """Errors of worker processes are pickled."""
        return type(self), (self.source, self.problems)


class MemoryFitError(ClusterSimError):
    """A result that a job does not have, because it does not fit in memory."""


class OutputError(ClusterSimError):
    """A result that cannot be written."""


class _YamlRepr(reprlib.Repr):
    """Formats values as in a YAML file; long, deep and self-referencing ones are truncated."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 60

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - named after the type
        return "nothing"

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"


def combined_error(source: str, problems: Sequence[str]) -> InputError:
    """One InputError for all problems of one file: a sentence, or a count and one line per problem."""
    if len(problems) == 1:
        return InputError(f"{source}: {problems[0]}" if source else problems[0])
    return CombinedInputError(source, problems)


def problems_of(error: InputError) -> tuple[str, ...]:
    """The problems that an error reports, each with its file."""
    if not isinstance(error, CombinedInputError):
        return (str(error),)
    return tuple(f"{error.source}: {problem}" if error.source else problem for problem in error.problems)


def format_value(value: object) -> str:
    """Format a value as in a YAML file, truncated to a readable length.

    >>> format_value(None), format_value(True), format_value("16k"), format_value(1000000), format_value([1, None])
    ('nothing', 'true', "'16k'", '1,000,000', '[1, nothing]')
    """
    if isinstance(value, int) and value.bit_length() > _MAX_PRINTED_BITS:
        return f"a number of {int(value.bit_length() * math.log10(2.0)) + 1:,} digits"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _YamlRepr().repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def suggest_nearest(word: str, choices: Iterable[str], *, unlisted: Iterable[str] = (), listed_by: str = "") -> str:
    """Complete an error message about an unknown `word` with its nearest match, or with all choices.

    Case does not matter, and a prefix counts as a match. Choices may be dotted keys: their last component is
    matched, first among those with the same parent as the word. unlisted: names that are matched too, but never
    listed; listed_by: the command that lists all choices, which replaces a list of more than a line.

    >>> suggest_nearest("lama3-8b", ["llama3-8b", "gpt3-175b"])
    'did you mean llama3-8b?'
    >>> suggest_nearest("fabric.spine.oversub", ["fabric.spine.ports", "fabric.spine.oversubscription"])
    'did you mean fabric.spine.oversubscription?'
    >>> suggest_nearest("zzz", ["a", "b"])
    'choose one of a, b'
    """
    names = sorted(set(choices))
    close = _closest_names(word, names) or _closest_names(word, sorted(set(unlisted)))
    if close:
        more = f" (or {len(close) - _MAX_SUGGESTED} more)" if len(close) > _MAX_SUGGESTED else ""
        return f"did you mean {' or '.join(close[:_MAX_SUGGESTED])}{more}?"
    if listed_by and len(names) > _MAX_LISTED:
        nearest = difflib.get_close_matches(word.casefold(), names, n=3, cutoff=0.0)
        return f"the nearest are {', '.join(nearest)}; {listed_by} lists all"
    return f"choose one of {', '.join(names)}"


def _closest_names(word: str, names: list[str]) -> list[str]:
    """Names that a word most likely means.

    Compared are the last components of siblings of a dotted key, then all names, then all last components; where these
    are equal to the word, before all names.
    """
    parent, _, last = word.rpartition(".")
    last_components = {name: name.rpartition(".")[2] for name in names}
    same_section = {name: last_components[name] for name in names if name.rpartition(".")[0] == parent}
    return (
        _match_spelling(last, same_section)
        or _names_spelled(last_components, {word})
        or _match_spelling(word, {name: name for name in names})
        or _match_spelling(last, last_components)
    )


def _match_spelling(word: str, spellings: dict[str, str]) -> list[str]:
    """Names whose spelling equals the word, else starts with it, else is similar to it."""
    folded = {name: spelling.casefold() for name, spelling in spellings.items()}
    folded_word = word.casefold()
    exact = _names_spelled(folded, {folded_word})
    prefixed = [name for name, spelling in folded.items() if len(folded_word) > 1 and spelling.startswith(folded_word)]
    near = difflib.get_close_matches(folded_word, sorted(set(folded.values())), n=1, cutoff=0.6)
    return exact or prefixed or _names_spelled(folded, near)


def _names_spelled(folded: dict[str, str], spellings: Collection[str]) -> list[str]:
    return [name for name, spelling in folded.items() if spelling in spellings]
