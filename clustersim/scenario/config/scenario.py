"""What may a scenario file say?

One pydantic section for each part; each gives the frozen dataclass that the inside works with, where it can do so
alone. What needs two sections or another file is put together in `build`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from clustersim.model.framework import Captured
from clustersim.scenario.config.cost import CostSection
from clustersim.scenario.config.degradations import DisturbancesSection, MixedSection, listed
from clustersim.scenario.config.economics import EconomicsSection
from clustersim.scenario.config.layout import LayoutSection
from clustersim.scenario.config.model import ModelSection
from clustersim.scenario.config.placement import PlacementSection
from clustersim.scenario.config.reliability import ReliabilitySection
from clustersim.scenario.config.schedule import ScheduleChoice
from clustersim.scenario.config.training import TrainingSection
from clustersim.scenario.config_reader import Degree, Duration, Name, Section, Shipped, or_none, reads

MOST_STEPS = 10_000


class ClusterSection(Shipped):
    """`cluster`: a shipped cluster or a file, changes to sections of it, the job's GPUs and which ones they are."""

    short: ClassVar[str | None] = "name"
    name: Name | None = None
    """a shipped cluster (`clustersim presets`); left out: needed, or path"""
    gpus: Degree | None = None
    """GPUs of the job; left out: what the layout needs where it gives dp, else the number in the cluster's file"""
    accelerator: Name | None = None
    """GPUs in place of the cluster's own, a file of topologies/accelerators; left out: the cluster's"""
    node: dict[str, Any] | None = None
    """keys of the cluster file's node that change, see [Clusters](clusters.md); left out: the cluster's"""
    fabric: dict[str, Any] | None = None
    """keys of the cluster file's fabric that change; left out: the cluster's"""
    mixed: Annotated[list[MixedSection], reads(listed, "one or a list", of=list[MixedSection] | MixedSection)] = Field(
        []
    )
    """nodes with another accelerator; left out: none"""
    placement: Annotated[PlacementSection | None, BeforeValidator(or_none)] = None
    """which GPUs of the machine the job gets, or none; left out: whole nodes in order"""

    @property
    def changes(self) -> dict[str, Any]:
        """What replaces keys of the cluster's own file."""
        return self.model_dump(include={"accelerator", "node", "fabric"}, exclude_none=True)


class FrameworkSection(Section):
    """`framework`: a shipped one or a file, whether it captures passes in CUDA graphs, whether it compiles layers."""

    short: ClassVar[str | None] = "name"
    name: Name = "pytorch"
    """whose launch times, memory and habits: a file of topologies/frameworks, shipped or one's own"""
    cuda_graphs: bool | Literal["outside_experts"] = False
    """each forward and backward is launched at once; outside_experts: but for what is on the ranks of experts"""
    compiled: bool = False
    """layers are compiled (torch.compile)"""
    launch: Duration | None = None
    """what the host needs to launch a kernel in forward; left out: the record's or the framework's"""
    backward_launch: Duration | None = None
    """the same in backward; left out: the record's or the framework's"""

    @property
    def captured(self) -> Captured:
        """What of passes is in CUDA graphs."""
        if isinstance(self.cuda_graphs, bool):
            return Captured.ALL if self.cuda_graphs else Captured.NOTHING
        return Captured(self.cuda_graphs)


class ScenarioFile(Section):
    """The whole file."""

    name: Name | None = None
    """of the answer; left out: the file's name"""
    model: ModelSection = Field(examples=["llama3-8b"])
    """what is trained"""
    cluster: ClusterSection = Field(examples=["dgx-h100"])
    """on what"""
    layout: LayoutSection = LayoutSection()
    """degrees of parallelism, and how each is done"""
    schedule: ScheduleChoice = ScheduleChoice.model_validate("1f1b")
    """the pipeline schedule, see [Schedules](scenario.md#schedules); left out: 1f1b"""
    training: TrainingSection = Field(examples=["{sequence: 8192, global_batch: 2048}"])
    """what one step does"""
    framework: FrameworkSection = FrameworkSection()
    """the software of the run"""
    cost: CostSection = CostSection()
    """where durations come from"""
    economics: EconomicsSection = EconomicsSection()
    """what the run costs, and what energy it takes; it moves no time"""
    reliability: ReliabilitySection = ReliabilitySection()
    """what breaks over weeks, and what is done about it; it moves no step"""
    disturbances: DisturbancesSection = DisturbancesSection()
    """what is wrong with the cluster"""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    """successive steps that are simulated"""
