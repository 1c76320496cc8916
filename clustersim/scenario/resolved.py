"""What is to be simulated: which model, on which cluster, in which layout and schedule, with which costs?"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.common.units import Seconds
from clustersim.cost.background_traffic import Traffic
from clustersim.cost.jitter import Jitter
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Disturbances
from clustersim.model.framework import Framework, load_framework
from clustersim.model.training import Training
from clustersim.model.transformer import Model
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import TENSOR
from clustersim.program.placement import Placement
from clustersim.scenario.reliability import Reliability
from clustersim.scenario.settings import CostSettings, EconomicsSettings
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Setup:
    """Training steps of a model on a cluster; every rank of the layout is one of the cluster's GPUs.

    framework: the software, which launches kernels and holds memory of its own;
    disturbances: what is wrong with the cluster, whose `fabric` already is the disturbed one; jitter: how kernels vary,
    None: not at all; traffic: what others send meanwhile; jobs: what trains meanwhile on other GPUs; steps: how many
    successive ones are simulated; economics: what is said of costs and energy; reliability: what is said of failures
    over a run of weeks, which move no step.
    """

    name: str
    model: Model
    cluster: Cluster
    layout: Layout
    schedule: Schedule
    training: Training
    cost: CostSettings = field(default_factory=CostSettings)
    framework: Framework = field(default_factory=load_framework)
    disturbances: Disturbances = field(default_factory=Disturbances)
    jitter: Jitter | None = None
    traffic: tuple[Traffic, ...] = ()
    jobs: tuple["OtherJob", ...] = ()
    steps: int = 1
    economics: EconomicsSettings = field(default_factory=EconomicsSettings)
    reliability: Reliability = field(default_factory=Reliability)

    @property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        return self.schedule.placement(self.layout.pp)

    @property
    def shares_links(self) -> bool:
        """Whether others are on the links for a part of the time: their traffic, or other jobs."""
        return bool(self.traffic or self.jobs)

    @property
    def tensor_beyond_domain(self) -> int:
        """How many tensor-parallel groups reach beyond one NVLink domain."""
        domains = self.cluster.fabric.domains(self.layout.mesh.groups_along(TENSOR))
        return int(np.count_nonzero(domains.min(axis=1) != domains.max(axis=1)))

    @property
    def run_layout(self) -> Layout:
        """The layout with what of it the cluster lets run.

        The user buffers of `tensor_overlap` are CUDA multicast memory, written by peers over NVLink: there are none
        between domains (NVIDIA/TransformerEngine issue 1071; pull request 1470 for domains of several nodes). All
        groups of a step run the same program, so if one reaches beyond its domain none has them.
        """
        split = self.layout.tensor_overlap and self.tensor_beyond_domain > 0
        return replace(self.layout, tensor_overlap=False) if split else self.layout

    @property
    def run_schedule(self) -> Schedule:
        """The schedule, 1F1B's in pairs where tokens travel to experts beside computation; others have them or not."""
        match self.schedule:
            case OneFOneB() | Interleaved() as plain if self.layout.overlap_expert_communication:
                return Overlapped1F1B(plain)
        return self.schedule

    @property
    def microbatches(self) -> int:
        """How many microbatches each replica runs in a step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A job that trains on other GPUs of the machine, step after step.

    setup: its own, on those GPUs, with the machine's disturbances; start: when its first step begins, before this job's
    below zero; path, written, files: as of a scenario.
    """

    setup: Setup
    start: Seconds = 0.0
    path: Path | None = field(default=None, compare=False)
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False)
