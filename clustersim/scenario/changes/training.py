"""What would a scenario be with other microbatches, recomputation or sharding, without some work, or a slow rank?"""

from dataclasses import replace

import numpy as np

from clustersim.hardware.degradation import SlowGpus
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import Recompute
from clustersim.parallel.data_parallel_strategy import with_shard_size
from clustersim.scenario.scenario import Scenario


def with_global_batch_factor(scenario: Scenario, factor: int) -> Scenario:
    """So many times the sequences in a step: every replica runs so many times the microbatches."""
    training = scenario.training
    return replace(scenario, training=replace(training, global_batch=factor * training.global_batch))


def with_microbatch_count(scenario: Scenario, count: int) -> Scenario:
    """A batch in which every replica runs so many microbatches."""
    training = scenario.training
    batch = count * scenario.layout.dp * training.microbatch
    return replace(scenario, training=replace(training, global_batch=batch))


def with_microbatch_size(scenario: Scenario, sequences: int) -> Scenario:
    """Microbatches of so many sequences, in the same batch."""
    return replace(scenario, training=replace(scenario.training, microbatch=sequences))


def with_recompute(scenario: Scenario, policy: Recompute) -> Scenario:
    """Another choice of activations that are computed again."""
    return replace(scenario, training=replace(scenario.training, recompute=policy))


def with_cuda_graphs(scenario: Scenario) -> Scenario:
    """Passes are captured in CUDA graphs."""
    return replace(scenario, framework=scenario.framework.with_cuda_graphs())


def without_offload(scenario: Scenario) -> Scenario:
    """Everything stays on the device."""
    return replace(scenario, training=replace(scenario.training, offload=NO_OFFLOAD))


def without_overheads(scenario: Scenario) -> Scenario:
    """Nothing is done beside the model: weight gradients are added up as they are made."""
    training = scenario.training
    return replace(scenario, training=replace(training, overheads=training.overheads.layer_implementation))


def with_dp_shard_size(scenario: Scenario, ranks: int) -> Scenario:
    """What data parallelism shards is cut over so many of the ranks that hold the same weights."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, data=with_shard_size(layout.data, ranks)))


def with_slow_gpu(scenario: Scenario, speed: float, rank: int | None = None) -> Scenario:
    """The kernels of one rank's GPU run at a part of their speed.

    Without a simulation that says on which GPU it matters most it is one in the middle of the world, so of a middle
    stage; the first has spare time where it has a layer less.
    """
    return _with_slow_gpus(
        scenario,
        (int(scenario.cluster.machine_gpu_ids[scenario.layout.world_size // 2 if rank is None else rank]),),
        speed,
    )


def with_slow_node(scenario: Scenario, speed: float) -> Scenario:
    """The kernels of all GPUs of a node in the middle of the world run at a part of their speed."""
    nodes = scenario.cluster.fabric.node_ids(np.arange(scenario.layout.world_size))
    node_ranks = np.flatnonzero(nodes == nodes[len(nodes) // 2])
    return _with_slow_gpus(scenario, tuple(scenario.cluster.machine_gpu_ids[node_ranks].tolist()), speed)


def _with_slow_gpus(scenario: Scenario, gpu_ids: tuple[int, ...], speed: float) -> Scenario:
    degradations = scenario.degradations
    return replace(
        scenario, degradations=replace(degradations, slow_gpus=(*degradations.slow_gpus, SlowGpus(gpu_ids, speed)))
    )
