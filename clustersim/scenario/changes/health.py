"""Changes of the health of GPUs and NICs: slow ones, and kernels whose duration varies."""

from dataclasses import replace

import numpy as np

from clustersim.cost.jitter import Distribution, Jitter
from clustersim.hardware.degradation import SlowGpus
from clustersim.scenario.scenario import Scenario


def middle_rank(scenario: Scenario) -> int:
    """A rank of a middle stage; the first stage has slack where it has one layer less."""
    return scenario.layout.world_size // 2


def with_slow_gpu(scenario: Scenario, speed: float, rank: int | None = None) -> Scenario:
    """The scenario with one rank's GPU running kernels at a fraction of full speed.

    rank: None is the middle one, where no simulation says which is the most critical.
    """
    slow_rank = middle_rank(scenario) if rank is None else rank
    return _with_slow_gpus(scenario, (int(scenario.cluster.machine_gpu_ids[slow_rank]),), speed)


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


def with_slow_nic(scenario: Scenario, bandwidth_fraction: float) -> Scenario:
    """The scenario with the middle rank's NIC, alone of all, at a fraction of its bandwidth."""
    gpu = int(scenario.cluster.machine_gpu_ids[middle_rank(scenario)])
    return scenario.with_overrides([f"degradations.nics=[{{gpu: {gpu}, bandwidth: {bandwidth_fraction!r}}}]"])


def without_stragglers(scenario: Scenario) -> Scenario:
    """The scenario without its slow GPUs and jitter."""
    return replace(scenario, degradations=replace(scenario.degradations, slow_gpus=()), jitter=None)


def with_jitter(scenario: Scenario, std: float) -> Scenario:
    """The scenario with another standard deviation of the duration factor, of its own distribution; 0: no jitter."""
    base_jitter = scenario.jitter or Jitter(std, Distribution.NORMAL)
    return replace(scenario, jitter=replace(base_jitter, std=std) if std else None)
