"""Does the simulated step fit in memory, and what would make it fit?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.common.table import Column, Columns, ColumnType, Schema, Table
from clustersim.common.units import Bytes
from clustersim.memory.footprint import MemoryCategory
from clustersim.memory.host_memory import HostMemoryUse
from clustersim.memory.ledger import MemoryLedger
from clustersim.results.memory_check import (
    max_host_use,
    memory_capacities,
    memory_fit_probability,
    suggest_memory_fixes,
)
from clustersim.results.oom_suggestions import MemorySuggestion
from clustersim.scenario import Scenario

MEMORY_COLUMNS: Final[Schema] = {
    "pipeline_rank": Column(ColumnType.INTEGER, "pipeline rank"),
    "time": Column(ColumnType.NUMBER, "seconds from the start of the step from which on the sizes hold"),
    **{category.value: Column(ColumnType.NUMBER, f"bytes of {category.value}") for category in MemoryCategory},
    "total": Column(ColumnType.NUMBER, "bytes of all of them"),
}


@dataclass(frozen=True)
class StepMemory:
    """Memory use of a step. ledgers: memory timeline of each pipeline rank."""

    scenario: Scenario
    ledgers: tuple[MemoryLedger, ...]

    @cached_property
    def capacities(self) -> tuple[Bytes, ...]:
        """Memory in bytes of the smallest GPU of each pipeline rank."""
        return memory_capacities(self.scenario)

    @cached_property
    def host(self) -> HostMemoryUse | None:
        """Memory use of the most loaded node's host; None where nothing is offloaded."""
        return max_host_use(self.scenario)

    @cached_property
    def most_loaded_pipeline_rank(self) -> int:
        """The pipeline rank with the highest ratio of peak memory to capacity."""
        ratios = [ledger.peak / capacity for ledger, capacity in zip(self.ledgers, self.capacities, strict=True)]
        return int(np.argmax(ratios))

    @cached_property
    def timeline(self) -> Table:
        """Memory of one GPU of each pipeline rank over the first step: a row whenever it changes, bytes by category.

        Columns: `MEMORY_COLUMNS`. The largest `total` of a pipeline rank is its peak.
        """
        return Table.concatenate(MEMORY_COLUMNS, map(_ledger_columns, range(len(self.ledgers)), self.ledgers))

    @property
    def peak(self) -> Bytes:
        """Peak memory in bytes of the most loaded GPU."""
        return self.ledgers[self.most_loaded_pipeline_rank].peak

    @property
    def capacity(self) -> Bytes:
        """Memory in bytes of the most loaded GPU."""
        return self.capacities[self.most_loaded_pipeline_rank]

    @property
    def fits(self) -> bool:
        """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
        return self.peak <= self.capacity and (self.host is None or self.host.fits)

    @cached_property
    def fit_probability(self) -> float:
        """Probability that the step fits, by the errors of published predictions (`uncertainty.memory_error`)."""
        return memory_fit_probability(self.scenario, self.peak, self.capacity, self.host)

    @cached_property
    def suggestions(self) -> tuple[MemorySuggestion, ...]:
        """Changes that would make a scenario fit whose GPUs lack memory, or may; empty if they surely do not."""
        return suggest_memory_fixes(self.scenario, self.peak, self.capacity)


def _ledger_columns(pipeline_rank: int, ledger: MemoryLedger) -> Columns:
    """The rows of one pipeline rank, by time."""
    times, bytes_by_category = ledger.over_time()
    return {
        "pipeline_rank": np.full(len(times), pipeline_rank),
        "time": times,
        **{category.value: sizes for category, sizes in zip(MemoryCategory, bytes_by_category, strict=True)},
        "total": bytes_by_category.sum(axis=0),
    }
