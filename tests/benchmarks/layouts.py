"""How many layouts can a search try? `python -m tests.benchmarks.layouts [--json FILE|-]`.

Llama 3 70B on 512 H100: tensor and pipeline degrees, FSDP and ZeRO-1, and batches, each changed from one scenario and
simulated once, as a search does it, with the step time, the utilization and the peak of memory read. Beside it the
405B example, simulated again and again. Times are CPU seconds of one process, which other work on the machine changes
less than the clock on the wall; the rate of bare simpy timeouts of the same run stands beside them.
"""

from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from time import process_time

from clustersim import RenderedResult, Scenario, simulate
from tests.benchmarks.cases import EXAMPLE, Mapping
from tests.benchmarks.timing import TIMEOUTS, bare_timeouts, best, parser_of, show

GPUS = 512
TIMES = 9  # that the example is simulated


def start() -> Mapping:
    """What every layout is a change of."""
    return {
        "model": "llama3-70b",
        "cluster": {"name": "dgx-h100", "gpus": GPUS},
        "layout": {"tp": 8, "dp": 64, "sequence_parallel": True, "data": "zero1"},
        "schedule": "1f1b",
        "training": {"sequence": 8192, "global_batch": 1024, "microbatch": 1, "precision": "bf16", "recompute": "full"},
    }


def layouts() -> Iterator[list[str]]:
    """Overrides of each."""
    for tp, pp, data, batch in product((8, 4), (1, 2, 4, 8), ("zero1", "fsdp"), (512, 1024, 2048)):
        degrees = f"layout.tp={tp}", f"layout.pp={pp}", f"layout.dp={GPUS // tp // pp}"
        yield [*degrees, f"layout.data={data}", f"training.global_batch={batch}"]


def read(result: RenderedResult) -> tuple[float, ...]:
    """What a search compares."""
    return result.step_time, result.mfu(), result.peak_memory


def busy(work: Callable[[], object]) -> float:
    """CPU seconds of some work."""
    started = process_time()
    work()
    return process_time() - started


def measure() -> dict[str, float]:
    """All figures by name."""
    example, base = Scenario.load(EXAMPLE), Scenario.from_mapping(start())
    read(simulate(example))
    read(simulate(base))
    seconds = [busy(lambda each=layout: read(simulate(base.with_overrides(each)))) for layout in layouts()]
    return {
        "simulate_405b_16k_warm_s": min(busy(lambda: read(simulate(example))) for _ in range(TIMES)),
        "layouts": len(seconds),
        "layouts_per_s": len(seconds) / sum(seconds),
        "layout_median_s": median(seconds),
        "layout_slowest_s": max(seconds),
        "layouts_within_20_ms": sum(item <= 0.02 for item in seconds),
        "bare_timeouts_per_s": TIMEOUTS / best(bare_timeouts),
    }


def main() -> None:
    """Print the figures."""
    options = parser_of("layouts", __doc__).parse_args()
    show(measure(), options.json)


if __name__ == "__main__":
    main()
