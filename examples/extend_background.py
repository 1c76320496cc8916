"""Background traffic: a neighbour's all-reduce during gradient communication, and a temporarily slow link.

A job on 16 nodes shares oversubscribed leaves with a job on 16 more: nodes alternate between the two.
"""

from typing import Any

from clustersim import Scenario, simulate

NODES, PER_NODE = 16, 8
GPUS = [f"{PER_NODE * node}-{PER_NODE * node + PER_NODE - 1}" for node in range(2 * NODES)]
BASE_MAPPING: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {
        "name": "dgx-h100",
        "gpus": NODES * PER_NODE,
        "fabric": {"leaf": {"nodes": 4, "oversubscription": 4}},
        "placement": {"order": GPUS[1::2]},
    },
    "layout": {"tp": PER_NODE, "dp": NODES, "sequence_parallel": True},
    "training": {"sequence": 4096, "global_batch": 8 * NODES},
    "framework": "megatron",
}
NEIGHBOUR_TRAFFIC = {"gpus": GPUS[::2], "collective": "all_reduce", "bytes": "16 GB", "every": "200 ms"}


def main() -> None:
    isolated = simulate(Scenario.from_mapping(BASE_MAPPING)).step_time
    cases = {
        "alone": {},
        "beside a neighbour": {"traffic": NEIGHBOUR_TRAFFIC},
        "a link at 10 % for 50 ms": {
            "links": {"between": ["nic1.0", "leaf0.0"], "bandwidth": "10 %", "during": ["800 ms", "850 ms"]}
        },
    }
    for label, degradations in cases.items():
        step = simulate(Scenario.from_mapping(BASE_MAPPING | {"degradations": degradations})).step_time
        print(f"{label:25} {step:.4f} s a step, {1e3 * (step - isolated):+.1f} ms")


if __name__ == "__main__":
    main()
