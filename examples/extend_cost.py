"""A custom source of kernel durations: any function of a kernel, written as a record that scenarios use.

Here a roofline with 60 % of the peaks, for the kernels of two layouts. Kernels for which a function returns
None, and communication, are timed by the model.
"""

import tempfile
from pathlib import Path

from clustersim import Scenario, simulate
from clustersim.build import distinct_kernels
from clustersim.cost.record_file import write_record
from clustersim.cost.synthetic_record import record_from_function
from clustersim.model.kernels import Kernel

GIVEN = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "training": {"sequence": 8192, "global_batch": 32},
    "framework": "megatron",
}
LAYOUTS = {"tp 2, dp 4": {"tp": 2, "dp": 4}, "tp 4, dp 2": {"tp": 4, "dp": 2}}
PEAK, BANDWIDTH, REACHED = 989e12, 3.35e12, 0.6  # FLOP/s, bytes/s, of an H100


def seconds(kernel: Kernel) -> float:
    """The maximum of arithmetic and memory time."""
    return max(kernel.flops / PEAK, kernel.bytes / BANDWIDTH) / REACHED


def main() -> None:
    scenarios = {label: Scenario.from_mapping({**GIVEN, "layout": layout}) for label, layout in LAYOUTS.items()}
    kernels = [kernel for scenario in scenarios.values() for kernel in distinct_kernels(scenario)]
    record = record_from_function(seconds, kernels, accelerator="h100-sxm-80gb", description="a roofline")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.json"
        write_record(record, path)
        for layout, scenario in scenarios.items():
            for source, variant in {
                "model": scenario,
                "roofline": scenario.with_overrides(f"cost.record={path}"),
            }.items():
                result_json = simulate(variant).to_json()
                compute = result_json["breakdown_s"]["compute"]
                print(f"{layout}  {source:9} {result_json['step_time_s']:.3f} s a step, compute {compute:.3f} s")


if __name__ == "__main__":
    main()
