"""What is to be simulated: which model, on which cluster, in which layout and schedule, with which costs?"""

from dataclasses import dataclass, field

from clustersim.cost.jitter import Jitter
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.disturbance import Disturbances
from clustersim.parallel.layout import Layout
from clustersim.program.placement import Placement
from clustersim.scenario.settings import CostSettings
from clustersim.schedules.schedule import Schedule
from clustersim.workload.framework import Framework, load_framework
from clustersim.workload.training import Training
from clustersim.workload.transformer import Model


@dataclass(frozen=True, slots=True)
class Setup:
    """Training steps of a model on a cluster; every rank of the layout is one of the cluster's GPUs.

    framework: the software, which launches kernels and holds memory of its own;
    disturbances: what is wrong with the cluster, whose `fabric` already is the disturbed one; jitter: how kernels vary,
    None: not at all; steps: how many successive ones are simulated.
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
    steps: int = 1

    @property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        return self.schedule.placement(self.layout.pp)

    @property
    def microbatches(self) -> int:
        """How many microbatches each replica runs in a step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)
