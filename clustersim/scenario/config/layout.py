"""What may a scenario file say of its layout?"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from clustersim.common.errors import InputError, shown
from clustersim.model.layer_stack import MOST_LAYERS
from clustersim.parallel.layer_partition import AccountForEnds, EndRankLayers, LayerPartition, PipelineLayoutString
from clustersim.parallel.mesh import DATA, DENSE_MESH, MESHES
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.config.data_parallel import DataChoice, Ddp
from clustersim.scenario.config_reader import Degree, Layers, Section, member, mistake, reads

_MOST_SMS = 10_000

_ORDER = tuple(axis.name for axis in MESHES[DENSE_MESH])


def _axes(value: object) -> object:
    if not isinstance(value, list) or sorted(map(str, value)) != sorted(_ORDER):
        raise mistake(f"{shown(value)} must name every axis once, such as [{', '.join(_ORDER)}]")
    return value


def _notation(value: object) -> object:
    """Read a layout string; the word even is none."""
    if value == "even" or not isinstance(value, str):
        return None if value == "even" else value
    try:
        return parse_pipeline_layout(value)
    except InputError as error:
        raise mistake(f"{error}; or write {StagesSection.example}") from error


class StagesSection(Section):
    """`layout.layers_per_stage`: even, a list, one of Megatron-LM's layout strings, or one of its rules."""

    example: ClassVar[str] = "even, [8, 8], 'Et*8|t*8L', {embedding: true, head: true} or {first: 7, last: 7}"
    counts: list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None = None
    """layers of each stage (a list alone will do); left out: even"""
    layout: Annotated[PipelineLayoutString | None, reads(_notation, "even, or a string of stages", "Et*8|t*8L")] = None
    """`even`, or a layout string of Megatron-LM, such as `Et*7|(t*8|)*2t*9L` (a string alone will do); left out:
    even"""
    embedding: bool = False
    """the embedding counts as a layer"""
    head: bool = False
    """the head counts as a layer"""
    first: Layers | None = None
    """layers of the first pipeline rank; left out: even"""
    last: Layers | None = None
    """layers of the last pipeline rank; left out: even"""

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

    def split(self) -> LayerPartition:
        """The rule as the inside knows it."""
        if self.layout is not None:
            return self.layout
        if self.counts is not None:
            return tuple(self.counts)
        if self.embedding or self.head:
            return AccountForEnds(self.embedding, self.head)
        return EndRankLayers(self.first, self.last) if (self.first, self.last) != (None, None) else None


class LayoutSection(Section):
    """`layout`: degrees of parallelism. `dp` left out is what the other degrees leave of the cluster's GPUs."""

    tp: Degree = 1
    """tensor parallelism"""
    cp: Degree = 1
    """context parallelism (ring)"""
    pp: Degree = 1
    """pipeline parallelism: ranks of a pipeline"""
    dp: Degree | None = None
    """data parallelism: replicas; left out: what the other degrees leave of the GPUs"""
    ep: Degree = 1
    """expert parallelism: ranks that experts are spread over, among those of tp, cp and dp"""
    etp: Degree | None = None
    """expert tensor parallelism: ranks that each expert is cut over; left out: tp"""
    dispatcher: Annotated[TokenDispatcher, member(TokenDispatcher)] = TokenDispatcher.ALL_TO_ALL
    """how tokens travel to their experts and back"""
    dispatcher_sms: Annotated[int, Field(ge=1, le=_MOST_SMS)] | None = None
    """multiprocessors that the dispatcher's kernels take (deepep, hybridep); left out: the dispatcher's own"""
    order: Annotated[list[str], reads(_axes, "every axis once", of=list[Literal[_ORDER]])] = Field(list(_ORDER))
    """axes from the one with adjacent ranks outwards; left out: [tp, cp, dp, pp]"""
    sequence_parallel: bool = False
    """norms and dropout split the sequence over the tensor-parallel group"""
    tensor_overlap: bool = False
    """tensor-parallel collectives run in chunks beside their matmul (user buffers)"""
    backward_overlap: bool = True
    """backward's tensor-parallel collectives run beside the gradient that does not need them"""
    pipeline_overlap: bool = True
    """a stage goes on computing while its output is sent"""
    overlap_expert_communication: bool | None = None
    """tokens travel to experts beside another microbatch's computation; left out: true with dualpipe, dualpipev and
    ep above 1"""
    delay_wgrad: bool = False
    """with it, gradients of weights are computed behind what a backward sends"""
    overlap_shared_experts: bool = False
    """shared experts run while tokens travel"""
    release_outputs: bool | None = None
    """stages free what they have sent (Megatron-LM); false: held until its backward (torch.distributed.pipelining);
    left out: the framework's"""
    data: DataChoice = DataChoice(ddp=Ddp())
    """the data-parallel strategy, see [Sharding](scenario.md#sharding); left out: ddp"""
    layers_per_stage: StagesSection = StagesSection()
    """how layers are split into stages; left out: even"""

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica: the product of the other degrees."""
        return math.prod(getattr(self, axis.name) for axis in MESHES[DENSE_MESH] if axis is not DATA)
