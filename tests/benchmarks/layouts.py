"""How many layouts can a search evaluate? `python -m tests.benchmarks.layouts [--json FILE|-]`.

Llama 3 70B on 512 H100: tensor and pipeline degrees, FSDP and ZeRO-1, and batch sizes, each an override of
one scenario that is simulated once, as in a search, with step time, utilization and peak memory read; and
the 405B example, simulated repeatedly. Times are CPU seconds of one process, which are less sensitive to
other load than wall-clock time; the rate of bare simpy timeouts in the same run is printed for comparison.
"""

from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from time import process_time

from clustersim import RenderedResult, Scenario, simulate
from tests.benchmarks.cases import EXAMPLE, Mapping
from tests.benchmarks.timing import TIMEOUTS, best_time, build_parser, run_bare_timeouts, write_figures

GPUS = 512
EXAMPLE_RUNS = 9  # repetitions of the example


def base_scenario() -> Mapping:
    """The scenario that all layouts override."""
    return {
        "model": "llama3-70b",
        "cluster": {"name": "dgx-h100", "gpus": GPUS},
        "layout": {"tp": 8, "dp": 64, "sequence_parallel": True, "data": "zero1"},
        "schedule": "1f1b",
        "training": {"sequence": 8192, "global_batch": 1024, "microbatch": 1, "precision": "bf16", "recompute": "full"},
    }


def layout_overrides() -> Iterator[list[str]]:
    """Overrides of every layout."""
    for tp, pp, data, batch in product((8, 4), (1, 2, 4, 8), ("zero1", "fsdp"), (512, 1024, 2048)):
        degrees = f"layout.tp={tp}", f"layout.pp={pp}", f"layout.dp={GPUS // tp // pp}"
        yield [*degrees, f"layout.data={data}", f"training.global_batch={batch}"]


def compared_metrics(result: RenderedResult) -> tuple[float, ...]:
    """The metrics that a search compares."""
    return result.step_time, result.mfu, result.peak_memory


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start_time = process_time()
    work()
    return process_time() - start_time


def measure() -> dict[str, float]:
    """All figures by name."""
    example, base = Scenario.load(EXAMPLE), Scenario.from_mapping(base_scenario())
    compared_metrics(simulate(example))
    compared_metrics(simulate(base))
    seconds = [
        cpu_seconds(lambda overrides=overrides: compared_metrics(simulate(base.with_overrides(overrides))))
        for overrides in layout_overrides()
    ]
    return {
        "simulate_405b_16k_warm_s": min(
            cpu_seconds(lambda: compared_metrics(simulate(example))) for _ in range(EXAMPLE_RUNS)
        ),
        "layouts": len(seconds),
        "layouts_per_s": len(seconds) / sum(seconds),
        "layout_median_s": median(seconds),
        "layout_slowest_s": max(seconds),
        "layouts_within_20_ms": sum(overrides <= 0.02 for overrides in seconds),
        "bare_timeouts_per_s": TIMEOUTS / best_time(run_bare_timeouts),
    }


def main() -> None:
    """Print the figures."""
    options = build_parser("layouts", __doc__).parse_args()
    write_figures(measure(), options.json)


if __name__ == "__main__":
    main()
