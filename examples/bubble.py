"""How much of a pipeline is bubble? GPT-3 175B on 8 stages with ever more microbatches.

With equal stages, p - 1 of m + p - 1 slots are empty: (p - 1)/m of the ideal time for GPipe and 1F1B, and v times less
where each GPU holds v model chunks (Narayanan et al. 2021, section 2.2). The first and last stage are not quite equal
to the others (embedding, logits), so the simulated bubble is a little larger.
"""

from clustersim import Scenario, simulate

BASE_MAPPING = {
    "model": "gpt3-175b",
    "cluster": {"name": "dgx-a100", "gpus": 64},
    "layout": {"tp": 8, "pp": 8},
    "training": {"sequence": 2048, "global_batch": 8, "recompute": "full"},
}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "{interleaved: {chunks: 2}}": 2, "{interleaved: {chunks: 4}}": 4}


def main() -> None:
    """Print the simulated and the textbook bubble fraction of the step."""
    print("microbatches  schedule                    bubble  textbook")
    for microbatches in (8, 16, 32, 64):
        for schedule, chunks in SCHEDULES.items():
            overrides = [f"schedule={schedule}", f"training.global_batch={microbatches}"]
            result = simulate(Scenario.from_mapping(BASE_MAPPING, overrides=overrides))
            ideal = 7 / (chunks * microbatches)  # of the ideal time; as a fraction of the step: x / (1 + x)
            bubble = result.to_json()["bubble_fraction"]
            print(f"{microbatches:12}  {schedule:26} {bubble:7.1%} {ideal / (1 + ideal):9.1%}")


if __name__ == "__main__":
    main()
