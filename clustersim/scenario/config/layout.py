"""What may a scenario file say about its parallel layout?"""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.layer_partition import (
    AccountForEnds,
    BalancedFlops,
    EndRankLayers,
    LayerPartition,
    PipelineLayoutString,
)
from clustersim.parallel.layout import count_encoder_ranks
from clustersim.parallel.mesh import DENSE_MESH, MESHES
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
    """Parse a pipeline layout string; None for the word `even`."""
    if value == "even" or not isinstance(value, str):
        return None if value == "even" else value
    try:
        return parse_pipeline_layout(value)
    except InputError as error:
        raise config_error(f"{error}; or write {LayerSplitConfig.example}") from error


class LayerSplitConfig(ConfigModel):
    """`layout.layers_per_stage`: even, balanced, a list, a Megatron-LM pipeline layout string, or a rule."""

    example: ClassVar[str] = "even, balanced, [8, 8], 'Et*8|t*8L', {embedding: true, head: true} or {first: 7, last: 7}"
    counts: list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] | None = None
    """layers of each stage (a bare list is a shorthand); left out: even"""
    layout: Annotated[
        PipelineLayoutString | None, value_parser(_parse_stage_layout, "even, or a string of stages", "Et*8|t*8L")
    ] = None
    """`even`, or a pipeline layout string of Megatron-LM, such as `Et*7|(t*8|)*2t*9L` (a bare string is a
    shorthand); left out: even
    """
    embedding: bool = False
    """the embedding counts as a layer (account_for_embedding_in_pipeline_split)"""
    head: bool = False
    """the output layer counts as a layer (account_for_loss_in_pipeline_split)"""
    balanced: bool = False
    """stages have equal model FLOP as far as layers allow (`balanced` is a shorthand): for layers that differ"""
    first: LayerCount | None = None
    """layers of the first pipeline stage; left out: even"""
    last: LayerCount | None = None
    """layers of the last pipeline stage; left out: even"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand a list to counts, a string to a layout string, null to the even split."""
        if value is None:
            return {}
        if isinstance(value, list):
            return {"counts": value}
        if value == "balanced":
            return {"balanced": True}
        return {"layout": value} if isinstance(value, str) else super().expand_shorthand(value)

    @model_validator(mode="after")
    def _check_one_rule(self) -> Self:
        has_ends = (self.first, self.last) != (None, None)
        has_string = self.layout is not None
        rules = (self.counts is not None, has_string, self.embedding or self.head, has_ends, self.balanced)
        if sum(rules) > 1:
            raise config_error(
                f"says more than one of counts, layout, embedding or head, balanced, and first or last; {self.example}"
            )
        return self

    def layer_partition(self, layer_flops: Callable[[], BalancedFlops]) -> LayerPartition:
        """The layer partition as the simulator represents it. layer_flops: FLOP of the model's layers."""
        if self.balanced:
            return layer_flops()
        if self.layout is not None:
            return self.layout
        if self.counts is not None:
            return tuple(self.counts)
        if self.embedding or self.head:
            return AccountForEnds(self.embedding, self.head)
        return EndRankLayers(self.first, self.last) if (self.first, self.last) != (None, None) else None


class EncoderPlacement(Enum):
    """Which ranks run an encoder in front of the model: those of the FIRST_STAGE, or an OWN_STAGE before it."""

    FIRST_STAGE = "first_stage"
    OWN_STAGE = "own_stage"


class LayoutConfig(ConfigModel):
    """`layout`: degrees of parallelism. `dp` left out is the GPU count over the product of the other degrees."""

    tp: Degree = 1
    """tensor-parallel degree"""
    cp: Degree = 1
    """context-parallel degree"""
    pp: Degree = 1
    """pipeline-parallel degree: ranks of a pipeline"""
    dp: Degree | None = None
    """data-parallel degree: replicas; left out: GPU count (without an encoder's own) over the product of the others"""
    ep: Degree = 1
    """expert-parallel degree: ranks that experts are distributed over, folded onto tp, cp and dp"""
    etp: Degree | None = None
    """expert-tensor-parallel degree: ranks that each expert is sharded over; left out: 1"""
    cp_kind: Annotated[ContextParallelKind | None, enum_parser(ContextParallelKind)] = None
    """what its ranks exchange for attention, see [Context parallelism](scenario.md#context-parallelism);
    left out: the framework's
    """
    cp_inner: Degree | None = None
    """ranks of its inner groups, which two_dimensional and hierarchical need; left out: none"""
    cp_balanced: bool = True
    """ranks have a chunk from the front of each sequence and its mirror chunk from the back (zigzag)"""
    dispatcher: Annotated[TokenDispatcher, enum_parser(TokenDispatcher)] = TokenDispatcher.ALL_TO_ALL
    """token dispatcher: how tokens are sent to experts and back"""
    dispatcher_num_sms: Annotated[int, Field(ge=1, le=_MAX_SMS)] | None = None
    """SMs of the dispatcher's kernels (deepep, hybridep); left out: the dispatcher's default"""
    order: Annotated[
        list[str], value_parser(_parse_axis_order, "every axis once", schema_type=list[Literal[_AXIS_NAMES]])
    ] = Field(list(_AXIS_NAMES))
    """mesh axes, innermost (adjacent ranks) first; left out: [tp, cp, dp, pp]"""
    sequence_parallel: bool = False
    """norms and dropout are sharded along the sequence over the tensor-parallel group"""
    tp_comm_overlap: bool = False
    """tensor-parallel collectives are chunked and overlap with their matmul (user buffers)"""
    async_tensor_model_parallel_allreduce: bool | None = None
    """backward's tensor-parallel collectives overlap with the weight-gradient matmul; left out: the framework's way"""
    overlap_p2p_comm: bool | None = None
    """a stage continues to compute while its output is sent; left out: the framework's way"""
    overlap_moe_expert_parallel_comm: bool | None = None
    """MoE dispatch and combine overlap with another microbatch's computation.

    Left out: true with dualpipe, dualpipev and ep above 1
    """
    delay_wgrad_compute: bool = False
    """weight gradients are delayed so that they overlap with MoE communication;
    needs overlap_moe_expert_parallel_comm
    """
    moe_shared_expert_overlap: bool = False
    """shared experts overlap with dispatch and combine"""
    deallocate_pipeline_outputs: bool | None = None
    """stages free outputs once they are sent (Megatron-LM).

    false: kept until backward (torch.distributed.pipelining); left out: the framework's
    """
    data: DataParallelConfig = DataParallelConfig(ddp=DdpConfig())
    """the data-parallel strategy, see [Sharding](scenario.md#sharding); left out: ddp"""
    layers_per_stage: LayerSplitConfig = LayerSplitConfig()
    """partition of layers into pipeline stages; left out: even"""
    encoder_placement: Annotated[EncoderPlacement, enum_parser(EncoderPlacement)] = EncoderPlacement.FIRST_STAGE
    """ranks of model.encoder: those of the first_stage, or own_stage: the first pipeline rank, which has no layers"""
    encoder_tp: Degree | None = None
    """tensor-parallel degree of model.encoder, whose replicas share the images of a sequence; left out: tp, and
    context-parallel ranks all have them
    """
    encoder_dp: Degree | None = None
    """replicas of model.encoder on GPUs of its own (own_stage), encoder_tp x encoder_dp of them; left out: as many GPUs
    as every pipeline rank
    """

    @model_validator(mode="before")
    @classmethod
    def _expand_context(cls, value: object) -> object:
        """`cp: {degree: 8, kind: ulysses}` is short for the keys that begin with cp."""
        if not isinstance(value, dict) or not isinstance(context := value.get("cp"), dict):
            return value
        names = {"degree": "cp", **{key: f"cp_{key}" for key in ("kind", "inner", "balanced")}}
        for key in context:
            if key not in names:
                raise config_error(f"cp.{key} is unknown; {suggest_nearest(str(key), names)}")
            if names[key] in value and key != "degree":
                raise config_error(f"{names[key]} is given by cp, too; write cp.{key} alone")
        others = {key: item for key, item in value.items() if key != "cp"}
        return others | {names[key]: item for key, item in context.items()}

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one data-parallel replica: the product of the other degrees, without an encoder's own ranks."""
        own_stages = 0 if self.encoder_dp is None else 1
        return max(1, self.tp * self.cp * (self.pp - own_stages))

    @property
    def encoder_ranks(self) -> int:
        """Ranks that an encoder has besides those of the replicas."""
        return count_encoder_ranks(self.tp, self.encoder_tp, self.encoder_dp)
