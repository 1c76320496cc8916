"""Of which ranks are traces exported, and how is each labelled?

A trace of every rank of a large cluster is unreadable. If more than `MAX_RANKS` ranks were simulated, those
that the page shows are exported: one of each pipeline rank, and stragglers; or the user selects them
(`--ranks`). A rank that was not simulated is exported from its representative, whose times are provably
equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.errors import InputError
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.report.labels import stage_name
from clustersim.report.placement_labels import describe_gpu_of_rank
from clustersim.report.row_selection import select_ranks
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stragglers import slowest_ranks

MAX_RANKS: Final = 64


@dataclass(frozen=True, slots=True)
class TraceRank:
    """An exported rank.

    representative: the simulated rank whose spans are its own; coordinates: by name of the mesh axis; name:
    label within its stage.
    """

    rank: int
    representative: int
    stage: str
    coordinates: Mapping[str, int]
    name: str

    @property
    def replica_index(self) -> int:
        """Index among the model's data-parallel replicas."""
        return self.coordinates[DATA.name]


def default_ranks(result: SimulationResult) -> list[int]:
    """All simulated ranks if there are at most `MAX_RANKS`, else those that the page shows."""
    ranks: list[int] = result.trace.simulated_ranks.tolist()
    return ranks if len(ranks) <= MAX_RANKS else select_ranks(result)


def validate_rank_selection(layout: Layout, selection: str) -> None:
    """Raise InputError, which lists the legal terms, for a selection that cannot be resolved; an empty one is legal."""
    for term in selection.split(",") if selection else ():
        _resolve_term(layout, term.strip(), selection)


def select_ranks_by_terms(result: SimulationResult, selection: str) -> list[int]:
    """Ranks of a selection such as `0:8,stage:3,slowest:4`, ascending; `default_ranks` if it is empty.

    Raises InputError as `validate_rank_selection` does.
    """
    if not selection:
        return default_ranks(result)
    resolved = [_resolve_term(result.scenario.layout, term.strip(), selection) for term in selection.split(",")]
    max_slowest = max(count for _, count in resolved)
    slowest = slowest_ranks(result.breakdown, result.program.program_index, result.stragglers, max_slowest)
    return sorted(set(slowest).union(*(ranks for ranks, _ in resolved)))


def count_spans(result: SimulationResult, ranks: Sequence[int] | None = None) -> int:
    """Number of spans in traces of some ranks: tasks, and the operations inside passes."""
    spans_by_program = [len(program.tasks) + program.operation_offsets[-1] for program in result.program.programs]
    selected = default_ranks(result) if ranks is None else ranks
    return int(np.array(spans_by_program)[result.program.program_index[list(selected)]].sum())


def describe_trace_ranks(result: SimulationResult, ranks: Sequence[int]) -> tuple[TraceRank, ...]:
    """Descriptions of the exported ranks, sorted by replica, stage and rank.

    Their names give the coordinates within a stage, the machine's GPU if its id differs from the rank, and how
    many ranks of its class it represents if it is the only one exported.
    """
    layout, representatives, straggler_ranks = (
        result.scenario.layout,
        result.trace.representative,
        result.stragglers.listed_ranks,
    )
    coordinates = {axis.name: layout.rank_coordinates(axis) for axis in layout.axes}
    represented_counts, exported_counts = (
        result.trace.represented_counts,
        np.bincount(representatives[list(ranks)], minlength=result.rank_count),
    )
    axes = [axis.name for axis in layout.axes if axis.within_layer and layout.all_degrees[axis.name] > 1]
    trace_ranks = []
    for rank in ranks:
        representative, rank_coordinates = (
            int(representatives[rank]),
            {axis: int(coordinate[rank]) for axis, coordinate in coordinates.items()},
        )
        details = [f"{axis} {rank_coordinates[axis]}" for axis in axes] + [
            describe_gpu_of_rank(result.scenario.cluster, rank)
        ]
        details += (
            [f"for {represented_counts[representative]:,} ranks"]
            if exported_counts[representative] == 1 < represented_counts[representative]
            else []
        )
        detail_text = ", ".join(detail for detail in details if detail)
        name = f"{'slow ' if rank in straggler_ranks else ''}rank {rank}" + (f" ({detail_text})" if detail_text else "")
        stage = stage_name(result.scenario, rank_coordinates[PIPELINE.name])
        trace_ranks.append(TraceRank(rank, representative, stage, rank_coordinates, name))
    return tuple(
        sorted(
            trace_ranks,
            key=lambda trace_rank: (trace_rank.replica_index, trace_rank.coordinates[PIPELINE.name], trace_rank.rank),
        )
    )


def _resolve_term(layout: Layout, term: str, selection: str) -> tuple[Sequence[int], int]:
    """Ranks that a term selects, and how many of the slowest."""
    keyword, colon, index_text = term.partition(":")
    ranks: Sequence[int] = ()
    slowest = 0
    match keyword, bool(colon), index_text.isdecimal():
        case "all", False, _:
            ranks = range(layout.world_size)
        case "stage", _, True:
            ranks = np.flatnonzero(layout.rank_coordinates(PIPELINE) == int(index_text)).tolist()
        case "slowest", _, True:
            slowest = int(index_text) if int(index_text) <= layout.world_size else 0
        case _, False, _ if keyword.isdecimal():
            ranks = range(int(keyword), min(int(keyword) + 1, layout.world_size))
        case _, _, True if keyword.isdecimal() and int(index_text) <= layout.world_size:
            ranks = range(int(keyword), int(index_text))
    if not ranks and not slowest:
        last_rank, example_end = layout.world_size - 1, min(8, layout.world_size)
        raise InputError(
            f"--ranks {selection}: {term or 'an empty word'} does not name ranks from 0 to {last_rank:,}; write one "
            "or several "
            f"of {last_rank} (one rank), 0:{example_end} (0 to {example_end - 1}), stage:{layout.pp - 1} (all ranks "
            "of a pipeline rank, 0 "
            f"to {layout.pp - 1}), slowest:{min(4, layout.world_size)} (at most {layout.world_size:,}), all; "
            "separated by commas"
        )
    return ranks, slowest
