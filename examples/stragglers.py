"""What does one slow GPU cost, and what a slow node, or jitter everywhere? Llama 3 405B on 16,384 H100.

MegaScale (Jiang et al. 2024, arXiv:2402.15627) found that about 0.5 % of its machines took about 10 % longer for the
same work. A step ends when the last rank has, so one slow GPU slows all: its tensor-parallel group in every layer, its
pipeline in every microbatch, its replicas at the end. A slow node costs no more, because the other seven GPUs waited
anyway; a first stage, which has one layer fewer, hides some of it. Jitter averages out over a rank's kernels, but not
over groups that wait for their slowest member. The page compares the cases and details the slow node.
"""

import argparse
from pathlib import Path

from clustersim import Scenario, simulate
from clustersim.report.comparison_page import comparison_page

SCENARIO = Path(__file__).parent / "llama3_405b_16k.yaml"
REPLICA = 128  # GPUs: tp 8 x pp 16
DETAILED_CASE = "one slow node, middle stage"


def degradation_cases(gpus: int) -> dict[str, str]:
    """The degradation of each case, as an override. Nodes have 8 GPUs."""
    middle, slow_nodes = gpus // 2, list(range(50, gpus // 8, 200)) or [0]
    return {
        "healthy": "degradations={}",
        "one slow GPU, middle stage": f"degradations.slow={{gpu: {middle}, speed: 0.9}}",
        "one slow GPU, first stage": "degradations.slow={gpu: 0, speed: 0.9}",
        DETAILED_CASE: f"degradations.slow={{node: {middle // 8}, speed: 0.9}}",
        "0.5 % of nodes slow": f"degradations.slow={{nodes: {slow_nodes}, speed: 0.9}}",
        "1 % jitter of every kernel": "degradations.jitter=1 %",
    }


def main() -> None:
    """Print a line for each case and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=16384, help=f"a multiple of {REPLICA}; default: 16384")
    parser.add_argument("--html", default="stragglers.html", help="the page; default: stragglers.html")
    options = parser.parse_args()
    replicas = options.gpus // REPLICA
    size = [f"cluster.gpus={options.gpus}", f"layout.dp={replicas}", f"training.global_batch={16 * replicas}"]
    # with jitter all ranks differ, and on shared links they would be simulated individually: minutes, not seconds
    healthy = Scenario.load(SCENARIO, [*size, "cost.network=uncontended"])
    print(f"{'':28}     step  longer by  waiting  slow ranks  simulated ranks")
    results = {}
    for name, override in degradation_cases(options.gpus).items():
        result = results[name] = simulate(healthy.with_overrides(override))
        slowdown = result.step_time / results["healthy"].step_time - 1
        times = result.breakdown.mean_seconds()
        waiting = sum(times[category] for category in times if category.startswith(("bubble", "wait")))
        ranks = f"{result.stragglers.rank_count:10,} {result.simulated_rank_count:16,}"
        print(f"{name:28} {result.step_time:6.3f} s {slowdown:9.2%} {waiting:6.3f} s {ranks}")
    page = comparison_page(results, title="What stragglers cost", detailed=DETAILED_CASE)
    Path(options.html).write_text(page, encoding="utf-8")
    print(f"wrote {options.html}")


if __name__ == "__main__":
    main()
