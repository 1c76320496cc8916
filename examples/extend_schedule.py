"""A custom schedule: a class in a Python file, named by the scenario, compared with built-in schedules.

GPipe in groups: all forwards of a few microbatches, then all their backwards, so that fewer activations are
stored.
"""

from pathlib import Path

from clustersim import Scenario, simulate

BASE_MAPPING = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"pp": 4, "dp": 2},
    "training": {"sequence": 4096, "global_batch": 32, "recompute": "selective"},
}
GROUP_SIZE = 8


class Grouped:
    """One stage per rank; `group` microbatches at a time."""

    def __init__(self, group: int = GROUP_SIZE) -> None:
        self.group = group

    def placement(self, ranks: int) -> list[int]:
        """The pipeline rank of each stage."""
        return [*range(ranks)]

    def order(self, ranks: int, microbatches: int) -> list[list[str]]:
        """The passes of each rank in order: stage, F or B, microbatch."""
        if microbatches % self.group:
            raise ValueError(f"{microbatches} microbatches are no whole groups of {self.group}")
        groups = [range(first, first + self.group) for first in range(0, microbatches, self.group)]
        return [[f"{stage}{kind}{m}" for group in groups for kind in "FB" for m in group] for stage in range(ranks)]


def main() -> None:
    custom = {"python": {"class_path": f"{Path(__file__).stem}:Grouped", "arguments": {"group": GROUP_SIZE}}}
    print("schedule          step      bubble  peak memory")
    for name, schedule in {"gpipe": "gpipe", f"groups of {GROUP_SIZE}": custom, "1f1b": "1f1b"}.items():
        scenario = Scenario.from_mapping({**BASE_MAPPING, "schedule": schedule}, path=Path(__file__))
        result_json = simulate(scenario).to_json()
        memory = result_json["peak_memory_bytes"] / 2**30
        print(f"{name:14} {result_json['step_time_s']:7.3f} s {result_json['bubble_fraction']:9.1%} {memory:8.1f} GiB")


if __name__ == "__main__":
    main()
