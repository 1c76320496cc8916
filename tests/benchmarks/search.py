"""How long does a search take? `python -m tests.benchmarks.search [--json FILE|-]`.

The default spaces of the 405B example on 16,384 H100 and of Llama 3 70B on 512, on two processes of this machine:
seconds on the clock, the most memory that a process held, and how many layouts there were. The rate of bare simpy
timeouts of the same run stands beside them. Mixtures of hundreds of experts take minutes (`--deepseek`).
"""

from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from clustersim import Scenario
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from tests.benchmarks.cases import EXAMPLE
from tests.benchmarks.layouts import start
from tests.benchmarks.timing import TIMEOUTS, bare_timeouts, best, parser_of, show

WORKERS = 2


def searched(name: str, scenario: Scenario) -> dict[str, float]:
    """Figures of one search."""
    found = LayoutSearch(SearchSpace.from_scenario(scenario), workers=WORKERS).run()
    first = found.first_guess.step_time if found.first_guess is not None else float("nan")
    return {
        f"{name}_combinations": found.candidates,
        f"{name}_legal": len(found.bounded) + len(found.simulated),
        f"{name}_simulated": len(found.simulated),
        f"{name}_s": found.wall_seconds,
        f"{name}_step_s": found.recommended.step_time,
        f"{name}_first_guess_s": first,
    }


def measure(*, deepseek: bool) -> dict[str, float]:
    """All figures by name."""
    figures = searched("llama3_405b_16k", Scenario.load(EXAMPLE))
    figures |= searched("llama3_70b_512", Scenario.from_mapping(start()))
    if deepseek:
        figures |= searched("deepseek_v3", Scenario.load(EXAMPLE.parent / "deepseek_v3.yaml"))
    most = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    return {**figures, "memory_mb": most / 1024, "bare_timeouts_per_s": TIMEOUTS / best(bare_timeouts)}


def main() -> None:
    """Print the figures."""
    parser = parser_of("search", __doc__)
    parser.add_argument("--deepseek", action="store_true", help="search DeepSeek-V3's layouts, too")
    options = parser.parse_args()
    show(measure(deepseek=options.deepseek), options.json)


if __name__ == "__main__":
    main()
