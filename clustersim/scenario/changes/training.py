"""Changes of batch, recomputation, offload, sharding and overheads; slow GPUs and nodes."""

from dataclasses import replace

import numpy as np

from clustersim.hardware.degradation import SlowGpus
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import Recompute
from clustersim.parallel.data_parallel_strategy import with_shard_size
from clustersim.scenario.scenario import Scenario


def with_global_batch_factor(scenario: Scenario, factor: int) -> Scenario:
    """The scenario with the global batch multiplied by a factor, at the same microbatch size."""
    training = scenario.training
    return replace(scenario, training=replace(training, global_batch=factor * training.global_batch))


def with_microbatch_count(scenario: Scenario, count: int) -> Scenario:
    """The scenario with the global batch that gives every replica `count` microbatches."""
    training = scenario.training
    batch = count * scenario.layout.dp * training.microbatch
    return replace(scenario, training=replace(training, global_batch=batch))


def with_microbatch_size(scenario: Scenario, sequences: int) -> Scenario:
    """The scenario with another microbatch size, in sequences, at the same global batch."""
    return replace(scenario, training=replace(scenario.training, microbatch=sequences))


def with_recompute(scenario: Scenario, policy: Recompute) -> Scenario:
    """The scenario with another activation recomputation policy."""
    return replace(scenario, training=replace(scenario.training, recompute=policy))


def with_cuda_graphs(scenario: Scenario) -> Scenario:
    """The scenario with forward and backward captured in CUDA graphs."""
    return replace(scenario, framework=scenario.framework.with_cuda_graphs())


def without_offload(scenario: Scenario) -> Scenario:
    """The scenario without CPU offload."""
    return replace(scenario, training=replace(scenario.training, offload=NO_OFFLOAD))


def without_overheads(scenario: Scenario) -> Scenario:
    """The scenario without the framework's overheads; weight gradients are accumulated as they are computed."""
    training = scenario.training
    return replace(scenario, training=replace(training, overheads=training.overheads.layer_implementation))


def with_dp_shard_size(scenario: Scenario, ranks: int) -> Scenario:
    """The scenario with another shard group size of data parallelism."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, data=with_shard_size(layout.data, ranks)))


def with_slow_gpu(scenario: Scenario, speed: float, rank: int | None = None) -> Scenario:
    """The scenario with one rank's GPU running kernels at a fraction of full speed.

    Without a simulation to identify the most critical GPU, rank defaults to the middle of the world, thus a
    middle stage; the first stage has slack where it has one layer less.
    """
    return _with_slow_gpus(
        scenario,
        (int(scenario.cluster.machine_gpu_ids[scenario.layout.world_size // 2 if rank is None else rank]),),
        speed,
    )


def with_slow_node(scenario: Scenario, speed: float) -> Scenario:
    """The scenario with all GPUs of the middle rank's node running kernels at a fraction of full speed."""
    nodes = scenario.cluster.fabric.node_ids(np.arange(scenario.layout.world_size))
    node_ranks = np.flatnonzero(nodes == nodes[len(nodes) // 2])
    return _with_slow_gpus(scenario, tuple(scenario.cluster.machine_gpu_ids[node_ranks].tolist()), speed)


def _with_slow_gpus(scenario: Scenario, gpu_ids: tuple[int, ...], speed: float) -> Scenario:
    degradations = scenario.degradations
    return replace(
        scenario, degradations=replace(degradations, slow_gpus=(*degradations.slow_gpus, SlowGpus(gpu_ids, speed)))
    )
