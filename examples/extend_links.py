"""Link load over time as numpy arrays: utilization of a GPU's NIC ports in 40 bins of a step.

Pipeline stages are on separate nodes, so activations and gradients are sent between two nodes; a replica's
gradient all-reduce overlaps the last of them.
"""

import numpy as np

from clustersim import Scenario, simulate

BASE_MAPPING = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 8, "pp": 2, "dp": 2, "sequence_parallel": True},
    "training": {"sequence": 8192, "global_batch": 8},
    "framework": "megatron",
}
BLOCKS = " ▁▂▃▄▅▆▇█"


def main() -> None:
    result = simulate(Scenario.from_mapping(BASE_MAPPING))
    loads = result.link_loads(("nic0.0", "leaf0.0"), ("leaf0.0", "nic0.0"), bins=40)
    for link, rate, carried in zip(loads.links, loads.byte_rates, loads.total_bytes, strict=True):
        levels = np.clip(np.ceil(rate / link.bandwidth * (len(BLOCKS) - 1)), 0, len(BLOCKS) - 1).astype(int)
        print(
            f"{link.source:>8} to {link.target:8} |{''.join(BLOCKS[level] for level in levels)}| {carried / 1e9:.3f} GB"
        )
    step = loads.bin_edges[-1]
    print(f"{step:.3f} s; at most {loads.byte_rates.max() / 1e9:.1f} GB/s for {step / 40 * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
