"""Of which regime is a step?

What published steps may have been like, or not: on which accelerators, by which software and strategies (kinds), how
far spread and how long (amounts), and what of it makes predictions harder (traits). All of it follows from a scenario
and what its step waits for launches, so whoever asks about a step is told the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from clustersim.model.layer_stack import FullAttention, LayerSpec
from clustersim.model.offload import Offload
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.scenario import Scenario

VISIBLE: Final = 0.05  # of a step: a trait with a smaller share of it is not told


class Trait(Enum):
    """What published steps were found to be harder to predict by."""

    NODES = "several nodes"
    TENSOR = "tensor parallelism across nodes"
    PIPELINE = "a pipeline"
    SHARDED = "sharded parameters"
    LAUNCH = "waiting for kernel launches"


@dataclass(frozen=True, slots=True)
class Facts:
    """accelerators: their names; kinds: software, strategies and formats, in words; amounts: by what they count.

    traits: how much of each there is, from 0 to 1: whether, or the part of the step's time.
    """

    accelerators: frozenset[str]
    kinds: frozenset[str]
    amounts: Mapping[str, int]
    traits: Mapping[Trait, float]

    @property
    def had(self) -> frozenset[str]:
        """Kinds, and the traits that show."""
        return self.kinds | {trait.value for trait, share in self.traits.items() if share >= VISIBLE}


def facts_of(scenario: Scenario, launch_share: float) -> Facts:
    """What a step is like, of which the GPU waits for launches for `launch_share`. Nodes are NVLink domains."""
    layout, several = scenario.layout, _domains(scenario) > 1
    traits = {
        Trait.NODES: float(several),
        Trait.TENSOR: float(scenario.tensor_beyond_domain > 0),
        Trait.PIPELINE: float(layout.is_pipelined),
        Trait.SHARDED: float(layout.data.zero_stage == 3 and layout.dp * layout.cp > 1),
        Trait.LAUNCH: launch_share,
    }
    return Facts(accelerators_of(scenario), kinds_of(scenario), amounts_of(scenario), traits)


def accelerators_of(scenario: Scenario) -> frozenset[str]:
    """Names of the job's accelerators."""
    accelerators, kind = scenario.cluster.kinds()
    return frozenset(accelerators[item].name for item in np.unique(kind[: scenario.layout.world_size]))


def kinds_of(scenario: Scenario) -> frozenset[str]:
    """Software, strategies and formats, in words."""
    return frozenset((*_software(scenario), *_strategies(scenario), *_layers(scenario.model.specs)))


def amounts_of(scenario: Scenario) -> dict[str, int]:
    """How far spread and how long, by what is counted."""
    layout = scenario.layout
    whole = {"GPUs": layout.world_size, "tokens": scenario.training.sequence}
    return whole | {"tp": layout.tp, "cp": layout.cp, "pp": layout.as_configured.pp}


def _domains(scenario: Scenario) -> int:
    return len(np.unique(scenario.cluster.fabric.domains(np.arange(scenario.layout.world_size))))


def _software(scenario: Scenario) -> Iterator[str]:
    yield f"framework {scenario.framework.name}"
    yield f"precision {scenario.training.recipe.name}"
    yield f"attention {scenario.training.attention.value}"
    if scenario.layout.world_size > 1:
        yield f"collectives of {scenario.cluster.library}"
    if scenario.cluster.mixed:
        yield "mixed accelerators"


def _strategies(scenario: Scenario) -> Iterator[str]:
    layout, training = scenario.layout, scenario.training
    if layout.dp * layout.cp > 1:
        naive = isinstance(layout.data, NaiveDataParallel)
        yield (
            "naive data parallelism" if naive else f"ZeRO-{layout.data.zero_stage}" if layout.data.zero_stage else "DDP"
        )
    if layout.is_hybrid_sharded:
        yield "hybrid sharding"
    if layout.is_pipelined:
        yield f"schedule {scenario.schedule.name}"
    if training.lora is not None:
        yield "LoRA"
    yield from _offloaded(training.offload)


def _offloaded(offload: Offload) -> Iterator[str]:
    if offload.activations is not None:
        yield "activations on the host"
    if offload.states is not None:
        yield "optimizer states on the host"


def _layers(specs: tuple[LayerSpec, ...]) -> Iterator[str]:
    """What layers have that not all have."""
    for spec in specs:
        yield f"{spec.block.value.replace('_', ' ')} layers"
        if isinstance(spec.attention, FullAttention) and spec.attention.window is not None:
            yield "sliding windows"
