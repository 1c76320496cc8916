"""How long does a search take? `python -m tests.benchmarks.search [--json FILE|-]`.

The default search spaces of the 405B example on 16,384 H100 and of Llama 3 70B on 512, on two processes of
this machine: wall-clock seconds, peak memory of a process, and the number of layouts. The rate of bare simpy
timeouts in the same run is printed for comparison. MoE models with hundreds of experts take minutes
(`--deepseek`).
"""

from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from clustersim import Scenario
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from tests.benchmarks.cases import EXAMPLE
from tests.benchmarks.layouts import base_scenario
from tests.benchmarks.timing import TIMEOUTS, best_time, build_parser, run_bare_timeouts, write_figures

WORKERS = 2


def search_figures(name: str, scenario: Scenario) -> dict[str, float]:
    """Figures of one search."""
    result = LayoutSearch(SearchSpace.from_scenario(scenario), workers=WORKERS).run()
    first_step_time = result.first_guess.step_time if result.first_guess is not None else float("nan")
    return {
        f"{name}_combinations": result.candidates,
        f"{name}_legal": len(result.bounded) + len(result.simulated),
        f"{name}_simulated": len(result.simulated),
        f"{name}_s": result.wall_seconds,
        f"{name}_step_s": result.recommended.step_time,
        f"{name}_first_guess_s": first_step_time,
    }


def measure(*, deepseek: bool) -> dict[str, float]:
    """All figures by name."""
    figures = search_figures("llama3_405b_16k", Scenario.load(EXAMPLE))
    figures |= search_figures("llama3_70b_512", Scenario.from_mapping(base_scenario()))
    if deepseek:
        figures |= search_figures("deepseek_v3", Scenario.load(EXAMPLE.parent / "deepseek_v3.yaml"))
    peak_kib = max(getrusage(target).ru_maxrss for target in (RUSAGE_SELF, RUSAGE_CHILDREN))
    return {**figures, "memory_mb": peak_kib / 1024, "bare_timeouts_per_s": TIMEOUTS / best_time(run_bare_timeouts)}


def main() -> None:
    """Print the figures."""
    parser = build_parser("search", __doc__)
    parser.add_argument("--deepseek", action="store_true", help="search DeepSeek-V3's layouts, too")
    options = parser.parse_args()
    write_figures(measure(deepseek=options.deepseek), options.json)


if __name__ == "__main__":
    main()
