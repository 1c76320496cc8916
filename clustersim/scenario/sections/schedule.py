"""What may a scenario file say of its schedule?"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from clustersim.scenario.section import Choice, Name, Section
from clustersim.schedules.shelf import NAMES
from clustersim.workload.stack import MOST_LAYERS


class Flat(Section):
    """A schedule that has no options."""


class Chunked(Section):
    """Options of a schedule with a choice of model chunks on each rank."""

    chunks: Annotated[int, Field(ge=2, le=MOST_LAYERS)] = 2


StageRanks = list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None


class CsvSection(Section):
    """`schedule.csv`: a file of an order in the notation of torch.distributed.pipelining, a row for each pipeline rank.

    placement: [stages] the row of each stage, from 0; None: where its actions are.
    """

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my.csv"])
    placement: StageRanks = None


class OrdersSection(Section):
    """`schedule.orders`: such an order written out, with the name of what it was read from."""

    name: Name = "written order"
    rows: list[str] = Field(examples=['["0F0,0B0", "1F0,1B0"]'])
    placement: StageRanks = None


class PythonSection(Section):
    """`schedule.python`: a class that gives placement and order, and the arguments of its constructor."""

    short: ClassVar[str | None] = "rule"
    rule: Name = Field(examples=["my_module:MySchedule"])
    arguments: dict[str, Any] = Field({})


class ScheduleChoice(Choice):
    """`schedule`: one pipeline schedule, of the shelf or from outside; `my.csv` and `my_module:MySchedule` will do."""

    words: ClassVar[dict[str, Any]] = {name: {name: {}} for name in NAMES}
    one_f_one_b: Flat | None = Field(None, alias="1f1b")
    gpipe: Flat | None = None
    interleaved: Chunked | None = None
    bfs: Chunked | None = None
    zero_bubble_1p: Flat | None = Field(None, alias="zb-1p")
    zero_bubble_2p: Flat | None = Field(None, alias="zb-2p")
    zero_bubble_v: Flat | None = Field(None, alias="zb-v")
    dual_pipe_v: Flat | None = Field(None, alias="dualpipev")
    dual_pipe: Flat | None = Field(None, alias="dualpipe")
    csv: CsvSection | None = None
    orders: OrdersSection | None = None
    python: PythonSection | None = None

    @classmethod
    def written_out(cls, value: object) -> object:
        """A file's name is `csv`, a class's is `python`."""
        match value:
            case str() if value.endswith(".csv"):
                return {"csv": value}
            case str() if ":" in value:
                return {"python": value}
        return super().written_out(value)
