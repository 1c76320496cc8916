"""How fast is the engine at full scale?

`python -m tests.benchmarks.engine [--json FILE|-] [--only NAME ...] [--scale]`: times of `simulate()`, best
of three. Folded runs share one process; every run of jitter, DualPipe and FSDP has its own process, so that
its memory is measured separately. `--scale` adds tables of time and memory against the number of GPUs.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from tests.benchmarks import cases
from tests.benchmarks.isolated_process import ResourceLimitError, RunMeasurement, measure_best, measure_in_process
from tests.benchmarks.scale import scale_tables
from tests.benchmarks.timing import build_parser, write_figures

FigureMapping = dict[str, float]


def _measure_warm(mapping: cases.Mapping) -> RunMeasurement:
    return measure_in_process(mapping, times=3)


def _measure_with_events(mapping: cases.Mapping) -> RunMeasurement:
    return measure_in_process(mapping, times=3, events=True)


CASES: dict[str, tuple[Callable[[], cases.Mapping], Callable[[cases.Mapping], RunMeasurement]]] = {
    "folded_16k": (cases.folded_16k, _measure_with_events),
    "folded_131k": (cases.folded_131k, _measure_warm),
    "folded_1m": (cases.folded_1m, measure_best),
    "slow_rank_16k": (cases.slow_rank_16k, _measure_warm),
    "jitter_16k": (cases.jitter_16k, measure_best),
    "slow_rank_175b": (cases.slow_rank_175b, _measure_warm),
    "moe_2k": (cases.moe_2k, _measure_warm),
    "moe_expert_load_1k": (cases.moe_expert_load_1k, measure_best),
    "dualpipe_2k": (cases.dualpipe_2k, measure_best),
    "fsdp_1k_contended": (cases.fsdp_1k_contended, measure_best),
}


_MEMORY_CASES: Final = ("jitter_16k", "dualpipe_2k", "folded_1m")
"""Cases that have a memory target."""


_TARGETS: Final = (
    ("405B on 16,384 GPUs, folded", "folded_16k_s", 0.05),
    ("the same on 131,072 GPUs", "folded_131k_s", 0.5),
    ("the same on 1,048,576 GPUs", "folded_1m_s", 3.0),
    ("the same, memory", "folded_1m_peak_bytes", 1.2),
    ("one slow rank in GPT-3 175B on 1,024 GPUs", "slow_rank_175b_s", 5.0),
    ("DeepSeek-V3 on 2,048 GPUs, ep 64, pp 16, links shared", "moe_2k_s", 1.0),
    ("the same on 1,024, each with loads of its own", "moe_expert_load_1k_s", 5.0),
    ("DualPipeV on 2,048, loads drawn, 60 microbatches", "dualpipe_2k_s", 20.0),
    ("the same, memory", "dualpipe_2k_peak_bytes", 2.0),
    ("jitter on each of 16,384 ranks", "jitter_16k_s", 10.0),
    ("the same, memory", "jitter_16k_peak_bytes", 3.0),
    ("FSDP on 1,024 GPUs, links shared, every rank", "fsdp_1k_contended_s", 10.0),
)
"""Description, figure and upper limit (seconds, gigabytes) of each target."""


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
    """A figure or ratio, and its upper limit."""

    description: str
    value: float
    limit: float
    unit: str

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.limit else "NOT MET"
        return (
            f"{self.description:58s} {self.value:8.3f} {self.unit:2s} at most {self.limit:7.3f} {self.unit:2s} "
            f"{verdict}"
        )


def _run_cases(names: Collection[str]) -> Iterator[tuple[str, RunMeasurement]]:
    """Measurements of the selected cases; a case that exceeds a resource limit is reported on stderr and skipped."""
    for name in (item for item in CASES if item in names):
        mapping, run = CASES[name]
        try:
            yield name, run(mapping())
        except ResourceLimitError as reason:
            print(f"{name}: {reason}", file=sys.stderr)


def figures_by_name(runs: dict[str, RunMeasurement]) -> FigureMapping:
    """Figures by name: seconds, bytes, counts."""
    figures: FigureMapping = {}
    for name, run in runs.items():
        figures.setdefault("bare_timeouts_per_s", run.timeouts_per_s)  # of the first (folded) run, if it was selected
        figures[f"{name}_s"] = run.seconds
        if run.events is not None:
            figures[f"{name}_events"] = run.events
        if name in _MEMORY_CASES:
            figures[f"{name}_peak_bytes"] = run.peak_bytes
    return figures


def performance_targets(figures: FigureMapping) -> Iterator[PerformanceTarget]:
    """Measured figures against their targets, as far as they were measured."""
    for description, name, limit in _TARGETS:
        if name in figures:
            scale, unit = (1e9, "GB") if name.endswith("_bytes") else (1.0, "s")
            yield PerformanceTarget(description, figures[name] / scale, limit, unit)
    if {"folded_16k_s", "slow_rank_16k_s"} <= figures.keys():
        ratio = figures["slow_rank_16k_s"] / figures["folded_16k_s"]
        yield PerformanceTarget("one slow rank of 16,384, against none", ratio, 3.0, "×")


def _run_details(runs: dict[str, RunMeasurement]) -> Iterator[str]:
    """One line of further measurements per run."""
    for name, run in runs.items():
        ranks = f"{run.simulated_ranks:,} of {run.ranks:,} ranks simulated"
        resources = f"{run.cpu_seconds:7.3f} CPU s  {run.peak_bytes / 1e6:7,.0f} MB"
        yield f"{name:20s} {resources}  {run.timeouts_per_s:9,.0f} bare timeouts/s  {ranks}"


def main() -> None:
    """Print the figures."""
    parser = build_parser("engine", __doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="NAME",
                        help=f"only some of {', '.join(CASES)}")  # fmt: skip
    parser.add_argument("--scale", action="store_true", help="time and memory against the number of GPUs, too")
    options = parser.parse_args()
    runs = dict(_run_cases(options.only))
    figures = figures_by_name(runs)
    scale = scale_tables() if options.scale else []
    scale_rows = {"scale": {table.title: table.rows for table in scale}} if scale else {}
    if not write_figures({**figures, **scale_rows}, options.json):
        return
    print("", *_run_details(runs), "", *performance_targets(figures), *scale, sep="\n")


if __name__ == "__main__":
    main()
