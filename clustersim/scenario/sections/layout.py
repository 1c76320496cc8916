"""What may a scenario file say of its layout?"""

import math
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.errors import InputError, shown
from clustersim.parallel.mesh import DATA, DENSE, MESHES
from clustersim.parallel.pipeline import Counted, Drawn, Ends, Split
from clustersim.parallel.stage_notation import read_stages
from clustersim.program.task import Dispatcher
from clustersim.scenario.section import (
    Degree,
    Layers,
    Section,
    member,
    mistake,
)
from clustersim.scenario.sections.data import DataChoice, Ddp
from clustersim.workload.stack import MOST_LAYERS

_MOST_SMS = 10_000

_ORDER = tuple(axis.name for axis in MESHES[DENSE])


def _axes(value: object) -> object:
    if not isinstance(value, list) or sorted(map(str, value)) != sorted(_ORDER):
        raise mistake(f"{shown(value)} must name every axis once, such as [{', '.join(_ORDER)}]")
    return value


def _notation(value: object) -> object:
    """Read a layout string; the word even is none."""
    if value == "even" or not isinstance(value, str):
        return None if value == "even" else value
    try:
        return read_stages(value)
    except InputError as error:
        raise mistake(f"{error}; or write {StagesSection.example}") from error


class StagesSection(Section):
    """`layout.layers_per_stage`: even, a list, one of Megatron-LM's layout strings, or one of its rules.

    embedding, head: count as a layer; first, last: layers of the first and of the last pipeline rank.
    """

    example: ClassVar[str] = "even, [8, 8], 'Et*8|t*8L', {embedding: true, head: true} or {first: 7, last: 7}"
    counts: list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None = None
    layout: Annotated[Drawn | None, BeforeValidator(_notation)] = None
    embedding: bool = False
    head: bool = False
    first: Layers | None = None
    last: Layers | None = None

    @classmethod
    def written_out(cls, value: object) -> object:
        """A list gives the counts, a string is a layout string, nothing is even."""
        if value is None:
            return {}
        if isinstance(value, list):
            return {"counts": value}
        return {"layout": value} if isinstance(value, str) else super().written_out(value)

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        ends = (self.first, self.last) != (None, None)
        rules = (self.counts is not None, self.layout is not None, self.embedding or self.head, ends)
        if sum(rules) > 1:
            raise mistake(f"says more than one of counts, layout, embedding or head, and first or last; {self.example}")
        return self

    def split(self) -> Split:
        """The rule as the inside knows it."""
        if self.layout is not None:
            return self.layout
        if self.counts is not None:
            return tuple(self.counts)
        if self.embedding or self.head:
            return Counted(self.embedding, self.head)
        return Ends(self.first, self.last) if (self.first, self.last) != (None, None) else None


class LayoutSection(Section):
    """`layout`: degrees of parallelism. `dp` left out is what the other degrees leave of the cluster's GPUs.

    ep, etp: how many ranks experts are spread over, and each of them cut over (left out: tp), among those of tp, cp and
    dp; dispatcher: how tokens travel to experts; dispatcher_sms: on how many multiprocessors (left out: the
    dispatcher's own number); overlap_expert_communication: beside computation, left out: where the schedule is made for
    it (dualpipe, dualpipev); delay_wgrad: with gradients of weights behind it;
    overlap_shared_experts: shared experts run while tokens travel.
    """

    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    dp: Degree | None = None
    ep: Degree = 1
    etp: Degree | None = None
    dispatcher: Annotated[Dispatcher, member(Dispatcher)] = Dispatcher.ALL_TO_ALL
    dispatcher_sms: Annotated[int, Field(ge=1, le=_MOST_SMS)] | None = None
    order: Annotated[list[str], BeforeValidator(_axes)] = Field(list(_ORDER))
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    overlap_expert_communication: bool | None = None
    delay_wgrad: bool = False
    overlap_shared_experts: bool = False
    release_outputs: bool | None = None
    data: DataChoice = DataChoice(ddp=Ddp())
    layers_per_stage: StagesSection = StagesSection()

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica: the product of the other degrees."""
        return math.prod(getattr(self, axis.name) for axis in MESHES[DENSE] if axis is not DATA)
