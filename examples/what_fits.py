"""What does not fit, and how many GPUs would it take? Llama 3 70B and 405B with FSDP on H100, without simulating.

Sharding divides parameters, gradients and optimizer states by the number of GPUs; activations stay. So more GPUs help
until the activations alone are too much, and then only recomputation or tensor parallelism does.
"""

from clustersim import Scenario
from clustersim.results.memory_check import check

GIB = 2**30


def main() -> None:
    """Print, for each model and recompute mode, the smallest GPU count on which it fits."""
    for model in ("llama3-8b", "llama3-70b", "llama3-405b"):
        for recompute in ("none", "full"):
            print(f"{model:12} recompute {recompute:5}: {min_gpus_text(model, recompute)}")


def min_gpus_text(model: str, recompute: str) -> str:
    """The smallest power of two of GPUs that fits, and what the next smaller count needs."""
    previous = "nothing smaller tried"
    for gpus in (2**power for power in range(3, 15)):
        report = check(fsdp_scenario(model, recompute, gpus))
        need = f"{report.peak_memory_bytes / GIB:,.0f} of {report.memory_capacity_bytes / GIB:.0f} GiB"
        if report.fits:
            return f"fits on {gpus:,} GPUs ({need}); {previous}"
        previous = f"{gpus:,} need {need}"
    return f"does not fit: even {previous}"


def fsdp_scenario(model: str, recompute: str, gpus: int) -> Scenario:
    """FSDP on the given number of GPUs, one sequence each."""
    mapping = {
        "model": model,
        "cluster": {"name": "dgx-h100", "gpus": gpus},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 8192, "global_batch": gpus, "recompute": recompute},
    }
    return Scenario.from_mapping(mapping)


if __name__ == "__main__":
    main()
