"""What would a published step take under other constants? A small table of predictions, and what lies between them.

A step depends on three constants: its accelerator's arithmetic rate within a step (relative to single kernels), and its
framework's times to launch a kernel of forward and of backward. Between the table's points it is taken as linear in the
time per FLOP and in the launches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.step_features import StepFeatures, extract_step_features
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.framework_defaults import software_of
from clustersim.validation.steps import predicted_seconds, scenario_of

SUSTAINED: Final = (1.25, 0.8, 0.6)
LAUNCHES: Final = (0.0, 20e-6, 40e-6)
BACKWARD: Final = (0.0, 50e-6, 100e-6)
NODES: Final = (1.0 / np.array(SUSTAINED), np.array(LAUNCHES), np.array(BACKWARD))
VISIBLE: Final = 0.01  # of a step: what depends on a constant less than this does not depend on it
ACCELERATORS: Final = ("a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h100-sxm-96gb")
"""Whose rate within a step is found from dense steps in BF16 and FP16."""
SIBLINGS: Final[Mapping[str, str]] = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "h200-sxm-141gb": "h100-sxm-80gb",
    "h800-sxm-80gb": "h100-sxm-80gb",
    "b300-sxm-288gb": "b200-sxm-180gb",
}
"""Accelerators of one chip share constants; GB200, cooled otherwise, has no dense bf16 cases to speak of."""


HOSTS: Final[Mapping[str, str]] = {
    "megatron-2022": "megatron-2021",
    "megatron-deepspeed": "megatron-2021",
    "megatron": "pytorch",
    "nemo": "pytorch",
}
"""Frameworks of one generation of PyTorch and autograd share what the host needs."""


@dataclass(frozen=True, slots=True)
class Tabulated:
    """One case.

    framework: whose host it has; known: whether it is known what its software does (`validation.software`);
    seconds: [SUSTAINED, LAUNCHES, BACKWARD] what is predicted; facts: what the case is like under the shipped
    constants.
    """

    case_id: str
    source: str
    accelerator: str
    framework: str
    known: bool
    measured: Seconds
    seconds: FloatArray
    facts: StepFeatures

    def errors(self, sustained: FloatArray, launch: FloatArray, backward: FloatArray) -> FloatArray:
        """Logarithm of predicted over measured, for so many choices of constants: [choices]."""
        values = (1.0 / sustained, launch, backward)
        places = [_place(value, nodes) for value, nodes in zip(values, NODES, strict=True)]
        seconds = np.zeros(len(launch))
        for corner in product((0, 1), repeat=len(places)):
            weight = np.ones(len(launch))
            for side, (_, part) in zip(corner, places, strict=True):
                weight = weight * (part if side else 1.0 - part)
            seconds += weight * self.seconds[tuple(at + side for side, (at, _) in zip(corner, places, strict=True))]
        logarithms: FloatArray = np.log(seconds / self.measured)
        return logarithms

    def depends_on_launch(self) -> bool:
        """Whether launches show."""
        return bool(self.seconds[1, 1, 1] > (1.0 + VISIBLE) * self.seconds[1, 0, 0])


def _place(values: FloatArray, nodes: FloatArray) -> tuple[IntArray, FloatArray]:
    """The interval of ascending nodes in which values lie, and where in it (beyond the ends it goes on)."""
    at = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, len(nodes) - 2)
    return at, (values - nodes[at]) / (nodes[at + 1] - nodes[at])


def tabulate(case: Case) -> Tabulated | None:
    """Predict one case on the table; None where it cannot be predicted."""
    try:
        scenario, measured = scenario_of(case), case.number("step_time_s")
    except CannotPredictError:
        return None
    own = scenario.cluster.accelerator.name
    return Tabulated(
        case.text("case_id"),
        case.text("source"),
        SIBLINGS.get(own, own),
        HOSTS.get(scenario.framework.name, scenario.framework.name),
        software_of(case).known,
        measured,
        _predicted(scenario),
        extract_step_features(scenario, simulate(scenario).breakdown.launch_share),
    )


def _predicted(scenario: Scenario) -> FloatArray:
    """The table; where the host never shows, one launch stands for all."""
    seconds = np.empty((len(SUSTAINED), len(LAUNCHES), len(BACKWARD)))
    for row, sustained in enumerate(SUSTAINED):
        seconds[row] = _seconds(scenario, sustained, LAUNCHES[0], BACKWARD[0])
    if _seconds(scenario, SUSTAINED[0], LAUNCHES[1], BACKWARD[1]) > (1.0 + VISIBLE) * seconds[0, 0, 0]:
        for place in np.ndindex(seconds.shape):
            row, forward, backward = place
            if forward or backward:
                seconds[place] = _seconds(scenario, SUSTAINED[row], LAUNCHES[forward], BACKWARD[backward])
    return seconds


def _seconds(scenario: Scenario, sustained: float, launch: Seconds, backward: Seconds) -> Seconds:
    """The step under other constants."""
    accelerator = scenario.cluster.accelerator
    pace = replace(accelerator.derating, sustained_ratio=sustained)
    cluster = replace(scenario.cluster, accelerator=replace(accelerator, derating=pace))
    framework = replace(scenario.framework, launch_seconds=launch, backward_launch_seconds=backward)
    result = simulate(replace(scenario, cluster=cluster, framework=framework))
    return predicted_seconds(result)
