"""What may a scenario file say about its pipeline schedule?"""

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.scenario.config_reader import ConfigModel, NonEmptyText, OneOfConfig
from clustersim.schedules.registry import SCHEDULE_NAMES


class FixedScheduleConfig(ConfigModel):
    """A schedule without options."""


class ChunkedScheduleConfig(ConfigModel):
    """Options of a schedule with a variable number of model chunks per rank."""

    chunks: Annotated[int, Field(ge=2, le=MAX_LAYERS)] = 2
    """model chunks (virtual stages) per pipeline rank"""


_MAX_GROUP_SIZE: Final = 2**17  # microbatches


class InterleavedScheduleConfig(ChunkedScheduleConfig):
    """Options of `schedule.interleaved`."""

    microbatch_group_size: Annotated[int, Field(ge=1, le=_MAX_GROUP_SIZE)] | None = None
    """contiguous microbatches of a model chunk, at least as many as pipeline ranks; left out: as many as ranks"""


StageRanks = list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] | None


class CsvScheduleConfig(ConfigModel):
    """`schedule.csv`: a CSV file as torch.distributed.pipelining writes it, one row per pipeline rank."""

    shorthand_key: ClassVar[str | None] = "file"
    file: NonEmptyText = Field(examples=["my.csv"])
    """a CSV in the notation of torch.distributed.pipelining"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: derived from the actions"""


class InlineScheduleConfig(ConfigModel):
    """`schedule.orders`: the rows of such a CSV file inline, with the name of its source."""

    name: NonEmptyText = "written order"
    """name of the schedule"""
    rows: list[str] = Field(examples=['["0F0,0B0", "1F0,1B0"]'])
    """the CSV's rows, one per pipeline rank"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: derived from the actions"""


class CustomScheduleConfig(ConfigModel):
    """`schedule.python`: a class that defines placement and order, and its constructor arguments."""

    shorthand_key: ClassVar[str | None] = "class_path"
    class_path: NonEmptyText = Field(examples=["my_module:MySchedule"])
    """module and class that define placement and order"""
    arguments: dict[str, Any] = Field({})
    """keyword arguments of the constructor; left out: none"""


class ScheduleConfig(OneOfConfig):
    """`schedule`: a built-in or user-defined pipeline schedule; `my.csv` and `my_module:MySchedule` are shorthands."""

    shorthands: ClassVar[dict[str, Any]] = {name: {name: {}} for name in SCHEDULE_NAMES}
    one_f_one_b: FixedScheduleConfig | None = Field(None, alias="1f1b")
    """one forward, one backward"""
    gpipe: FixedScheduleConfig | None = None
    """all forwards, then all backwards"""
    interleaved: InterleavedScheduleConfig | None = None
    """1F1B with several model chunks per rank"""
    bfs: ChunkedScheduleConfig | None = None
    """breadth-first with several model chunks per rank"""
    zero_bubble_1p: FixedScheduleConfig | None = Field(None, alias="zb-1p")
    """backward split into input and weight gradients, with the activation memory of 1F1B"""
    zero_bubble_2p: FixedScheduleConfig | None = Field(None, alias="zb-2p")
    """backward split into input and weight gradients, with twice the activation memory"""
    zero_bubble_v: FixedScheduleConfig | None = Field(None, alias="zb-v")
    """two chunks in a V, backward split into input and weight gradients"""
    dual_pipe_v: FixedScheduleConfig | None = Field(None, alias="dualpipev")
    """two chunks in a V, forwards overlapped with backwards"""
    dual_pipe: FixedScheduleConfig | None = Field(None, alias="dualpipe")
    """bidirectional pipeline, forwards overlapped with backwards"""
    csv: CsvScheduleConfig | None = None
    """a CSV file; its name alone is a shorthand"""
    orders: InlineScheduleConfig | None = None
    """the rows of a CSV file, inline"""
    python: CustomScheduleConfig | None = None
    """a class; `module:Class` alone is a shorthand"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand a file name to `csv`, a class to `python`."""
        match value:
            case str() if value.endswith(".csv"):
                return {"csv": value}
            case str() if ":" in value:
                return {"python": value}
        return super().expand_shorthand(value)
