"""What does an answer cost against the number of GPUs? Tables of wall time and memory, folded and with every rank.

A folded run is the best of three in one process; every rank is run once. Memory is the whole process. A run that takes
longer than `alone.LIMIT`, or more memory than `alone.MEMORY`, is given up, and so is every larger one of its column.

The last table has the step on which ASTRA-sim 2 (analytical network, commit 518bd513) was measured for comparison: a
model like GPT-3 6.7B, tensor-parallel 8, pipeline-parallel 4, 8 microbatches, 1F1B, one gradient all-reduce a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.cases import Mapping, scaled, seven_billion, unfolded
from tests.benchmarks.isolated_process import Measured, OutOfReachError, measured

SIZES = (64, 512, 4_096, 16_384, 131_072)
ASTRA_SIM = {32: "0.45", 64: "0.82", 256: "4.7", 1024: "31", 4096: "177", 8192: "554", 16384: "out of memory"}
"""CPU seconds of ASTRA-sim by ranks, on a machine of the same kind (two cores, 16.6 GB free)."""

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by column."""

    title: str
    rows: list[dict[str, Cell]]

    def __str__(self) -> str:
        heads = list(self.rows[0])
        lines = [heads, ["---:"] * len(heads), *([_text(row[head]) for head in heads] for row in self.rows)]
        return "\n".join([f"\n{self.title}\n", *("| " + " | ".join(line) + " |" for line in lines)])


def tables() -> list[Table]:
    """All of them."""
    large = _table("Llama 3 405B, as the example, scaled in dp", SIZES, scaled)
    small = _table("The step on which ASTRA-sim was measured", tuple(ASTRA_SIM), seven_billion)
    for row, seconds in zip(small.rows, ASTRA_SIM.values(), strict=True):
        row["ASTRA-sim, CPU s"] = seconds
    return [large, small]


class Column:
    """One way to run all sizes; gives up after the first size that is out of reach."""

    def __init__(self, name: str, mapping: Callable[[int], Mapping], times: int) -> None:
        self._name, self._mapping, self._times, self._given_up = name, mapping, times, False

    def at(self, gpus: int) -> dict[str, Cell]:
        """Ranks simulated, seconds and megabytes."""
        if self._given_up:
            return self._cells("not run")
        try:
            run = measured(self._mapping(gpus), times=self._times)
        except OutOfReachError as reason:
            self._given_up = True
            return self._cells(str(reason))
        return self._cells(run)

    def _cells(self, run: Measured | str) -> dict[str, Cell]:
        ranks, seconds, memory = (
            (run, None, None) if isinstance(run, str) else (run.simulated, run.seconds, run.peak_bytes / 1e6)
        )
        return {f"{self._name}: ranks run": ranks, f"{self._name}: s": seconds, f"{self._name}: MB": memory}


def _table(title: str, sizes: tuple[int, ...], mapping: Callable[[int], Mapping]) -> Table:
    columns = (Column("folded", mapping, 3), Column("every rank", lambda gpus: unfolded(mapping(gpus)), 1))
    return Table(title, [{"GPUs": gpus} | columns[0].at(gpus) | columns[1].at(gpus) for gpus in sizes])


def _text(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.3g}" if cell < 100 else f"{cell:,.0f}"
    return cell
