"""What may a scenario file contain? The root config model.

Each section is one pydantic model, which builds the frozen dataclass that the simulator uses where that needs
no other input. Objects that depend on two sections or on another file are built in `loaders`.
"""

from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from clustersim.model.framework import GraphCapture
from clustersim.scenario.config.cost import CostConfig
from clustersim.scenario.config.degradations import DegradationsConfig, MixedNodesConfig, as_list
from clustersim.scenario.config.diloco import DilocoConfig
from clustersim.scenario.config.economics import EconomicsConfig
from clustersim.scenario.config.layout import LayoutConfig
from clustersim.scenario.config.model import TowersConfig
from clustersim.scenario.config.placement import PlacementConfig
from clustersim.scenario.config.reliability import ReliabilityConfig
from clustersim.scenario.config.schedule import ScheduleConfig
from clustersim.scenario.config.training import TrainingConfig
from clustersim.scenario.config_reader import (
    AcceleratorSource,
    ConfigModel,
    Degree,
    Duration,
    NonEmptyText,
    PresetOrPathConfig,
    config_error,
    none_from_word,
    value_parser,
)

MAX_STEPS = 10_000


class ClusterConfig(PresetOrPathConfig):
    """`cluster`: a packaged cluster or a file, overrides of its sections, the job's GPUs and their placement."""

    shorthand_key: ClassVar[str | None] = "name"
    name: NonEmptyText | None = None
    """a packaged cluster (`clustersim presets`); left out: needed, or path"""
    gpus: Degree | None = None
    """GPUs of the job; left out: what the layout needs if dp is given, else the GPU count in the cluster's file"""
    accelerator: AcceleratorSource | None = None
    """replaces the cluster's GPUs; left out: the cluster's"""
    node: dict[str, Any] | None = None
    """overrides of the cluster file's node section, see [Clusters](clusters.md); left out: the cluster's"""
    fabric: dict[str, Any] | None = None
    """overrides of the cluster file's fabric section; left out: the cluster's"""
    mixed: Annotated[
        list[MixedNodesConfig],
        value_parser(as_list, "one or a list", schema_type=list[MixedNodesConfig] | MixedNodesConfig),
    ] = Field([])
    """nodes with another accelerator; left out: none"""
    placement: Annotated[PlacementConfig | None, BeforeValidator(none_from_word)] = None
    """which GPUs of the cluster the job gets, or none; left out: full nodes in order"""

    @property
    def overrides(self) -> dict[str, Any]:
        """Overrides of keys of the cluster's file."""
        return self.model_dump(include={"accelerator", "node", "fabric"}, exclude_none=True)


def _parse_version(value: object) -> object:
    """A version as text; YAML reads 2025-03-01 as a date, and of 25.10 it would lose the last zero."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        raise config_error(f"{value} is a number; write the version in quotes")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class FrameworkConfig(ConfigModel):
    """`framework`: a packaged one or a file, CUDA graph capture and compilation."""

    shorthand_key: ClassVar[str | None] = "name"
    name: NonEmptyText = "pytorch"
    """source of launch times, memory overhead and defaults: a file of topologies/frameworks, packaged or your own"""
    version: Annotated[
        NonEmptyText | None, value_parser(_parse_version, "a version", "2025-03-01", schema_type=str | int)
    ] = None
    """of the software: a release or the date of its code, as its file has them; left out: the newest"""
    recipe: NonEmptyText | None = None
    """of the software, one of the file's `recipes`, such as performance of megatron-bridge; what it sets for a model
    (dispatcher, CUDA graphs, overlaps, recomputation) applies where the scenario says nothing; left out: the file as
    it is
    """
    cuda_graphs: bool | Literal["outside_experts"] = False
    """forward and backward are captured in CUDA graphs; outside_experts: except kernels on expert-parallel ranks"""
    torch_compile: bool = False
    """layers are compiled (torch.compile)"""
    numa_binding: bool | None = None
    """each rank runs on the cores next to its GPU (numactl, bindpcie, torchrun's `--numa-binding`), for launches of
    models with experts; left out: as the recipe launches them, else not
    """
    launch: Duration | None = None
    """host time to launch one kernel in forward; left out: the record's or the framework's"""
    backward_launch: Duration | None = None
    """the same in backward; left out: the record's or the framework's"""

    @property
    def cuda_graph_scope(self) -> GraphCapture:
        """Which kernels of forward and backward passes are captured in CUDA graphs."""
        if isinstance(self.cuda_graphs, bool):
            return GraphCapture.ALL if self.cuda_graphs else GraphCapture.NOTHING
        return GraphCapture(self.cuda_graphs)


class ScenarioConfig(ConfigModel):
    """The root of the scenario file."""

    name: NonEmptyText | None = None
    """of the result; left out: the file's name"""
    model: TowersConfig = Field(examples=["llama3-8b"])
    """the model to train"""
    cluster: ClusterConfig = Field(examples=["dgx-h100"])
    """the cluster to train on"""
    layout: LayoutConfig = LayoutConfig()
    """degrees of parallelism, and options of each"""
    schedule: ScheduleConfig = ScheduleConfig.model_validate("1f1b")
    """the pipeline schedule, see [Schedules](scenario.md#schedules); left out: 1f1b"""
    training: TrainingConfig = Field(examples=["{sequence: 8192, global_batch: 2048}"])
    """one training step: batch, sequence, precision, optimizer"""
    framework: FrameworkConfig = FrameworkConfig()
    """the training software"""
    cost: CostConfig = CostConfig()
    """sources of durations"""
    economics: EconomicsConfig = EconomicsConfig()
    """costs and energy of the run; does not affect durations"""
    reliability: ReliabilityConfig = ReliabilityConfig()
    """failures over weeks, and recovery from them; does not affect step times"""
    degradations: DegradationsConfig = DegradationsConfig()
    """degradations of the cluster: slow GPUs, NICs and links, jitter, background traffic"""
    diloco: DilocoConfig | None = None
    """local training: each site trains a replica, and they exchange outer gradients (DiLoCo); left out: none"""
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1
    """consecutive training steps to simulate"""
