"""What is to be simulated: which model, on which cluster, in which layout and schedule, with which costs?"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.common.units import Seconds
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.cost.jitter import Jitter
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Degradations
from clustersim.model.framework import Framework, load_framework
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import TENSOR
from clustersim.program.placement import Placement
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.scenario.settings import CostSettings, EconomicsSettings
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ResolvedScenario:
    """Training steps of a model on a cluster; every rank of the layout is one of the cluster's GPUs.

    framework: the software, which launches kernels and holds memory of its own;
    disturbances: what is wrong with the cluster, whose `fabric` already is the disturbed one; jitter: how kernels vary,
    None: not at all; traffic: what others send meanwhile; jobs: what trains meanwhile on other GPUs; steps: how many
    successive ones are simulated; economics: what is said of costs and energy; reliability: what is said of failures
    over a run of weeks, which move no step.
    """

    name: str
    model: TransformerModel
    cluster: Cluster
    layout: Layout
    schedule: Schedule
    training: Training
    cost: CostSettings = field(default_factory=CostSettings)
    framework: Framework = field(default_factory=load_framework)
    degradations: Degradations = field(default_factory=Degradations)
    jitter: Jitter | None = None
    background_traffic: tuple[TrafficPattern, ...] = ()
    co_scheduled_jobs: tuple["ResolvedJob", ...] = ()
    steps: int = 1
    economics: EconomicsSettings = field(default_factory=EconomicsSettings)
    reliability: ReliabilityModel = field(default_factory=ReliabilityModel)

    @property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        return self.schedule.placement(self.layout.pp)

    @property
    def has_background_load(self) -> bool:
        """Whether others are on the links for a part of the time: their traffic, or other jobs."""
        return bool(self.background_traffic or self.co_scheduled_jobs)

    @property
    def cross_domain_tp_group_count(self) -> int:
        """How many tensor-parallel groups reach beyond one NVLink domain."""
        domains = self.cluster.fabric.domain_ids(self.layout.mesh.groups_along(TENSOR))
        return int(np.count_nonzero(domains.min(axis=1) != domains.max(axis=1)))

    @property
    def effective_layout(self) -> Layout:
        """The layout with what of it the cluster lets run.

        The user buffers of `tensor_overlap` are CUDA multicast memory, written by peers over NVLink: there are none
        between domains (NVIDIA/TransformerEngine issue 1071; pull request 1470 for domains of several nodes). All
        groups of a step run the same program, so if one reaches beyond its domain none has them.
        """
        lacks_user_buffers = self.layout.tensor_overlap and self.cross_domain_tp_group_count > 0
        return replace(self.layout, tensor_overlap=False) if lacks_user_buffers else self.layout

    @property
    def effective_schedule(self) -> Schedule:
        """The schedule, 1F1B's in pairs where tokens travel to experts beside computation; others have them or not."""
        match self.schedule:
            case OneFOneB() | Interleaved() as base_schedule if self.layout.overlap_expert_communication:
                return Overlapped1F1B(base_schedule)
        return self.schedule

    @property
    def microbatch_count(self) -> int:
        """How many microbatches each replica runs in a step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job that trains on other GPUs of the machine, step after step.

    setup: its own, on those GPUs, with the machine's disturbances; start: when its first step begins, before this job's
    below zero; path, written, files: as of a scenario.
    """

    resolved: ResolvedScenario
    start_offset: Seconds = 0.0
    path: Path | None = field(default=None, compare=False)
    raw_mapping: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False)
