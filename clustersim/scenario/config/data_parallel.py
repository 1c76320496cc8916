"""What may a scenario file say about data parallelism?"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from clustersim.common.units import Bytes
from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.model.layout_defaults import ALL_OVERLAPPED, LayoutDefaults
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
_PARAM_GATHER: Final = "overlap_param_gather"
_STAGES_BY_KEY: Final = {
    "bucket": (1, 2),
    _PARAM_GATHER: (1, 2),
    "reduce": (2, 3),
    **dict.fromkeys(_STAGE_3_KEYS, (3,)),
}
"""The ZeRO stages that a key applies to."""
BucketBytes = Annotated[float | None, size_or_word_parser("megatron")]


class DdpConfig(ConfigModel):
    """Bucketed all-reduce of gradients."""

    bucket: BucketBytes = DDP_BUCKET_BYTES
    """bucket size in bytes of gradients; megatron: max(40 M, 1 M per rank) elements; left out: the framework's"""
    overlap: bool | None = None
    """gradient reduction overlaps with backward; left out: the framework's way"""

    def strategy(self, defaults: LayoutDefaults) -> DataParallelStrategy:
        """The strategy as the simulator represents it. defaults: the framework's."""
        return DdpStrategy(
            bucket=_bucket_bytes(self, defaults),
            overlap=defaults.overlap_grad_reduce if self.overlap is None else self.overlap,
        )


class FsdpConfig(ConfigModel):
    """ZeRO stage 3 as PyTorch's FSDP2 (`fully_shard`), or FSDP1 without `copies`."""

    overlap: bool = True
    """communication overlaps with computation"""
    prefetch: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 1
    """FSDP units that are all-gathered ahead"""
    reshard_after_forward: bool | None = None
    """parameters are freed after forward and gathered again in backward; left out: true without a pipeline"""
    copies: bool | None = None
    """gathered buffers are copied out into each parameter (FSDP2; not FSDP1); left out: the framework's way"""
    zero_hpz_partition_size: Degree | None = None
    """group size of secondary parameter shards, from which backward gathers (hpZ of ZeRO++); left out: none"""
    reduce: Annotated[ReductionFrequency | None, enum_parser(ReductionFrequency)] = None
    """when gradients are reduced; left out: mostly every_microbatch, with a pipeline last_microbatch"""
    single_parameters: bool = False
    """each parameter is gathered, and its gradient reduced, by its own collective (SimpleFSDP without bucketing)"""

    @model_validator(mode="after")
    def _check_one_shard_size(self) -> Self:
        if self.zero_hpz_partition_size is not None and getattr(self, "shard", None) is not None:
            raise config_error("has both shard and zero_hpz_partition_size, which cut the ranks in two ways; keep one")
        return self

    def strategy(self, defaults: LayoutDefaults) -> DataParallelStrategy:
        """The strategy as the simulator represents it. defaults: the framework's."""
        reduce = ReductionFrequency.LAST_MICROBATCH if defaults.no_sync else None
        return FullyShard(**{"copies": defaults.copies, "reduce": reduce, **self.stated_values()})


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
    overlap: bool | None = None  # type: ignore[assignment]
    """communication overlaps with computation; left out: of stage 3, of the others as the framework does it"""
    bucket: BucketBytes = None
    """of stages 1 and 2: bucket size in bytes of gradients; megatron: max(40 M, 1 M per rank) elements

    Left out: the framework's, mostly that
    """
    overlap_param_gather: bool | None = None
    """of stages 1 and 2: updated parameters are gathered while the next forward runs, not at the end of the step.

    Left out: the framework's way
    """
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

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.overlap_param_gather and self.overlap is False:
            raise config_error("overlap_param_gather: true needs overlap: true, as Megatron-LM's flag does")
        return self

    def strategy(self, defaults: LayoutDefaults) -> DataParallelStrategy:
        """The strategy as the simulator represents it. defaults: the framework's."""
        strategy_class = STRATEGY_BY_ZERO_STAGE[self.stage]
        values = {
            "overlap": strategy_class is FullyShard or defaults.overlap_grad_reduce,
            _PARAM_GATHER: f"zero{self.stage}" in defaults.overlapped_gathers,
            "copies": defaults.copies,
            **self.stated_values(),
            "bucket": _bucket_bytes(self, defaults),
        }
        names = {strategy_field.name for strategy_field in fields(strategy_class)}
        return strategy_class(**{name: value for name, value in values.items() if name in names})


def _bucket_bytes(config: DdpConfig | ZeroConfig, defaults: LayoutDefaults) -> Bytes | None:
    """Bytes of a bucket of gradients, None: Megatron-LM's rule. What is left out is the framework's, if it has one."""
    if "bucket" in config.model_fields_set or defaults.bucket is None:
        return config.bucket
    return None if isinstance(defaults.bucket, str) else defaults.bucket


class DeepspeedZero3Config(ConfigModel):
    """DeepSpeed's first ZeRO-3, of March 2021, without options."""

    def strategy(self, _defaults: LayoutDefaults) -> DataParallelStrategy:
        """The strategy as the simulator represents it."""
        return DeepspeedZero3Strategy()


class TorchDataParallelConfig(ConfigModel):
    """torch.nn.DataParallel, without options."""

    def strategy(self, _defaults: LayoutDefaults) -> DataParallelStrategy:
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

    def strategy(self, defaults: LayoutDefaults) -> DataParallelStrategy:
        """The selected strategy as the simulator represents it. defaults: the framework's."""
        _, options = self.chosen
        return options.strategy(defaults)  # type: ignore[no-any-return]

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, too."""
        return self.strategy(ALL_OVERLAPPED).shards_parameters
