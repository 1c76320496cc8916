"""What would a scenario be with other microbatches, recomputation or sharding, without some work, or a slow rank?"""

from dataclasses import replace

import numpy as np

from clustersim.hardware.degradation import Slow
from clustersim.model.offload import NOTHING
from clustersim.model.training import Recompute
from clustersim.parallel.data_parallel_strategy import with_shard_size
from clustersim.scenario.scenario import Scenario


def with_batch(scenario: Scenario, times: int) -> Scenario:
    """So many times the sequences in a step: every replica runs so many times the microbatches."""
    training = scenario.training
    return replace(scenario, training=replace(training, global_batch=times * training.global_batch))


def with_microbatches(scenario: Scenario, number: int) -> Scenario:
    """A batch in which every replica runs so many microbatches."""
    training = scenario.training
    batch = number * scenario.layout.dp * training.microbatch
    return replace(scenario, training=replace(training, global_batch=batch))


def with_microbatch(scenario: Scenario, sequences: int) -> Scenario:
    """Microbatches of so many sequences, in the same batch."""
    return replace(scenario, training=replace(scenario.training, microbatch=sequences))


def with_recompute(scenario: Scenario, policy: Recompute) -> Scenario:
    """Another choice of activations that are computed again."""
    return replace(scenario, training=replace(scenario.training, recompute=policy))


def with_cuda_graphs(scenario: Scenario) -> Scenario:
    """Passes are captured in CUDA graphs."""
    return replace(scenario, framework=scenario.framework.with_graphs())


def without_offload(scenario: Scenario) -> Scenario:
    """Everything stays on the device."""
    return replace(scenario, training=replace(scenario.training, offload=NOTHING))


def without_overheads(scenario: Scenario) -> Scenario:
    """Nothing is done beside the model: weight gradients are added up as they are made."""
    training = scenario.training
    return replace(scenario, training=replace(training, overheads=training.overheads.of_layers))


def with_dp_shard_size(scenario: Scenario, ranks: int) -> Scenario:
    """What data parallelism shards is cut over so many of the ranks that hold the same weights."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, data=with_shard_size(layout.data, ranks)))


def with_slow_gpu(scenario: Scenario, speed: float, rank: int | None = None) -> Scenario:
    """The kernels of one rank's GPU run at a part of their speed.

    Without a simulation that says on which GPU it matters most it is one in the middle of the world, so of a middle
    stage; the first has spare time where it has a layer less.
    """
    return _slowed(
        scenario, (int(scenario.cluster.places[scenario.layout.world_size // 2 if rank is None else rank]),), speed
    )


def with_slow_node(scenario: Scenario, speed: float) -> Scenario:
    """The kernels of all GPUs of a node in the middle of the world run at a part of their speed."""
    nodes = scenario.cluster.fabric.nodes(np.arange(scenario.layout.world_size))
    there = np.flatnonzero(nodes == nodes[len(nodes) // 2])
    return _slowed(scenario, tuple(scenario.cluster.places[there].tolist()), speed)


def _slowed(scenario: Scenario, places: tuple[int, ...], speed: float) -> Scenario:
    disturbances = scenario.disturbances
    return replace(scenario, disturbances=replace(disturbances, slow=(*disturbances.slow, Slow(places, speed))))
