"""Changes of batch, recomputation, offload, adapters, attention and overheads."""

from dataclasses import replace
from typing import Any

from clustersim.model.offload import NO_OFFLOAD, Offload
from clustersim.model.overheads import Accumulation
from clustersim.model.training import Recompute, Training
from clustersim.scenario.scenario import Scenario


def with_training(scenario: Scenario, **changes: Any) -> Scenario:
    """The scenario with other fields of the training."""
    return replace(scenario, training=replace(scenario.training, **changes))


def with_global_batch_factor(scenario: Scenario, factor: int) -> Scenario:
    """The scenario with the global batch multiplied by a factor, at the same microbatch size."""
    return with_training(scenario, global_batch=factor * scenario.training.global_batch)


def with_microbatch_count(scenario: Scenario, count: int) -> Scenario:
    """The scenario with the global batch that gives every replica `count` microbatches."""
    return with_training(scenario, global_batch=count * scenario.layout.dp * scenario.training.microbatch)


def with_microbatch_size(scenario: Scenario, sequences: int) -> Scenario:
    """The scenario with another microbatch size, in sequences, at the same global batch."""
    return with_training(scenario, microbatch=sequences)


def with_recompute(scenario: Scenario, policy: Recompute) -> Scenario:
    """The scenario with another activation recomputation policy."""
    return with_training(scenario, recompute=policy)


def with_offload(scenario: Scenario, offload: Offload) -> Scenario:
    """The scenario with other states or activations on the host."""
    return with_training(scenario, offload=offload)


def without_offload(scenario: Scenario) -> Scenario:
    """The scenario without CPU offload."""
    return with_offload(scenario, NO_OFFLOAD)


def has_overheads(training: Training) -> bool:
    """Whether there are overheads that `without_overheads` removes; accumulation by what it is, stated or implied."""
    others = replace(training.overheads, accumulation=None)
    return others != training.overheads.layer_implementation or training.accumulation is not Accumulation.FUSED


def without_overheads(scenario: Scenario) -> Scenario:
    """The scenario without the framework's overheads; weight gradients are accumulated as they are computed."""
    overheads = replace(scenario.training.overheads.layer_implementation, accumulation=Accumulation.FUSED)
    return with_training(scenario, overheads=overheads)
