"""How is a layout put in one line of words?"""

from typing import TYPE_CHECKING

from clustersim.parallel.data import DataParallelism, NaiveDataParallel, Replicated, Zero
from clustersim.workload.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute

if TYPE_CHECKING:
    from clustersim.scenario import Scenario


def stage_name(number: int) -> str:
    """What a pipeline rank is called."""
    return f"stage {number}"


def layout_line(scenario: "Scenario") -> str:
    """Degrees, strategies and batch, in the order in which people give them."""
    layout, training = scenario.layout, scenario.training
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
    words = [f"{axis} {degree:,}" for axis, degree in degrees.items() if degree > 1]
    words.append(_data(layout.data) if layout.dp > 1 else "")
    words.append(_schedule(scenario) if layout.pp > 1 else "")
    words.append(_recompute(training.recompute))
    words.append(f"{training.precision.compute.value}")
    words.append(f"{training.global_batch:,} sequences of {training.sequence:,} tokens a step")
    words.append(
        f"{scenario.microbatches:,} microbatch{'es' if scenario.microbatches > 1 else ''} of {training.microbatch}"
    )
    return " · ".join(word for word in words if word)


def _data(strategy: DataParallelism) -> str:
    match strategy:
        case Replicated():
            return "DDP"
        case Zero(stage=3):
            return "ZeRO-3 (FSDP)"
        case Zero(stage=stage):
            return f"ZeRO-{stage}"
        case NaiveDataParallel():
            return "torch.nn.DataParallel"


def _schedule(scenario: "Scenario") -> str:
    chunks = scenario.schedule.chunks
    return scenario.schedule.name + (f", {chunks} chunks" if chunks > 1 else "")


def _recompute(policy: Recompute) -> str:
    match policy:
        case NoRecompute():
            return "no recompute"
        case SelectiveRecompute():
            return "selective recompute"
        case FullRecompute(layers=None):
            return "full recompute"
        case FullRecompute(layers=layers):
            return f"recompute of {layers} layer{'' if layers == 1 else 's'} a stage"
