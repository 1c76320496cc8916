"""How does the cost of a simulation scale with the number of GPUs?

Wall time and memory, folded and with every rank.

A folded run is the best of three in one process; every rank is run once. Memory is that of the process. A
run that exceeds `isolated_process.TIME_LIMIT` or `isolated_process.MEMORY_LIMIT` is aborted, and larger ones
of its column are skipped. The last table has the step on which ASTRA-sim 2 (analytical network, commit
518bd513) was measured for comparison: a model like GPT-3 6.7B, tensor-parallel 8, pipeline-parallel 4, 8
microbatches, 1F1B, one gradient all-reduce a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.cases import Mapping, gpt3_7b, scaled_example, unfolded
from tests.benchmarks.isolated_process import ResourceLimitError, RunMeasurement, measure_in_process

GPU_COUNTS = (64, 512, 4_096, 16_384, 131_072)
ASTRA_SIM_SECONDS = {32: "0.45", 64: "0.82", 256: "4.7", 1024: "31", 4096: "177", 8192: "554", 16384: "out of memory"}
"""CPU seconds of ASTRA-sim by number of ranks, on a machine of the same kind (two cores, 16.6 GB free)."""

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """A table of measurements: one mapping of column to cell per row."""

    title: str
    rows: list[dict[str, Cell]]

    def __str__(self) -> str:
        headers = list(self.rows[0])
        lines = [
            headers,
            ["---:"] * len(headers),
            *([_format_cell(row[header]) for header in headers] for row in self.rows),
        ]
        return "\n".join([f"\n{self.title}\n", *("| " + " | ".join(line) + " |" for line in lines)])


def scale_tables() -> list[ScaleTable]:
    """All scaling tables."""
    large = _scale_table("Llama 3 405B, as the example, scaled in dp", GPU_COUNTS, scaled_example)
    small = _scale_table("The step on which ASTRA-sim was measured", tuple(ASTRA_SIM_SECONDS), gpt3_7b)
    for row, seconds in zip(small.rows, ASTRA_SIM_SECONDS.values(), strict=True):
        row["ASTRA-sim, CPU s"] = seconds
    return [large, small]


class ScaleColumn:
    """One simulation mode, run at all sizes; stops after the first size that exceeds a limit."""

    def __init__(self, name: str, mapping: Callable[[int], Mapping], times: int) -> None:
        self._name, self._mapping, self._times, self._is_stopped = name, mapping, times, False

    def run_at(self, gpus: int) -> dict[str, Cell]:
        """Cells of one size: ranks simulated, seconds and megabytes."""
        if self._is_stopped:
            return self._format_cells("not run")
        try:
            run = measure_in_process(self._mapping(gpus), times=self._times)
        except ResourceLimitError as reason:
            self._is_stopped = True
            return self._format_cells(str(reason))
        return self._format_cells(run)

    def _format_cells(self, run: RunMeasurement | str) -> dict[str, Cell]:
        ranks, seconds, memory = (
            (run, None, None) if isinstance(run, str) else (run.simulated_ranks, run.seconds, run.peak_bytes / 1e6)
        )
        return {f"{self._name}: ranks run": ranks, f"{self._name}: s": seconds, f"{self._name}: MB": memory}


def _scale_table(title: str, sizes: tuple[int, ...], mapping: Callable[[int], Mapping]) -> ScaleTable:
    columns = (ScaleColumn("folded", mapping, 3), ScaleColumn("every rank", lambda gpus: unfolded(mapping(gpus)), 1))
    return ScaleTable(title, [{"GPUs": gpus} | columns[0].run_at(gpus) | columns[1].run_at(gpus) for gpus in sizes])


def _format_cell(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.3g}" if cell < 100 else f"{cell:,.0f}"
    return cell
