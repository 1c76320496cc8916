"""The catalogue of changes: all that may be different in a scenario, one thing at a time.

The order is that of results: each question gives its changes in the order of the catalogue.
"""

from typing import Final

from clustersim.scenario.changes.catalogue import (
    cluster_speed,
    experts,
    framework_options,
    memory_use,
    misconfigurations,
    remedies_communication,
    remedies_compute,
    remedies_pipeline,
    run_reliability,
    strengths,
    training_options,
)
from clustersim.scenario.changes.scenario_change import ChangeUse, ContinuousChange, ScenarioChange

CATALOGUE: Final[tuple[ScenarioChange, ...]] = (
    *remedies_compute.HOST_REMEDIES,
    *remedies_compute.KERNEL_REMEDIES,
    *remedies_compute.PRECISION_REMEDIES,
    *remedies_compute.MEMORY_REMEDIES,
    *remedies_pipeline.PIPELINE_REMEDIES,
    *remedies_communication.OVERLAP_REMEDIES,
    *remedies_communication.SHARDING_REMEDIES,
    *remedies_communication.EXPERT_REMEDIES,
    *cluster_speed.LINK_CHANGES,
    *cluster_speed.KERNEL_CHANGES,
    *experts.EXPERT_CHANGES,
    *cluster_speed.NODE_CHANGES,
    *training_options.BATCH_CHANGES,
    *cluster_speed.GPU_CHANGES,
    *training_options.RECOMPUTE_CHANGES,
    *training_options.OVERHEAD_CHANGES,
    *misconfigurations.MISCONFIGURATIONS,
    *framework_options.OVERLAP_SWITCHES,
    *framework_options.KERNEL_SWITCHES,
    *framework_options.REMOVALS,
    *memory_use.TRAINING_LADDERS,
    *memory_use.LAYOUT_LADDERS,
    *run_reliability.RUN_CHANGES,
)

CONTINUOUS_CHANGES: Final[tuple[ContinuousChange, ...]] = strengths.STRENGTHS


def changes_for(use: ChangeUse) -> tuple[ScenarioChange, ...]:
    """The discrete changes that a question selects."""
    return tuple(change for change in CATALOGUE if use in change.uses)
