"""Changes of the layout: its degrees, its data-parallel strategy, and which communication is overlapped."""

from dataclasses import replace
from typing import Any

from clustersim.parallel.data_parallel_strategy import DataParallelStrategy
from clustersim.parallel.layer_partition import evened
from clustersim.scenario.config.data_parallel import DataParallelConfig
from clustersim.scenario.reliability import ElasticPolicy
from clustersim.scenario.scenario import Scenario


def with_layout(scenario: Scenario, **changes: Any) -> Scenario:
    """The scenario with other fields of the layout."""
    return replace(scenario, layout=replace(scenario.layout, **changes))


def named_strategy(scenario: Scenario, name: str) -> DataParallelStrategy:
    """What a name in `layout.data`, such as `zero2`, means in this scenario."""
    return DataParallelConfig.model_validate(name).strategy(scenario.framework.layout_defaults)


def with_tp_factor(scenario: Scenario, factor: int) -> Scenario:
    """The scenario with more tensor and less data parallelism."""
    return with_layout(scenario, tp=scenario.layout.tp * factor, dp=scenario.layout.dp // factor)


def with_cp_factor(scenario: Scenario, factor: int) -> Scenario:
    """The scenario with more context and less data parallelism."""
    return with_layout(scenario, cp=scenario.layout.cp * factor, dp=scenario.layout.dp // factor)


def with_pp_factor(scenario: Scenario, factor: int) -> Scenario:
    """The scenario with more pipeline and less data parallelism, layers spread evenly over stages."""
    layout = scenario.layout
    own_stages = int(layout.encoder_ranks > 0)
    pp = own_stages + (layout.pp - own_stages) * factor
    return with_layout(scenario, pp=pp, dp=layout.dp // factor, layers_per_stage=evened(layout.layers_per_stage))


def with_replicas(scenario: Scenario, replicas: int) -> Scenario:
    """The scenario with fewer replicas, on fewer GPUs, and the batch that its elastic policy allows.

    A batch that is kept is rounded up to as many microbatches for each replica. Raises ClusterSimError if illegal.
    """
    layout, training = scenario.layout, scenario.training
    batch = replicas * training.microbatch
    if scenario.reliability.elastic is ElasticPolicy.SHRINK_BATCH:
        batch *= training.microbatch_count(layout.dp)
    else:
        batch *= -(-training.global_batch // batch)
    dp, gpus = layout.as_configured.dp * replicas // layout.dp, layout.world_size // layout.dp * replicas
    return scenario.with_overrides([f"layout.dp={dp}", f"cluster.gpus={gpus}", f"training.global_batch={batch}"])
