"""What may a scenario file say of data parallelism?"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.parallel.data_parallel_strategy import (
    DDP_BUCKET_BYTES,
    STRATEGY_BY_ZERO_STAGE,
    DataParallelStrategy,
    DdpStrategy,
    DeepspeedZero3Strategy,
    FullyShard,
    NaiveDataParallel,
    ReductionFrequency,
)
from clustersim.scenario.config_reader import (
    ConfigModel,
    Degree,
    OneOfConfig,
    config_error,
    enum_parser,
    size_or_word_parser,
)

_STAGE_3_KEYS: Final = ("prefetch", "reshard_after_forward", "copies", "secondary", "all_reduce")
_STAGES_BY_KEY: Final = {"bucket": (1, 2), "reduce": (2, 3), **dict.fromkeys(_STAGE_3_KEYS, (3,))}
"""What only some stages of ZeRO have, and which."""
BucketBytes = Annotated[float | None, size_or_word_parser("megatron")]


class DdpConfig(ConfigModel):
    """Bucketed all-reduce of gradients."""

    bucket: BucketBytes = DDP_BUCKET_BYTES
    """bytes of gradients that are reduced at once; megatron: max(40 M, 1 M a rank) elements"""
    overlap: bool = True
    """reductions run beside backward"""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the inside knows it."""
        return DdpStrategy(bucket=self.bucket, overlap=self.overlap)


class FsdpConfig(ConfigModel):
    """ZeRO stage 3 as PyTorch's FSDP2 (`fully_shard`) does it, or FSDP1, without `copies`."""

    overlap: bool = True
    """communication runs beside compute"""
    prefetch: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 1
    """units that are gathered ahead"""
    reshard_after_forward: bool | None = None
    """backward gathers parameters again; left out: true without a pipeline"""
    copies: bool = True
    """what is gathered is copied into each parameter (FSDP2; not FSDP1)"""
    secondary: Degree | None = None
    """ranks of a second copy of the parameters, from which backward gathers (hpZ of ZeRO++); left out: none"""
    reduce: Annotated[ReductionFrequency | None, enum_parser(ReductionFrequency)] = None
    """when gradients are reduced; left out: every_microbatch, with a pipeline last_microbatch"""

    @model_validator(mode="after")
    def _check_one_shard_size(self) -> Self:
        if self.secondary is not None and getattr(self, "shard", None) is not None:
            raise config_error("has both shard and secondary, which cut the ranks in two ways; keep one")
        return self

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the inside knows it."""
        return FullyShard(**self.model_dump())


class HsdpConfig(FsdpConfig):
    """FSDP2 on a mesh of replicas of shards: sharded over `shard` ranks, replicated over the rest."""

    example: ClassVar[str] = "{shard: 64}"
    shard: Degree = Field(examples=[8])
    """ranks that weights are cut over; they are equal on the rest"""
    all_reduce: Annotated[ReductionFrequency, enum_parser(ReductionFrequency)] = ReductionFrequency.PER_MICROBATCH
    """when gradients are summed across replicas"""


class ZeroConfig(FsdpConfig):
    """ZeRO with its stage, and what that stage has."""

    example: ClassVar[str] = "{stage: 1}, 2 or 3"
    stage: Annotated[int, Field(ge=1, le=3)] = Field(examples=[1])
    """1: optimizer states, 2: gradients too, 3: parameters too"""
    bucket: BucketBytes = None
    """of stages 1 and 2: bytes of gradients that are reduced at once; left out: megatron, max(40 M, 1 M a rank)
    elements"""
    copies: bool = False
    """what is gathered is copied into each parameter"""
    shard: Degree | None = None
    """ranks that states are cut over (Megatron-LM's optimizer instances, DeepSpeed's MiCS); left out: all that hold
    the same weights"""
    all_reduce: Annotated[ReductionFrequency, enum_parser(ReductionFrequency)] = ReductionFrequency.LAST_MICROBATCH
    """of stage 3: when gradients are summed across replicas"""

    @model_validator(mode="after")
    def _check_stage_keys(self) -> Self:
        for key in sorted(self.model_fields_set.intersection(_STAGES_BY_KEY)):
            if self.stage not in _STAGES_BY_KEY[key]:
                stages = " and ".join(map(str, _STAGES_BY_KEY[key]))
                raise config_error(f"{key} is of ZeRO stage {stages}; this is {self.stage}")
        return self

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the inside knows it."""
        strategy_class = STRATEGY_BY_ZERO_STAGE[self.stage]
        field_names = (field.name for field in fields(strategy_class) if field.name in type(self).model_fields)
        return strategy_class(**{name: getattr(self, name) for name in field_names})


class DeepspeedZero3Config(ConfigModel):
    """DeepSpeed's first ZeRO-3, of March 2021, which has no options here."""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the inside knows it."""
        return DeepspeedZero3Strategy()


class TorchDataParallelConfig(ConfigModel):
    """torch.nn.DataParallel, which has no options."""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the inside knows it."""
        return NaiveDataParallel()


class DataParallelConfig(OneOfConfig):
    """`layout.data`: one strategy of data parallelism."""

    shorthands: ClassVar[dict[str, Any]] = {
        "ddp": {"ddp": {}},
        "fsdp": {"fsdp": {}},
        "hsdp": {"hsdp": {}},
        "zero1": {"zero": {"stage": 1}},
        "zero2": {"zero": {"stage": 2}},
        "zero3": {"zero": {"stage": 3}},
        "zero3_by_parameter": {"zero3_by_parameter": {}},
        "data_parallel": {"data_parallel": {}},
    }
    ddp: DdpConfig | None = None
    """gradients are reduced in buckets; all states on every rank"""
    fsdp: FsdpConfig | None = None
    """FSDP2 (`fully_shard`), or FSDP1 with copies: false"""
    hsdp: HsdpConfig | None = None
    """FSDP2 on replicas of shards"""
    zero: ZeroConfig | None = None
    """ZeRO stages 1 to 3; the words zero1, zero2 and zero3 will do"""
    zero3_by_parameter: DeepspeedZero3Config | None = None
    """DeepSpeed's first ZeRO-3, of 2021"""
    data_parallel: TorchDataParallelConfig | None = None
    """torch.nn.DataParallel"""

    def strategy(self) -> DataParallelStrategy:
        """The chosen strategy as the inside knows it."""
        _, options = self.chosen
        return options.strategy()  # type: ignore[no-any-return]
