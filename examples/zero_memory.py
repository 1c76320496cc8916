"""What does each ZeRO stage save? The table of Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5B on 64 GPUs.

The paper counts model states only: 2 bytes of weights, 2 of gradients and 12 of optimizer (master weight and two
moments) for each of 7.5e9 parameters make 120, 31.4, 16.6 and 1.9 GB. A real GPU also holds activations and the rest.
"""

from clustersim import Scenario, simulate

MODEL_STATES = ("parameters", "gradients", "optimizer state")
BASE_MAPPING = {
    "model": "megatron-7.5b",
    "cluster": {"name": "dgx-a100", "gpus": 64},
    "layout": {"dp": 64},
    "training": {
        "sequence": 2048,
        "global_batch": 64,
        "precision": {"compute": "fp16", "gradients": "fp16"},
        "recompute": "full",
    },
    "framework": "megatron-deepspeed",  # ZeRO is DeepSpeed's
}


def main() -> None:
    """Print model states and total peak memory for each stage."""
    print("strategy  model states       peak  fits 80 GiB")
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        result = simulate(Scenario.from_mapping(BASE_MAPPING, overrides=[f"layout.data={strategy}"]))
        memory_bytes = result.to_json()["stages"][0]["memory_bytes"]
        states = sum(memory_bytes[name] for name in MODEL_STATES)
        print(f"{strategy:8} {states / 1e9:10.1f} GB {result.peak_memory / 1e9:7.1f} GB  {result.fits_in_memory}")


if __name__ == "__main__":
    main()
