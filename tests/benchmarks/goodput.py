"""How long does a goodput simulation of many runs take?

`python -m tests.benchmarks.goodput [--runs N] [--json FILE|-]`.

Llama 3 405B on 16,384 H100 for as many tokens as it trains in 54 days without failures, with the failure
rates of its cluster, on two processes of this machine: wall-clock seconds for all runs, without curves. The
rate of bare simpy timeouts in the same run is printed for comparison between machines.
"""

from time import perf_counter

from clustersim import Scenario, simulate
from clustersim.reliability import simulate_goodput
from tests.benchmarks.cases import EXAMPLE
from tests.benchmarks.timing import TIMEOUTS, best_time, build_parser, run_bare_timeouts, write_figures

DAYS = 54
WORKERS = 2
CHANGES = ("reliability.preset=llama3-2024", "reliability.checkpoint.interval=10 min", "reliability.spares=40")


def measure(runs: int) -> dict[str, float]:
    """All figures by name."""
    scenario = Scenario.load(EXAMPLE, CHANGES)
    training = scenario.training
    tokens = training.global_batch * training.sequence * DAYS * 86400.0 / simulate(scenario).step_time
    start_time = perf_counter()
    result = simulate_goodput(
        scenario.with_overrides(f"economics.tokens={tokens:.0f}"), runs, workers=WORKERS, curves=False
    )
    seconds = perf_counter() - start_time
    return {
        "runs": runs,
        "interruptions_of_a_run": result.interruption_count,
        "goodput": result.goodput,
        "seconds": seconds,
        "seconds_for_10000_runs": seconds * 10_000 / runs,
        "bare_timeouts_per_s": TIMEOUTS / best_time(run_bare_timeouts),
    }


def main() -> None:
    """Print the figures."""
    parser = build_parser("goodput", __doc__)
    parser.add_argument("--runs", type=int, default=10_000, metavar="N")
    options = parser.parse_args()
    write_figures(measure(options.runs), options.json)


if __name__ == "__main__":
    main()
