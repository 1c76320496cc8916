"""What may a scenario file say of its schedule?"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.scenario.config_reader import ConfigModel, NonEmptyText, OneOfConfig
from clustersim.schedules.registry import SCHEDULE_NAMES


class FixedScheduleConfig(ConfigModel):
    """A schedule that has no options."""


class ChunkedScheduleConfig(ConfigModel):
    """Options of a schedule with a choice of model chunks on each rank."""

    chunks: Annotated[int, Field(ge=2, le=MAX_LAYERS)] = 2
    """stages on each pipeline rank"""


StageRanks = list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] | None


class CsvScheduleConfig(ConfigModel):
    """`schedule.csv`: a file of an order as torch.distributed.pipelining writes it, a row for each pipeline rank."""

    shorthand_key: ClassVar[str | None] = "file"
    file: NonEmptyText = Field(examples=["my.csv"])
    """a CSV in the notation of torch.distributed.pipelining"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: where its actions are"""


class InlineScheduleConfig(ConfigModel):
    """`schedule.orders`: such an order written out, with the name of what it was read from."""

    name: NonEmptyText = "written order"
    """what it is called"""
    rows: list[str] = Field(examples=['["0F0,0B0", "1F0,1B0"]'])
    """the CSV's rows, one for each pipeline rank"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: where its actions are"""


class CustomScheduleConfig(ConfigModel):
    """`schedule.python`: a class that gives placement and order, and the arguments of its constructor."""

    shorthand_key: ClassVar[str | None] = "rule"
    rule: NonEmptyText = Field(examples=["my_module:MySchedule"])
    """module and class that give placement and order"""
    arguments: dict[str, Any] = Field({})
    """of its constructor; left out: none"""


class ScheduleConfig(OneOfConfig):
    """`schedule`: one pipeline schedule, of the shelf or from outside; `my.csv` and `my_module:MySchedule` will do."""

    shorthands: ClassVar[dict[str, Any]] = {name: {name: {}} for name in SCHEDULE_NAMES}
    one_f_one_b: FixedScheduleConfig | None = Field(None, alias="1f1b")
    """one forward, one backward"""
    gpipe: FixedScheduleConfig | None = None
    """all forwards, then all backwards"""
    interleaved: ChunkedScheduleConfig | None = None
    """1F1B over several chunks"""
    bfs: ChunkedScheduleConfig | None = None
    """breadth-first over several chunks"""
    zero_bubble_1p: FixedScheduleConfig | None = Field(None, alias="zb-1p")
    """backward in halves, with the activations of 1F1B"""
    zero_bubble_2p: FixedScheduleConfig | None = Field(None, alias="zb-2p")
    """backward in halves, with twice the activations"""
    zero_bubble_v: FixedScheduleConfig | None = Field(None, alias="zb-v")
    """two chunks in a V, backward in halves"""
    dual_pipe_v: FixedScheduleConfig | None = Field(None, alias="dualpipev")
    """two chunks in a V, forwards beside backwards"""
    dual_pipe: FixedScheduleConfig | None = Field(None, alias="dualpipe")
    """two pipelines that run towards each other"""
    csv: CsvScheduleConfig | None = None
    """a file; its name alone will do"""
    orders: InlineScheduleConfig | None = None
    """such a file, written out"""
    python: CustomScheduleConfig | None = None
    """a class; `module:Class` alone will do"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """A file's name is `csv`, a class's is `python`."""
        match value:
            case str() if value.endswith(".csv"):
                return {"csv": value}
            case str() if ":" in value:
                return {"python": value}
        return super().expand_shorthand(value)
