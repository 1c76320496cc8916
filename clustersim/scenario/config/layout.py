"""What may a scenario file say of its layout?"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from clustersim.common.errors import InputError, format_value
from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.parallel.layer_partition import AccountForEnds, EndRankLayers, LayerPartition, PipelineLayoutString
from clustersim.parallel.mesh import DATA, DENSE_MESH, MESHES
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.config.data_parallel import DataParallelConfig, DdpConfig
from clustersim.scenario.config_reader import ConfigModel, Degree, LayerCount, config_error, enum_parser, value_parser

_MAX_SMS = 10_000

_AXIS_NAMES = tuple(axis.name for axis in MESHES[DENSE_MESH])


def _parse_axis_order(value: object) -> object:
    if not isinstance(value, list) or sorted(map(str, value)) != sorted(_AXIS_NAMES):
        raise config_error(f"{format_value(value)} must name every axis once, such as [{', '.join(_AXIS_NAMES)}]")
    return value


def _parse_stage_layout(value: object) -> object:
    """Read a layout string; the word even is none."""
    if value == "even" or not isinstance(value, str):
        return None if value == "even" else value
    try:
        return parse_pipeline_layout(value)
    except InputError as error:
        raise config_error(f"{error}; or write {LayerSplitConfig.example}") from error


class LayerSplitConfig(ConfigModel):
    """`layout.layers_per_stage`: even, a list, one of Megatron-LM's layout strings, or one of its rules."""

    example: ClassVar[str] = "even, [8, 8], 'Et*8|t*8L', {embedding: true, head: true} or {first: 7, last: 7}"
    counts: list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] | None = None
    """layers of each stage (a list alone will do); left out: even"""
    layout: Annotated[
        PipelineLayoutString | None, value_parser(_parse_stage_layout, "even, or a string of stages", "Et*8|t*8L")
    ] = None
    """`even`, or a layout string of Megatron-LM, such as `Et*7|(t*8|)*2t*9L` (a string alone will do); left out:
    even"""
    embedding: bool = False
    """the embedding counts as a layer"""
    head: bool = False
    """the head counts as a layer"""
    first: LayerCount | None = None
    """layers of the first pipeline rank; left out: even"""
    last: LayerCount | None = None
    """layers of the last pipeline rank; left out: even"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """A list gives the counts, a string is a layout string, nothing is even."""
        if value is None:
            return {}
        if isinstance(value, list):
            return {"counts": value}
        return {"layout": value} if isinstance(value, str) else super().expand_shorthand(value)

    @model_validator(mode="after")
    def _check_one_rule(self) -> Self:
        has_ends = (self.first, self.last) != (None, None)
        rules = (self.counts is not None, self.layout is not None, self.embedding or self.head, has_ends)
        if sum(rules) > 1:
            raise config_error(
                f"says more than one of counts, layout, embedding or head, and first or last; {self.example}"
            )
        return self

    def layer_partition(self) -> LayerPartition:
        """The rule as the inside knows it."""
        if self.layout is not None:
            return self.layout
        if self.counts is not None:
            return tuple(self.counts)
        if self.embedding or self.head:
            return AccountForEnds(self.embedding, self.head)
        return EndRankLayers(self.first, self.last) if (self.first, self.last) != (None, None) else None


class LayoutConfig(ConfigModel):
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
    dispatcher: Annotated[TokenDispatcher, enum_parser(TokenDispatcher)] = TokenDispatcher.ALL_TO_ALL
    """how tokens travel to their experts and back"""
    dispatcher_sms: Annotated[int, Field(ge=1, le=_MAX_SMS)] | None = None
    """multiprocessors that the dispatcher's kernels take (deepep, hybridep); left out: the dispatcher's own"""
    order: Annotated[
        list[str], value_parser(_parse_axis_order, "every axis once", schema_type=list[Literal[_AXIS_NAMES]])
    ] = Field(list(_AXIS_NAMES))
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
    data: DataParallelConfig = DataParallelConfig(ddp=DdpConfig())
    """the data-parallel strategy, see [Sharding](scenario.md#sharding); left out: ddp"""
    layers_per_stage: LayerSplitConfig = LayerSplitConfig()
    """how layers are split into stages; left out: even"""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one data-parallel replica: the product of the other degrees."""
        return math.prod(getattr(self, axis.name) for axis in MESHES[DENSE_MESH] if axis is not DATA)
