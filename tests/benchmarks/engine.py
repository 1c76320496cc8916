"""How fast is the engine at full scale?

`python -m tests.benchmarks.engine [--json FILE|-] [--only NAME ...] [--scale]`: times are of `simulate()`, the best of
three. Folded runs follow each other in one process; each run of jitter and FSDP has its own, so that its memory is its
own. `--scale` adds tables of time and memory against the number of GPUs.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from tests.benchmarks import cases
from tests.benchmarks.isolated_process import Measured, OutOfReachError, best_measured, measured
from tests.benchmarks.scale import tables
from tests.benchmarks.timing import parser_of, show

Figures = dict[str, float]


def _warm(mapping: cases.Mapping) -> Measured:
    return measured(mapping, times=3)


def _counted(mapping: cases.Mapping) -> Measured:
    return measured(mapping, times=3, events=True)


CASES: dict[str, tuple[Callable[[], cases.Mapping], Callable[[cases.Mapping], Measured]]] = {
    "folded_16k": (cases.folded_16k, _counted),
    "folded_131k": (cases.folded_131k, _warm),
    "slow_rank_16k": (cases.slow_rank_16k, _warm),
    "jitter_16k": (cases.jitter_16k, best_measured),
    "slow_rank_175b": (cases.slow_rank_175b, _warm),
    "mixture_2k": (cases.mixture_2k, _warm),
    "loads_1k": (cases.loads_1k, best_measured),
    "pairs_2k": (cases.pairs_2k, best_measured),
    "fsdp_1k_contended": (cases.fsdp_1k_contended, best_measured),
}


_OWN_MEMORY: Final = ("jitter_16k", "pairs_2k")
"""Cases whose memory has a target."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure or ratio and the most that it may be."""

    what: str
    value: float
    most: float
    unit: str

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.most else "NOT MET"
        return f"{self.what:58s} {self.value:8.3f} {self.unit:2s} at most {self.most:7.3f} {self.unit:2s} {verdict}"


def _runs(names: Collection[str]) -> Iterator[tuple[str, Measured]]:
    """What was measured of each case; what is out of reach is said and left out."""
    for name in (item for item in CASES if item in names):
        mapping, run = CASES[name]
        try:
            yield name, run(mapping())
        except OutOfReachError as reason:
            print(f"{name}: {reason}", file=sys.stderr)


def figures_of(runs: dict[str, Measured]) -> Figures:
    """Figures by name: seconds, bytes, counts."""
    figures: Figures = {}
    for name, run in runs.items():
        figures.setdefault("bare_timeouts_per_s", run.timeouts_per_s)  # of the folded run, if it is there
        figures[f"{name}_s"] = run.seconds
        if run.events is not None:
            figures[f"{name}_events"] = run.events
        if name in _OWN_MEMORY:
            figures[f"{name}_peak_bytes"] = run.peak_bytes
    return figures


def targets(figures: Figures) -> Iterator[Target]:
    """What was measured against what is asked for, as far as it was measured."""
    healthy = figures.get("folded_16k_s")
    if healthy is not None:
        yield Target("405B on 16,384 GPUs, folded", healthy, 0.3, "s")
        bare = figures["folded_16k_events"] / figures["bare_timeouts_per_s"]
        events = f"{figures['folded_16k_events']:,.0f}"
        yield Target(f"the same, against 3 × bare timeouts of its {events} events", healthy, 3 * bare, "s")
    if healthy is not None and "folded_131k_s" in figures:
        yield Target("131,072 GPUs, against 16,384", figures["folded_131k_s"] / healthy, 1.3, "×")
    if healthy is not None and "slow_rank_16k_s" in figures:
        yield Target("one slow rank, against none", figures["slow_rank_16k_s"] / healthy, 3.0, "×")
    if "slow_rank_175b_s" in figures:
        yield Target("one slow rank in GPT-3 175B on 1,024 GPUs", figures["slow_rank_175b_s"], 5.0, "s")
    if "mixture_2k_s" in figures:
        yield Target("DeepSeek-V3 on 2,048 GPUs, ep 64, pp 16, links shared", figures["mixture_2k_s"], 1.0, "s")
    if "loads_1k_s" in figures:
        yield Target("the same on 1,024, each with loads of its own", figures["loads_1k_s"], 5.0, "s")
    if "pairs_2k_s" in figures:
        yield Target("DualPipeV on 2,048, loads drawn, 60 microbatches", figures["pairs_2k_s"], 20.0, "s")
        yield Target("the same, memory", figures["pairs_2k_peak_bytes"] / 1e9, 2.0, "GB")
    if "jitter_16k_s" in figures:
        yield Target("jitter on each of 16,384 ranks", figures["jitter_16k_s"], 10.0, "s")
        yield Target("the same, memory", figures["jitter_16k_peak_bytes"] / 1e9, 3.0, "GB")
    if "fsdp_1k_contended_s" in figures:
        yield Target("FSDP on 1,024 GPUs, links shared, every rank", figures["fsdp_1k_contended_s"], 10.0, "s")


def _beside(runs: dict[str, Measured]) -> Iterator[str]:
    """What else is known of each run."""
    for name, run in runs.items():
        ranks = f"{run.simulated:,} of {run.ranks:,} ranks simulated"
        used = f"{run.cpu_seconds:7.3f} CPU s  {run.peak_bytes / 1e6:7,.0f} MB"
        yield f"{name:20s} {used}  {run.timeouts_per_s:9,.0f} bare timeouts/s  {ranks}"


def main() -> None:
    """Print the figures."""
    parser = parser_of("engine", __doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="NAME",
                        help=f"only some of {', '.join(CASES)}")  # fmt: skip
    parser.add_argument("--scale", action="store_true", help="time and memory against the number of GPUs, too")
    options = parser.parse_args()
    runs = dict(_runs(options.only))
    figures = figures_of(runs)
    scale = tables() if options.scale else []
    rows = {"scale": {table.title: table.rows for table in scale}} if scale else {}
    if not show({**figures, **rows}, options.json):
        return
    print("", *_beside(runs), "", *targets(figures), *scale, sep="\n")


if __name__ == "__main__":
    main()
