"""A source of durations of your own: any function of a kernel, written as a record that scenarios take.

Here a bare roofline, of which 60 % are reached. Kernels that a record has take what it says; all else, communication
included, is the model's.
"""

import tempfile
from pathlib import Path

from clustersim import Scenario, simulate
from clustersim.assembly import kernels_of
from clustersim.cost.record import Conditions, Device, KernelRow, Origin, Record, Spread
from clustersim.cost.record_file import write_record
from clustersim.workload.kernels import Kernel

GIVEN = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "dp": 4},
    "training": {"sequence": 8192, "global_batch": 32},
}
PEAK, BANDWIDTH, REACHED = 989e12, 3.35e12, 0.6  # FLOP/s, bytes/s, of an H100


def seconds(kernel: Kernel) -> float:
    """The longer of arithmetic and memory traffic."""
    return max(kernel.flops / PEAK, kernel.bytes / BANDWIDTH) / REACHED


def record(scenario: Scenario) -> Record:
    """A row for each distinct kernel of the scenario that has a shape."""
    rows = (
        KernelRow(
            each.name, each.kind, each.dtype, each.shape, each.flops, each.bytes, each.launches,
            Spread(seconds(each), seconds(each), seconds(each), 1), source="extend_cost.py",
        )
        for each in kernels_of(scenario)
        if each.shape is not None
    )  # fmt: skip
    once = {each.signature: each for each in rows}
    device = Device(accelerator=scenario.cluster.accelerator.name, name="a roofline")
    conditions = Conditions(date="", command="extend_cost.py", method="computed")
    return Record(device, conditions, tuple(once.values()), origin=Origin.DERIVED, derivation="a roofline")


def main() -> None:
    scenario = Scenario.from_mapping(GIVEN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.json"
        write_record(record(scenario), path)
        for name, each in {"shipped model": scenario, "own roofline": scenario.changed(f"cost.record={path}")}.items():
            answer = simulate(each).to_json()
            print(f"{name:14} {answer['step_time_s']:.3f} s a step, compute {answer['breakdown_s']['compute']:.3f} s")


if __name__ == "__main__":
    main()
