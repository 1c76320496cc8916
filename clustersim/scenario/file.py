"""What may a scenario file say?

One pydantic section for each part; each gives the frozen dataclass that the inside works with, where it can do so
alone. What needs two sections or another file is put together in `build`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from clustersim.scenario.disturbances import DisturbancesSection, MixedSection, listed
from clustersim.scenario.section import (
    Degree,
    Duration,
    Name,
    Section,
    Shipped,
    or_none,
)
from clustersim.scenario.sections.cost import CostSection
from clustersim.scenario.sections.economics import EconomicsSection
from clustersim.scenario.sections.layout import LayoutSection
from clustersim.scenario.sections.model import ModelSection
from clustersim.scenario.sections.placement import PlacementSection
from clustersim.scenario.sections.reliability import ReliabilitySection
from clustersim.scenario.sections.schedule import ScheduleChoice
from clustersim.scenario.sections.training import TrainingSection
from clustersim.workload.framework import Captured

MOST_STEPS = 10_000


class ClusterSection(Shipped):
    """`cluster`: a shipped cluster or a file, changes to sections of it, the job's GPUs and which ones they are."""

    short: ClassVar[str | None] = "name"
    name: Name | None = None
    gpus: Degree | None = None
    accelerator: Name | None = None
    node: dict[str, Any] | None = None
    fabric: dict[str, Any] | None = None
    mixed: Annotated[list[MixedSection], BeforeValidator(listed)] = Field([])
    placement: Annotated[PlacementSection | None, BeforeValidator(or_none)] = None

    @property
    def changes(self) -> dict[str, Any]:
        """What replaces keys of the cluster's own file."""
        return self.model_dump(include={"accelerator", "node", "fabric"}, exclude_none=True)


class FrameworkSection(Section):
    """`framework`: a shipped one or a file, whether it captures passes in CUDA graphs, whether it compiles layers.

    cuda_graphs: outside_experts: all of a pass but what is done on the ranks of experts, and sent there; launch,
    backward_launch: seconds that the host needs for a kernel, whatever the framework's file or a record says.
    """

    short: ClassVar[str | None] = "name"
    name: Name = "pytorch"
    cuda_graphs: bool | Literal["outside_experts"] = False
    compiled: bool = False
    launch: Duration | None = None
    backward_launch: Duration | None = None

    @property
    def captured(self) -> Captured:
        """What of passes is in CUDA graphs."""
        if isinstance(self.cuda_graphs, bool):
            return Captured.ALL if self.cuda_graphs else Captured.NOTHING
        return Captured(self.cuda_graphs)


class ScenarioFile(Section):
    """The whole file."""

    name: Name | None = None
    model: ModelSection = Field(examples=["llama3-8b"])
    cluster: ClusterSection = Field(examples=["dgx-h100"])
    layout: LayoutSection = LayoutSection()
    schedule: ScheduleChoice = ScheduleChoice.model_validate("1f1b")
    training: TrainingSection = Field(examples=["{sequence: 8192, global_batch: 2048}"])
    framework: FrameworkSection = FrameworkSection()
    cost: CostSection = CostSection()
    economics: EconomicsSection = EconomicsSection()
    reliability: ReliabilitySection = ReliabilitySection()
    disturbances: DisturbancesSection = DisturbancesSection()
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
