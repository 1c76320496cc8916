"""Predictions of a published step on a grid of constants, with multilinear interpolation between.

A step depends on three constants: the accelerator's in-training arithmetic rate (relative to isolated
kernels), and the framework's launch times of a forward and a backward kernel. Between grid points the step
time is interpolated linearly in the time per FLOP and in the launch times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from calibrate.fit.unstated_software import UnstatedSoftware, features_of
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.units import Seconds
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.step_features import StepFeatures
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.framework_defaults import framework_defaults
from clustersim.validation.steps import build_scenario, predicted_step_seconds

SUSTAINED_NODES: Final = (1.25, 0.8, 0.6)
LAUNCH_NODES: Final = (0.0, 20e-6, 40e-6)
BACKWARD_LAUNCH_NODES: Final = (0.0, 50e-6, 100e-6)
INTERPOLATION_NODES: Final = (1.0 / np.array(SUSTAINED_NODES), np.array(LAUNCH_NODES), np.array(BACKWARD_LAUNCH_NODES))
MIN_VISIBLE_EFFECT: Final = 0.01  # fraction of a step below which the effect of a constant is ignored
FITTED_ACCELERATORS: Final = ("a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h100-sxm-96gb", "h200-sxm-141gb")
"""Accelerators whose in-training rate is fitted to dense steps in BF16 and FP16."""
SAME_CHIP: Final[Mapping[str, str]] = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a800-sxm-80gb": "a100-sxm-80gb",
    "gh200-96gb": "h100-sxm-80gb",
    "gh200-96gb-660w": "h100-sxm-96gb",
    "h800-sxm-80gb": "h100-sxm-80gb",
    "b300-sxm-288gb": "b200-sxm-180gb",
}
"""Accelerators with the same chip share constants; GB200, cooled otherwise, has almost no dense BF16 cases."""
CARRIED_OVER: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gb200", "gb300", "mi300x", "mi325x", "mi355x"), "h100-sxm-80gb"),
    "v100-sxm-32gb": "a100-sxm-80gb",
}
"""Accelerators to which too few cases are published, and the one whose rate their files carry over."""


_HOST_GENERATIONS: Final[Mapping[str, str]] = {
    "megatron-2022": "megatron-2021",
    "megatron-deepspeed": "megatron-2021",
    "megatron": "pytorch",
    "nemo": "pytorch",
}
"""Frameworks of one generation of PyTorch and autograd, whose launch times are one."""


def host_framework(name: str) -> str:
    """The framework whose launch times a packaged one has: of its generation, or that it is like."""
    content = read_mapping(find_file("frameworks", name))
    if "launch" in content.get("host", {}):
        return _HOST_GENERATIONS.get(name, name)
    return host_framework(content["like"])


@dataclass(frozen=True, slots=True)
class TabulatedStep:
    """One case.

    framework: whose launch times it has; is_software_identified: what its software does is known
    (`validation.framework_defaults`); predicted_seconds: [SUSTAINED_NODES, LAUNCH_NODES, BACKWARD_LAUNCH_NODES];
    features: under the packaged constants; unstated: the prediction without its software, None: it states none.
    """

    case_id: str
    source: str
    accelerator: str
    framework: str
    is_software_identified: bool
    measured_seconds: Seconds
    predicted_seconds: FloatArray
    features: StepFeatures
    unstated: UnstatedSoftware | None

    def log_errors(self, sustained: FloatArray, launch: FloatArray, backward: FloatArray) -> FloatArray:
        """Logarithm of predicted over measured time for several choices of constants: [choices]."""
        values = (1.0 / sustained, launch, backward)
        intervals = [_locate(value, nodes) for value, nodes in zip(values, INTERPOLATION_NODES, strict=True)]
        seconds = np.zeros(len(launch))
        for corner in product((0, 1), repeat=len(intervals)):
            weight = np.ones(len(launch))
            for upper, (_, fraction) in zip(corner, intervals, strict=True):
                weight = weight * (fraction if upper else 1.0 - fraction)
            seconds += (
                weight
                * self.predicted_seconds[
                    tuple(lower + upper for upper, (lower, _) in zip(corner, intervals, strict=True))
                ]
            )
        logarithms: FloatArray = np.log(seconds / self.measured_seconds)
        return logarithms

    def is_launch_sensitive(self) -> bool:
        """Whether launch times change the step visibly."""
        return bool(self.predicted_seconds[1, 1, 1] > (1.0 + MIN_VISIBLE_EFFECT) * self.predicted_seconds[1, 0, 0])


def _locate(values: FloatArray, nodes: FloatArray) -> tuple[IntArray, FloatArray]:
    """Interval index of each value among ascending nodes, and the fraction within it (extrapolated)."""
    lower = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, len(nodes) - 2)
    return lower, (values - nodes[lower]) / (nodes[lower + 1] - nodes[lower])


def tabulate_step(case: ValidationCase) -> TabulatedStep | None:
    """Predict one case on the grid; None if it cannot be predicted."""
    try:
        scenario, measured = build_scenario(case), case.positive_float("step_time_s")
    except CannotPredictError:
        return None
    accelerator_name, result = scenario.cluster.accelerator.name, simulate(scenario)
    return TabulatedStep(
        case.text("case_id"),
        case.text("source"),
        SAME_CHIP.get(accelerator_name, accelerator_name),
        host_framework(scenario.framework.name),
        framework_defaults(case).is_verified,
        measured,
        _predict_table(scenario),
        features_of(result),
        UnstatedSoftware.predict(case, result),
    )


def _predict_table(scenario: Scenario) -> FloatArray:
    """The table of predictions; if launches never limit the step, one launch time stands for all."""
    seconds = np.empty((len(SUSTAINED_NODES), len(LAUNCH_NODES), len(BACKWARD_LAUNCH_NODES)))
    for sustained_index, sustained in enumerate(SUSTAINED_NODES):
        seconds[sustained_index] = _step_seconds(scenario, sustained, LAUNCH_NODES[0], BACKWARD_LAUNCH_NODES[0])
    if (
        _step_seconds(scenario, SUSTAINED_NODES[0], LAUNCH_NODES[1], BACKWARD_LAUNCH_NODES[1])
        > (1.0 + MIN_VISIBLE_EFFECT) * seconds[0, 0, 0]
    ):
        for table_index in np.ndindex(seconds.shape):
            sustained_index, forward, backward = table_index
            if forward or backward:
                seconds[table_index] = _step_seconds(
                    scenario, SUSTAINED_NODES[sustained_index], LAUNCH_NODES[forward], BACKWARD_LAUNCH_NODES[backward]
                )
    return seconds


def _step_seconds(scenario: Scenario, sustained: float, launch: Seconds, backward: Seconds) -> Seconds:
    """Predicted step time under other constants."""
    accelerator = scenario.cluster.accelerator
    derating = replace(accelerator.derating, sustained_ratio=sustained)
    cluster = replace(scenario.cluster, accelerator=replace(accelerator, derating=derating))
    framework = replace(scenario.framework, launch_seconds=launch, backward_launch_seconds=backward)
    result = simulate(replace(scenario, cluster=cluster, framework=framework))
    return predicted_step_seconds(result)
