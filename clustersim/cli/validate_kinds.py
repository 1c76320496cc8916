"""Which kinds of measurement can be validated? Each is read and predicted by its own part of `validation`."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clustersim.cli.waiting import counting, waiting_for
from clustersim.validation.cases import Case
from clustersim.validation.comparison import Comparison
from clustersim.validation.summary import Summary, summary_of_steps

KINDS: Final = ("steps", "memory", "collectives", "kernels")
SHOW: Final = "show"
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
    """One kind: where its shipped cases are, how a table is read, how its cases are predicted and summed up."""

    name: str
    shipped: Path
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

            return Kind(name, module.SHIPPED, module.read_collectives, _summed(name, module.compare_collectives))
        case _:
            from clustersim.validation import kernels

            return Kind(name, kernels.SHIPPED, kernels.read_kernels, _summed(name, kernels.compare_kernels))


def _steps(choice: Choice) -> Kind:
    from clustersim.validation import steps

    def summarize(cases: Sequence[Case]) -> Summary:
        with counting("predicting steps", len(cases)) as progress:
            found = steps.compare_steps(cases, choice.changes, workers=choice.workers, progress=progress)
            return summary_of_steps(cases, found)

    return Kind("steps", steps.SHIPPED, steps.read_steps, summarize)


def _memory() -> Kind:
    from clustersim.validation import memory

    def summarize(cases: Sequence[Case]) -> Summary:
        with waiting_for("predicting memory"):
            return Summary("memory", tuple(memory.compare_memory(cases)), fits=tuple(memory.fits_right(cases)))

    return Kind("memory", memory.SHIPPED, memory.read_memory, summarize)


def _summed(
    name: str, compare: Callable[[Sequence[Case]], Sequence[Comparison]]
) -> Callable[[Sequence[Case]], Summary]:
    def summarize(cases: Sequence[Case]) -> Summary:
        with waiting_for(f"predicting {name}"):
            return Summary(name, tuple(compare(cases)))

    return summarize


def near_ids(word: str, cases: Sequence[Case]) -> str:
    """End a sentence about an unknown case id: those that contain it or are nearest, not all of a thousand."""
    ids = list(dict.fromkeys(case.text("case_id") for case in cases))
    folded = {name.casefold(): name for name in ids}
    inside = [name for spelling, name in folded.items() if word.casefold() in spelling]
    near = [folded[each] for each in difflib.get_close_matches(word.casefold(), folded, n=3, cutoff=0.5)]
    close = (inside or near)[:_MOST_IDS]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {len(ids):,}, such as {ids[0]}; clustersim validate --json - lists the shipped ones"
