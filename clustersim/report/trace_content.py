"""What is handed to a writer of traces? Ranks, their slices and their counters, as they are worked out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clustersim.report.slices import Slice, slices
from clustersim.report.trace_counters import Counter, counters
from clustersim.report.trace_ranks import TraceRank

if TYPE_CHECKING:
    from clustersim.answer import Answer


@dataclass(frozen=True, slots=True)
class Content:
    """title: what was simulated; ranks: by replica and stage; pieces: rank by rank, read once."""

    title: str
    ranks: tuple[TraceRank, ...]
    pieces: Iterable[Slice]
    counters: Iterable[tuple[TraceRank, Sequence[Counter]]] = ()


def content_of(result: "Answer", ranks: tuple[TraceRank, ...]) -> Content:
    """All that is to be written of some ranks."""
    return Content(result.scenario.name, ranks, slices(result, ranks), counters(result, ranks))
