"""What may a scenario file say of its schedule?"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from clustersim.model.layer_stack import MOST_LAYERS
from clustersim.scenario.config_reader import Choice, Name, Section
from clustersim.schedules.registry import SCHEDULE_NAMES


class Flat(Section):
    """A schedule that has no options."""


class Chunked(Section):
    """Options of a schedule with a choice of model chunks on each rank."""

    chunks: Annotated[int, Field(ge=2, le=MOST_LAYERS)] = 2
    """stages on each pipeline rank"""


StageRanks = list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None


class CsvSection(Section):
    """`schedule.csv`: a file of an order as torch.distributed.pipelining writes it, a row for each pipeline rank."""

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my.csv"])
    """a CSV in the notation of torch.distributed.pipelining"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: where its actions are"""


class OrdersSection(Section):
    """`schedule.orders`: such an order written out, with the name of what it was read from."""

    name: Name = "written order"
    """what it is called"""
    rows: list[str] = Field(examples=['["0F0,0B0", "1F0,1B0"]'])
    """the CSV's rows, one for each pipeline rank"""
    placement: StageRanks = None
    """pipeline rank of each stage; left out: where its actions are"""


class PythonSection(Section):
    """`schedule.python`: a class that gives placement and order, and the arguments of its constructor."""

    short: ClassVar[str | None] = "rule"
    rule: Name = Field(examples=["my_module:MySchedule"])
    """module and class that give placement and order"""
    arguments: dict[str, Any] = Field({})
    """of its constructor; left out: none"""


class ScheduleChoice(Choice):
    """`schedule`: one pipeline schedule, of the shelf or from outside; `my.csv` and `my_module:MySchedule` will do."""

    words: ClassVar[dict[str, Any]] = {name: {name: {}} for name in SCHEDULE_NAMES}
    one_f_one_b: Flat | None = Field(None, alias="1f1b")
    """one forward, one backward"""
    gpipe: Flat | None = None
    """all forwards, then all backwards"""
    interleaved: Chunked | None = None
    """1F1B over several chunks"""
    bfs: Chunked | None = None
    """breadth-first over several chunks"""
    zero_bubble_1p: Flat | None = Field(None, alias="zb-1p")
    """backward in halves, with the activations of 1F1B"""
    zero_bubble_2p: Flat | None = Field(None, alias="zb-2p")
    """backward in halves, with twice the activations"""
    zero_bubble_v: Flat | None = Field(None, alias="zb-v")
    """two chunks in a V, backward in halves"""
    dual_pipe_v: Flat | None = Field(None, alias="dualpipev")
    """two chunks in a V, forwards beside backwards"""
    dual_pipe: Flat | None = Field(None, alias="dualpipe")
    """two pipelines that run towards each other"""
    csv: CsvSection | None = None
    """a file; its name alone will do"""
    orders: OrdersSection | None = None
    """such a file, written out"""
    python: PythonSection | None = None
    """a class; `module:Class` alone will do"""

    @classmethod
    def written_out(cls, value: object) -> object:
        """A file's name is `csv`, a class's is `python`."""
        match value:
            case str() if value.endswith(".csv"):
                return {"csv": value}
            case str() if ":" in value:
                return {"python": value}
        return super().written_out(value)
