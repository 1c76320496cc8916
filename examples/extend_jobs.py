"""Two co-scheduled jobs that contend for the network: one step with three different neighbours.

Nodes alternate between the jobs, under shared leaf switches. The neighbour trains step after step while this
job's step runs.
"""

from typing import Any

from clustersim import Scenario, simulate

NODES = 16
CLUSTER = {"name": "dgx-h100", "gpus": 8 * NODES, "fabric": {"leaf": {"nodes": 4, "oversubscription": 4}}}


def job_mapping(layout: dict[str, Any], batch: int, first_node: int = 1) -> dict[str, Any]:
    """A job on every second node."""
    return {
        "model": "llama3-8b",
        "cluster": {**CLUSTER, "placement": {"nodes": list(range(first_node, 2 * NODES, 2))}},
        "layout": {
            "sequence_parallel": "tp" in layout,
            "async_tensor_model_parallel_allreduce": True,
            "overlap_p2p_comm": True,
            **layout,
        },
        "training": {"sequence": 4096, "global_batch": batch},
    }


NEIGHBOURS = {
    "pipelines": job_mapping({"tp": 4, "pp": 4, "dp": 8}, 128),
    "replicas": job_mapping({"tp": 8, "dp": NODES}, 64),
    "shards": job_mapping({"dp": 8 * NODES, "data": "fsdp"}, 128),
}


def main() -> None:
    base_job = job_mapping({"tp": 8, "dp": NODES}, 480, first_node=0)
    for name, neighbour in NEIGHBOURS.items():
        jobs = {"scenario": {"name": name, **neighbour}, "start": "400 ms"}
        result = simulate(Scenario.from_mapping({**base_job, "degradations": {"jobs": jobs}}))
        (other,) = result.co_scheduled_jobs
        print(f"beside {name:12} {result.isolated_step_time:.4f} s a step become {result.step_time:.4f} s")
        times = f"{other.isolated_step_times.mean():.4f} s a step become {other.step_times.mean():.4f} s"
        print(f"    {other.ended_steps:2} of its steps   {times}")


if __name__ == "__main__":
    main()
