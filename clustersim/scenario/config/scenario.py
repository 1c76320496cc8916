"""What may a scenario file say?

One pydantic section for each part; each gives the frozen dataclass that the inside works with, where it can do so
alone. What needs two sections or another file is put together in `build`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from clustersim.model.framework import GraphCapture
from clustersim.scenario.config.cost import CostConfig
from clustersim.scenario.config.degradations import DegradationsConfig, MixedNodesConfig, as_list
from clustersim.scenario.config.economics import EconomicsConfig
from clustersim.scenario.config.layout import LayoutConfig
from clustersim.scenario.config.model import ModelConfig
from clustersim.scenario.config.placement import PlacementConfig
from clustersim.scenario.config.reliability import ReliabilityConfig
from clustersim.scenario.config.schedule import ScheduleConfig
from clustersim.scenario.config.training import TrainingConfig
from clustersim.scenario.config_reader import (
    ConfigModel,
    Degree,
    Duration,
    NonEmptyText,
    PresetOrPathConfig,
    none_from_word,
    value_parser,
)

MAX_STEPS = 10_000


class ClusterConfig(PresetOrPathConfig):
    """`cluster`: a shipped cluster or a file, changes to sections of it, the job's GPUs and which ones they are."""

    shorthand_key: ClassVar[str | None] = "name"
    name: NonEmptyText | None = None
    """a shipped cluster (`clustersim presets`); left out: needed, or path"""
    gpus: Degree | None = None
    """GPUs of the job; left out: what the layout needs where it gives dp, else the number in the cluster's file"""
    accelerator: NonEmptyText | None = None
    """GPUs in place of the cluster's own, a file of topologies/accelerators; left out: the cluster's"""
    node: dict[str, Any] | None = None
    """keys of the cluster file's node that change, see [Clusters](clusters.md); left out: the cluster's"""
    fabric: dict[str, Any] | None = None
    """keys of the cluster file's fabric that change; left out: the cluster's"""
    mixed: Annotated[
        list[MixedNodesConfig],
        value_parser(as_list, "one or a list", schema_type=list[MixedNodesConfig] | MixedNodesConfig),
    ] = Field([])
    """nodes with another accelerator; left out: none"""
    placement: Annotated[PlacementConfig | None, BeforeValidator(none_from_word)] = None
    """which GPUs of the machine the job gets, or none; left out: whole nodes in order"""

    @property
    def overrides(self) -> dict[str, Any]:
        """What replaces keys of the cluster's own file."""
        return self.model_dump(include={"accelerator", "node", "fabric"}, exclude_none=True)


class FrameworkConfig(ConfigModel):
    """`framework`: a shipped one or a file, whether it captures passes in CUDA graphs, whether it compiles layers."""

    shorthand_key: ClassVar[str | None] = "name"
    name: NonEmptyText = "pytorch"
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
    def cuda_graph_scope(self) -> GraphCapture:
        """What of passes is in CUDA graphs."""
        if isinstance(self.cuda_graphs, bool):
            return GraphCapture.ALL if self.cuda_graphs else GraphCapture.NOTHING
        return GraphCapture(self.cuda_graphs)


class ScenarioConfig(ConfigModel):
    """The whole file."""

    name: NonEmptyText | None = None
    """of the answer; left out: the file's name"""
    model: ModelConfig = Field(examples=["llama3-8b"])
    """what is trained"""
    cluster: ClusterConfig = Field(examples=["dgx-h100"])
    """on what"""
    layout: LayoutConfig = LayoutConfig()
    """degrees of parallelism, and how each is done"""
    schedule: ScheduleConfig = ScheduleConfig.model_validate("1f1b")
    """the pipeline schedule, see [Schedules](scenario.md#schedules); left out: 1f1b"""
    training: TrainingConfig = Field(examples=["{sequence: 8192, global_batch: 2048}"])
    """what one step does"""
    framework: FrameworkConfig = FrameworkConfig()
    """the software of the run"""
    cost: CostConfig = CostConfig()
    """where durations come from"""
    economics: EconomicsConfig = EconomicsConfig()
    """what the run costs, and what energy it takes; it moves no time"""
    reliability: ReliabilityConfig = ReliabilityConfig()
    """what breaks over weeks, and what is done about it; it moves no step"""
    disturbances: DegradationsConfig = DegradationsConfig()
    """what is wrong with the cluster"""
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1
    """successive steps that are simulated"""
