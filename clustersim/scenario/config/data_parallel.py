"""What may a scenario file say about data parallelism?"""

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

_STAGE_3_KEYS: Final = (
    *("prefetch", "reshard_after_forward", "copies", "zero_hpz_partition_size", "all_reduce", "single_parameters"),
)
_STAGES_BY_KEY: Final = {"bucket": (1, 2), "reduce": (2, 3), **dict.fromkeys(_STAGE_3_KEYS, (3,))}
"""The ZeRO stages that a key applies to."""
BucketBytes = Annotated[float | None, size_or_word_parser("megatron")]


class DdpConfig(ConfigModel):
    """Bucketed all-reduce of gradients."""

    bucket: BucketBytes = DDP_BUCKET_BYTES
    """bucket size in bytes of gradients; megatron: max(40 M, 1 M per rank) elements"""
    overlap: bool = True
    """gradient reduction overlaps with backward"""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        return DdpStrategy(bucket=self.bucket, overlap=self.overlap)


class FsdpConfig(ConfigModel):
    """ZeRO stage 3 as PyTorch's FSDP2 (`fully_shard`), or FSDP1 without `copies`."""

    overlap: bool = True
    """communication overlaps with computation"""
    prefetch: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 1
    """FSDP units that are all-gathered ahead"""
    reshard_after_forward: bool | None = None
    """parameters are freed after forward and gathered again in backward; left out: true without a pipeline"""
    copies: bool = True
    """gathered buffers are copied out into each parameter (FSDP2; not FSDP1)"""
    zero_hpz_partition_size: Degree | None = None
    """group size of secondary parameter shards, from which backward gathers (hpZ of ZeRO++); left out: none"""
    reduce: Annotated[ReductionFrequency | None, enum_parser(ReductionFrequency)] = None
    """when gradients are reduced; left out: every_microbatch, with a pipeline last_microbatch"""
    single_parameters: bool = False
    """each parameter is gathered, and its gradient reduced, by its own collective (SimpleFSDP without bucketing)"""

    @model_validator(mode="after")
    def _check_one_shard_size(self) -> Self:
        if self.zero_hpz_partition_size is not None and getattr(self, "shard", None) is not None:
            raise config_error("has both shard and zero_hpz_partition_size, which cut the ranks in two ways; keep one")
        return self

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        return FullyShard(**self.model_dump())


class HsdpConfig(FsdpConfig):
    """Hybrid sharding (HSDP): FSDP2 sharded over `shard` ranks, replicated over the rest."""

    example: ClassVar[str] = "{shard: 64}"
    shard: Degree = Field(examples=[8])
    """ranks in a shard group; the groups are replicas of each other"""
    all_reduce: Annotated[ReductionFrequency, enum_parser(ReductionFrequency)] = ReductionFrequency.PER_MICROBATCH
    """when gradients are all-reduced across replicas"""


class ZeroConfig(FsdpConfig):
    """DeepSpeed ZeRO: its stage, and that stage's options."""

    example: ClassVar[str] = "{stage: 1}, 2 or 3"
    stage: Annotated[int, Field(ge=1, le=3)] = Field(examples=[1])
    """1: optimizer states, 2: gradients too, 3: parameters too"""
    bucket: BucketBytes = None
    """of stages 1 and 2: bucket size in bytes of gradients; left out: megatron, max(40 M, 1 M per rank) elements"""
    copies: bool = False
    """gathered buffers are copied out into each parameter"""
    shard: Degree | None = None
    """shard group size (Megatron-LM's distributed-optimizer instances, DeepSpeed's MiCS).

    Left out: all ranks with the same weights
    """
    all_reduce: Annotated[ReductionFrequency, enum_parser(ReductionFrequency)] = ReductionFrequency.LAST_MICROBATCH
    """of stage 3: when gradients are all-reduced across replicas"""

    @model_validator(mode="after")
    def _check_stage_keys(self) -> Self:
        for key in sorted(self.model_fields_set.intersection(_STAGES_BY_KEY)):
            if self.stage not in _STAGES_BY_KEY[key]:
                stages = " and ".join(map(str, _STAGES_BY_KEY[key]))
                raise config_error(f"{key} is of ZeRO stage {stages}; this is {self.stage}")
        return self

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        strategy_class = STRATEGY_BY_ZERO_STAGE[self.stage]
        field_names = (field.name for field in fields(strategy_class) if field.name in type(self).model_fields)
        return strategy_class(**{name: getattr(self, name) for name in field_names})


class DeepspeedZero3Config(ConfigModel):
    """DeepSpeed's first ZeRO-3, of March 2021, without options."""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        return DeepspeedZero3Strategy()


class TorchDataParallelConfig(ConfigModel):
    """torch.nn.DataParallel, without options."""

    def strategy(self) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        return NaiveDataParallel()


class DataParallelConfig(OneOfConfig):
    """`layout.data`: the data-parallel strategy."""

    shorthands: ClassVar[dict[str, Any]] = {
        "ddp": {"ddp": {}},
        "fsdp": {"fsdp": {}},
        "hsdp": {"hsdp": {}},
        "zero1": {"zero": {"stage": 1}},
        "zero2": {"zero": {"stage": 2}},
        "zero3": {"zero": {"stage": 3}},
        "deepspeed_zero3": {"deepspeed_zero3": {}},
        "data_parallel": {"data_parallel": {}},
    }
    ddp: DdpConfig | None = None
    """bucketed all-reduce of gradients; all states replicated"""
    fsdp: FsdpConfig | None = None
    """FSDP2 (`fully_shard`), or FSDP1 with copies: false"""
    hsdp: HsdpConfig | None = None
    """hybrid sharding: FSDP2 within shard groups, replicated across them"""
    zero: ZeroConfig | None = None
    """ZeRO stages 1 to 3; the words zero1, zero2 and zero3 are shorthands"""
    deepspeed_zero3: DeepspeedZero3Config | None = None
    """DeepSpeed's first ZeRO-3, of 2021"""
    data_parallel: TorchDataParallelConfig | None = None
    """torch.nn.DataParallel"""

    def strategy(self) -> DataParallelStrategy:
        """The selected strategy as the simulator represents it."""
        _, options = self.chosen
        return options.strategy()  # type: ignore[no-any-return]
