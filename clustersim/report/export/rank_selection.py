"""Of which ranks are traces written, and what is each called?

Nobody reads a trace of every rank of a large cluster. Of more than `MOST_RANKS` simulated ranks those are written that
the page shows: one of each pipeline rank, and stragglers. Or a user says which (`--ranks`). A rank that was not
simulated is written from the rank that stands for it, whose times are provably its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.report.labels import stage_name
from clustersim.report.placement_labels import home_of
from clustersim.report.row_selection import shown_ranks
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stragglers import slowest_ranks

MOST_RANKS: Final = 64


@dataclass(frozen=True, slots=True)
class TraceRank:
    """A rank that is written.

    simulated: the rank whose spans are its own; coordinates: on every axis, by its name; name: what it is called within
    its stage.
    """

    rank: int
    simulated: int
    stage: str
    coordinates: Mapping[str, int]
    name: str

    @property
    def replica(self) -> int:
        """Its place among the replicas of the model."""
        return self.coordinates[DATA.name]


def default_ranks(result: SimulationResult) -> list[int]:
    """The simulated ranks if they are few, else those that the page shows."""
    ranks: list[int] = result.trace.simulated_ranks.tolist()
    return ranks if len(ranks) <= MOST_RANKS else shown_ranks(result)


def require_ranks(layout: Layout, choice: str) -> None:
    """Raise InputError, which says what is legal, for a choice that `ranks_of` cannot follow; an empty one is legal."""
    for word in choice.split(",") if choice else ():
        _named(layout, word.strip(), choice)


def ranks_of(result: SimulationResult, choice: str) -> list[int]:
    """The ranks that a choice such as `0:8,stage:3,slowest:4` names, ascending; of an empty one `default_ranks`.

    Raises InputError as `require_ranks` does.
    """
    if not choice:
        return default_ranks(result)
    named = [_named(result.scenario.layout, word.strip(), choice) for word in choice.split(",")]
    most = max(count for _, count in named)
    slowest = slowest_ranks(result.breakdown, result.program.program_index, result.stragglers, most)
    return sorted(set(slowest).union(*(ranks for ranks, _ in named)))


def trace_ranks(result: SimulationResult, ranks: Sequence[int]) -> tuple[TraceRank, ...]:
    """What is to be known of the ranks that are written, by replica, stage and rank.

    Their names say where they are in a stage, which of the machine's GPUs they have where that is not their own number,
    and for how many ranks of its class one is written alone.
    """
    layout, stands, slow = result.scenario.layout, result.trace.representative, result.stragglers.named
    places = {axis.name: layout.rank_coordinates(axis) for axis in layout.axes}
    members, written = result.trace.represented_counts, np.bincount(stands[list(ranks)], minlength=result.rank_count)
    axes = [axis.name for axis in layout.axes if axis.within_layer and layout.all_degrees[axis.name] > 1]
    found = []
    for rank in ranks:
        simulated, place = int(stands[rank]), {axis: int(array[rank]) for axis, array in places.items()}
        within = [f"{axis} {place[axis]}" for axis in axes] + [home_of(result.scenario.cluster, rank)]
        within += [f"for {members[simulated]:,} ranks"] if written[simulated] == 1 < members[simulated] else []
        words = ", ".join(item for item in within if item)
        name = f"{'slow ' if rank in slow else ''}rank {rank}" + (f" ({words})" if words else "")
        stage = stage_name(result.scenario, place[PIPELINE.name])
        found.append(TraceRank(rank, simulated, stage, place, name))
    return tuple(sorted(found, key=lambda each: (each.replica, each.coordinates[PIPELINE.name], each.rank)))


def _named(layout: Layout, word: str, choice: str) -> tuple[Sequence[int], int]:
    """The ranks that a word names, and how many of the slowest."""
    kind, colon, number = word.partition(":")
    ranks: Sequence[int] = ()
    slowest = 0
    match kind, bool(colon), number.isdecimal():
        case "all", False, _:
            ranks = range(layout.world_size)
        case "stage", _, True:
            ranks = np.flatnonzero(layout.mesh.rank_coordinates(PIPELINE) == int(number)).tolist()
        case "slowest", _, True:
            slowest = int(number) if int(number) <= layout.world_size else 0
        case _, False, _ if kind.isdecimal():
            ranks = range(int(kind), min(int(kind) + 1, layout.world_size))
        case _, _, True if kind.isdecimal() and int(number) <= layout.world_size:
            ranks = range(int(kind), int(number))
    if not ranks and not slowest:
        last, few = layout.world_size - 1, min(8, layout.world_size)
        raise InputError(
            f"--ranks {choice}: {word or 'an empty word'} does not name ranks from 0 to {last:,}; write one or several "
            f"of {last} (one rank), 0:{few} (0 to {few - 1}), stage:{layout.pp - 1} (all ranks of a pipeline rank, 0 "
            f"to {layout.pp - 1}), slowest:{min(4, layout.world_size)} (at most {layout.world_size:,}), all; separated by commas"
        )
    return ranks, slowest
