"""What are the features of a step?

Accelerators; software, strategies and formats (categories); scale and sequence length (quantities); and
features that make predictions harder. All of it follows from a scenario and the time breakdown of its step,
so results are reproducible from these alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from clustersim.model.layer_stack import LayerSpec
from clustersim.model.offload import Offload
from clustersim.model.transformer import TransformerModel
from clustersim.scenario import Scenario

MIN_VISIBLE_SHARE: Final = 0.05  # features with a smaller share of the step are not reported


class Feature(Enum):
    """Features by which published steps were found to be harder to predict."""

    NODES = "multi-node"
    TENSOR = "cross-node tensor parallelism"
    PIPELINE = "pipelined"
    SHARDED = "sharded parameters"
    LAUNCH = "launch-bound"


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Features of a step.

    accelerators: their names; categories: labels of software, strategies and formats; quantities: by what they
    count; feature_shares: share of each feature from 0 to 1: an indicator, or a fraction of the step's time;
    states_software: whether the scenario names its framework.
    """

    accelerators: frozenset[str]
    categories: frozenset[str]
    quantities: Mapping[str, int]
    feature_shares: Mapping[Feature, float]
    states_software: bool = True

    @property
    def all_categories(self) -> frozenset[str]:
        """Categories, and the labels of visible features."""
        return self.categories | {
            feature.value for feature, share in self.feature_shares.items() if share >= MIN_VISIBLE_SHARE
        }


def extract_step_features(scenario: Scenario, launch_share: float) -> StepFeatures:
    """Features of a step. Nodes are NVLink domains, which are connected by a network only."""
    layout, is_multi_domain = scenario.layout, _domain_count(scenario) > 1
    feature_shares = {
        Feature.NODES: float(is_multi_domain),
        Feature.TENSOR: float(scenario.cross_domain_tp_group_count > 0),
        Feature.PIPELINE: float(layout.is_pipelined),
        Feature.SHARDED: float(layout.data.zero_stage == 3 and layout.dp * layout.cp > 1),
        Feature.LAUNCH: launch_share,
    }
    return StepFeatures(
        accelerator_names(scenario),
        step_categories(scenario),
        step_quantities(scenario),
        feature_shares,
        scenario.names_framework,
    )


def accelerator_names(scenario: Scenario) -> frozenset[str]:
    """Names of the job's accelerators."""
    accelerators, kind = scenario.cluster.accelerator_kinds()
    return frozenset(accelerators[index].name for index in np.unique(kind[: scenario.layout.world_size]))


def step_categories(scenario: Scenario) -> frozenset[str]:
    """Labels of software, strategies and formats."""
    return frozenset(
        (
            *_software_categories(scenario),
            *_strategy_categories(scenario),
            *_layer_categories(scenario.model.distinct_specs),
            *_image_categories(scenario.model),
        )
    )


def step_quantities(scenario: Scenario) -> dict[str, int]:
    """Degrees of parallelism and sequence length, by what they count."""
    layout = scenario.layout
    sizes = {"GPUs": layout.world_size, "tokens": scenario.training.sequence}
    return sizes | {"tp": layout.tp, "cp": layout.cp, "pp": layout.as_configured.pp}


def _domain_count(scenario: Scenario) -> int:
    return len(np.unique(scenario.cluster.fabric.domain_ids(np.arange(scenario.layout.world_size))))


def _software_categories(scenario: Scenario) -> Iterator[str]:
    yield f"framework {scenario.framework.name}"
    yield f"precision {scenario.training.recipe.name}"
    yield f"attention {scenario.training.attention.value}"
    if scenario.layout.world_size > 1:
        yield f"collectives of {scenario.cluster.library}"
    if scenario.cluster.accelerator_overrides:
        yield "mixed accelerators"


def _strategy_categories(scenario: Scenario) -> Iterator[str]:
    layout, training = scenario.layout, scenario.training
    if layout.dp * layout.cp > 1:
        yield (
            "naive data parallelism"
            if layout.data.is_single_process
            else f"ZeRO-{layout.data.zero_stage}"
            if layout.data.zero_stage
            else "DDP"
        )
    if layout.is_hybrid_sharded:
        yield "hybrid sharding"
    if layout.is_pipelined:
        yield f"schedule {scenario.schedule.name}"
    if training.lora is not None:
        yield "LoRA"
    yield from _offload_categories(training.offload)


def _offload_categories(offload: Offload) -> Iterator[str]:
    if offload.activations is not None:
        yield "activations on the host"
    if offload.states is not None:
        yield "optimizer states on the host"


def _layer_categories(specs: tuple[LayerSpec, ...]) -> Iterator[str]:
    """Labels of layer types that not all models have."""
    for spec in specs:
        yield f"{spec.block.value.replace('_', ' ')} layers"
        if spec.attention is not None and spec.attention.window is not None:
            yield "sliding windows"
        if spec.attention is not None and not spec.attention.causal:
            yield "attention without a mask"
        yield from (mixer.label for mixer in spec.mixers if mixer != spec.attention)
        if spec.modulation is not None:
            yield "modulated layers"


def _image_categories(model: TransformerModel) -> Iterator[str]:
    """Labels of what only models of images have."""
    if model.patches is not None:
        yield "images"
    if model.encoder is not None:
        yield "an encoder of images"
        yield from _layer_categories(model.encoder.model.distinct_specs)
        if model.gradients.has_frozen or model.encoder.model.gradients.has_frozen:
            yield "frozen towers"
