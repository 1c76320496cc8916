"""What is simulated: model, cluster, layout, schedule, training step and cost settings, all resolved."""

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
from clustersim.model.framework import Framework
from clustersim.model.framework_files import load_framework
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import TENSOR
from clustersim.program.placement import Placement
from clustersim.scenario.diloco import DilocoSettings
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.scenario.settings import CostSettings, EconomicsSettings
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ResolvedScenario:
    """Training steps of a model on a cluster; every rank of the layout runs on one GPU of the cluster.

    framework: the training software, with its kernel launch times and memory overhead; names_framework: whether
    the scenario says which it is; degradations: faults of the cluster, already applied to the cluster's `fabric`;
    jitter: random variation of kernel times, None: none; background_traffic: flows of others on the network;
    co_scheduled_jobs: other training jobs on the cluster; steps: number of consecutive steps to simulate;
    economics: cost and energy settings; reliability: failure model of a run of weeks, which does not affect step
    times; diloco: how the sites' replicas exchange outer gradients, None: they train in step.
    """

    name: str
    model: TransformerModel
    cluster: Cluster
    layout: Layout
    schedule: Schedule
    training: Training
    cost: CostSettings = field(default_factory=CostSettings)
    framework: Framework = field(default_factory=load_framework)
    names_framework: bool = False
    degradations: Degradations = field(default_factory=Degradations)
    jitter: Jitter | None = None
    background_traffic: tuple[TrafficPattern, ...] = ()
    co_scheduled_jobs: tuple["ResolvedJob", ...] = ()
    steps: int = 1
    economics: EconomicsSettings = field(default_factory=EconomicsSettings)
    reliability: ReliabilityModel = field(default_factory=ReliabilityModel)
    diloco: DilocoSettings | None = None

    @property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        return self.schedule.placement(self.layout.pp)

    @property
    def has_background_load(self) -> bool:
        """Whether links carry time-varying traffic of others: background traffic or co-scheduled jobs."""
        return bool(self.background_traffic or self.co_scheduled_jobs)

    @property
    def cross_domain_tp_group_count(self) -> int:
        """Number of tensor-parallel groups that span several NVLink domains."""
        domains = self.cluster.fabric.domain_ids(self.layout.mesh.groups_along(TENSOR))
        return int(np.count_nonzero(domains.min(axis=1) != domains.max(axis=1)))

    def supports_axis(self, name: str) -> bool:
        """Whether ranks may be divided along an axis: the framework can, or the layout does already."""
        return name in self.framework.supported_layouts.axes or self.layout.all_degrees[name] > 1

    @property
    def effective_layout(self) -> Layout:
        """The layout, without features that the cluster cannot run.

        The user buffers of `tp_comm_overlap` are CUDA multicast memory, written by peers over NVLink, which does not
        work across domains (NVIDIA/TransformerEngine issue 1071; pull request 1470 for multi-node domains). All
        groups of a step run the same program, so user buffers are off if any group spans several domains.
        """
        lacks_user_buffers = self.layout.tp_comm_overlap and self.cross_domain_tp_group_count > 0
        return replace(self.layout, tp_comm_overlap=False) if lacks_user_buffers else self.layout

    @property
    def effective_schedule(self) -> Schedule:
        """The schedule; 1F1B with overlapped forward/backward pairs where MoE communication is overlapped."""
        match self.schedule:
            case OneFOneB() | Interleaved() as base_schedule if self.layout.overlap_moe_expert_parallel_comm:
                return Overlapped1F1B(base_schedule)
        return self.schedule

    @property
    def microbatch_count(self) -> int:
        """Number of microbatches per replica and step."""
        return self.training.microbatch_count(self.layout.dp)


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job that trains concurrently on other GPUs of the cluster, step after step.

    resolved: its scenario on those GPUs, with the cluster's degradations; start_offset: seconds from the start of
    this job to the start of its first step, may be negative; path, raw_mapping, files: as of `Scenario`.
    """

    resolved: ResolvedScenario
    start_offset: Seconds = 0.0
    path: Path | None = field(default=None, compare=False)
    raw_mapping: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False)
