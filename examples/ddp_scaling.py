"""How far does plain data parallelism carry? A 1.3B GPT with DDP on 8 to 1,024 GPUs, 8 sequences or 1 on each.

Every GPU does the same work at every size, so a step that gets longer is gradient all-reduce that backward does not
hide: near-linear means that tokens/s per GPU stay what they were. The all-reduce moves the same bytes however large
the batch is, so few sequences per GPU leave too little backward to hide it. The effective batch grows with the GPUs;
what that does to convergence is another question.
"""

from clustersim import Scenario, simulate

BASE_MAPPING = {
    "model": "gpt3-1.3b",
    "cluster": "dgx-a100",
    "layout": {"dp": 8, "data": "ddp"},
    "training": {"sequence": 2048, "global_batch": 64, "recompute": "full"},
}


def main() -> None:
    """Print a scaling study for 8 sequences per GPU and for 1."""
    for sequences in (8, 1):
        print_scaling_study(sequences)


def print_scaling_study(sequences: int) -> None:
    """Print one line per GPU count, then the conclusion."""
    base = Scenario.from_mapping(BASE_MAPPING)
    print(f"{sequences} sequences per GPU\n  GPUs  effective batch    step    tokens/s  efficiency  exposed all-reduce")
    base_rate = 0.0
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        batch = sequences * gpus
        result_json = simulate(base.with_overrides(f"layout.dp={gpus}", f"training.global_batch={batch}")).to_json()
        base_rate = base_rate or result_json["tokens_per_s_per_gpu"]
        efficiency = result_json["tokens_per_s_per_gpu"] / base_rate
        exposed = result_json["breakdown_s"]["exposed dp"] / result_json["step_time_s"]
        print(
            f"{gpus:6,} {batch:16,} {result_json['step_time_s']:6.3f} s {result_json['tokens_per_s']:11,.0f}"
            f" {efficiency:10.1%} {exposed:12.1%}"
        )
    linear = "near-linear" if efficiency > 0.9 else "not linear"
    print(f"{linear}: at {gpus:,} GPUs {exposed:.1%} of the step is all-reduce that backward does not hide\n")


if __name__ == "__main__":
    main()
