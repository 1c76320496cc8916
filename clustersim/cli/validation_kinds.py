"""Which kinds of measurement can be validated? Each is read and predicted by its own part of `validation_page`."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clustersim.cli.progress import counting, waiting_for
from clustersim.common.errors import InputError
from clustersim.validation.cases import Case, columns_of, lacks
from clustersim.validation.comparison import Comparison
from clustersim.validation.summary import Summary, summary_of_steps

KINDS: Final = ("steps", "memory", "collectives", "kernels", "reliability")
SHOW: Final = "show"
MOST_BEFORE_ID: Final = 2  # words between `show` and the id of a case: its kind and its file
_MOST_IDS: Final = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """Which cases, and how. only: a part of their ids; workers: processes, None for one per core.

    changes: keys that are changed in the scenarios of steps, as `key=value`.
    """

    only: str = ""
    workers: int | None = None
    changes: tuple[str, ...] = ()

    def of(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that are chosen."""
        return [case for case in cases if self.only in case.text("case_id")]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: where its shipped cases are, how a table is read, how its cases are predicted and summed up.

    needed: the columns that a table of it has.
    """

    name: str
    shipped: Path
    needed: Sequence[str]
    read: Callable[[Path], list[Case]]
    summarize: Callable[[Sequence[Case]], Summary]


def load_kind(name: str, choice: Choice) -> Kind:
    """One of KINDS, imported when it is asked for."""
    match name:
        case "steps":
            return _steps(choice)
        case "memory":
            return _memory()
        case "collectives":
            from clustersim.validation import collectives as module

            return Kind(
                name, module.SHIPPED, module.NEEDED, module.read_collectives, _summed(name, module.compare_collectives)
            )
        case "reliability":
            from clustersim.validation import reliability

            return Kind(
                name,
                reliability.SHIPPED,
                reliability.NEEDED,
                reliability.read_reliability,
                _summed(name, reliability.compare_reliability, reliability.rate_notes),
            )
        case _:
            from clustersim.validation import kernels

            return Kind(
                name, kernels.SHIPPED, kernels.NEEDED, kernels.read_kernels, _summed(name, kernels.compare_kernels)
            )


def _steps(choice: Choice) -> Kind:
    from clustersim.validation import steps

    def summarize(cases: Sequence[Case]) -> Summary:
        with counting("predicting steps", len(cases)) as progress:
            found = steps.compare_steps(cases, choice.changes, workers=choice.workers, progress=progress)
            return summary_of_steps(cases, found)

    return Kind("steps", steps.SHIPPED, steps.NEEDED, steps.read_steps, summarize)


def _memory() -> Kind:
    from clustersim.validation import memory

    def summarize(cases: Sequence[Case]) -> Summary:
        with waiting_for("predicting memory"):
            return Summary("memory", tuple(memory.compare_memory(cases)), fits=tuple(memory.fits_right(cases)))

    return Kind("memory", memory.SHIPPED, memory.NEEDED, memory.read_memory, summarize)


def _summed(
    name: str,
    compare: Callable[[Sequence[Case]], Sequence[Comparison]],
    notes: Callable[[], Sequence[str]] = tuple,
) -> Callable[[Sequence[Case]], Summary]:
    def summarize(cases: Sequence[Case]) -> Summary:
        with waiting_for(f"predicting {name}"):
            return Summary(name, tuple(compare(cases)), notes=tuple(notes()))

    return summarize


def is_table(word: str) -> bool:
    """Whether a word is the name of a table."""
    return Path(word).suffix.casefold() == ".csv"


def kind_of(path: Path, choice: Choice) -> Kind:
    """The kind of a table, by its columns; raise InputError where it is of none, or could be of several."""
    columns, kinds = columns_of(path), [load_kind(name, choice) for name in KINDS]
    found = [kind for kind in kinds if not lacks(columns, kind.needed)]
    if len(found) > 1:
        names = " or ".join(kind.name for kind in found)
        raise InputError(
            f"{path}: could be of {names}; say which, as in clustersim validate show {found[0].name} {path} CASE_ID"
        )
    nearest_kind = min(kinds, key=lambda kind: len(lacks(columns, kind.needed)))
    if not found:
        lacking = ", ".join(lacks(columns, nearest_kind.needed))
        raise InputError(f"{path}: is no table of {', '.join(KINDS)}: for {nearest_kind.name} it lacks {lacking}")
    return found[0]


def near_ids(word: str, cases: Sequence[Case], listed: str = "clustersim validate --json -") -> str:
    """End a sentence about an unknown case id: those that contain it or are nearest, not all of a thousand.

    listed: the command that lists them.
    """
    ids = list(dict.fromkeys(case.text("case_id") for case in cases))
    folded = {name.casefold(): name for name in ids}
    inside = [name for spelling, name in folded.items() if word.casefold() in spelling]
    near = [
        folded[get_close_match]
        for get_close_match in difflib.get_close_matches(word.casefold(), folded, n=3, cutoff=0.5)
    ]
    close = (inside or near)[:_MOST_IDS]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {len(ids):,}, such as {ids[0]}; {listed} lists them"
