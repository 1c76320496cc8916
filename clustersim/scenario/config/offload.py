"""What may a scenario file say about CPU offload, and is it consistent with the layout?

offload:
  activations: all           # or 8 layers of each stage, or 50 % of them; {layers: 8, prefetch: 2}
  optimizer: true            # or the fraction of the optimizer states on the host, such as 50 %
  gradients: true            # with the full optimizer: copied during backward (ZeRO-Offload)
  parameters: true           # with FSDP: parameter shards, their gradients and the optimizer
  update: sequential         # slice by slice, in separate passes (DeepSpeed)
  threads: 1                 # of the CPU for each rank (OMP_NUM_THREADS)
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.common.errors import InputError, format_value
from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.model.offload import NO_OFFLOAD, ActivationOffload, HostUpdate, Offload, OptimizerOffload, ShardOffload
from clustersim.parallel.data_parallel_strategy import GradientSync
from clustersim.parallel.layer_partition import partition_layers
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import parameter_groups
from clustersim.scenario.config_reader import (
    ConfigModel,
    LayerCount,
    config_error,
    enum_parser,
    fraction_parser,
    value_parser,
)
from clustersim.scenario.resolved import ResolvedScenario

_EXAMPLE = (
    "{capacity: 2 TB, bandwidth: 600 GB/s, device_to_host: 50 GB/s, host_to_device: 50 GB/s, latency: 10 us, "
    "optimizer_fraction: 0.46}"
)
_MAX_THREADS = 4096
_parse_fraction = fraction_parser(0.0, 1.0).func


def _parse_layers_or_fraction(value: object) -> object:
    """A layer count as an integer; `all` or a percentage as a fraction."""
    if value == "all" or value is True:
        return 1.0
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MAX_LAYERS:
            raise config_error(f"{format_value(value)} is not a number of layers from 1 to {MAX_LAYERS:,}")
        return value
    if isinstance(value, str) and "%" not in value:
        raise config_error(f"{format_value(value)} is neither all, nor a number of layers, nor a share such as 50 %")
    return _parse_fraction(value)  # type: ignore[call-arg]


def _bool_as_fraction(value: object) -> object:
    """A fraction; true is 1, false is 0."""
    return float(value) if isinstance(value, bool) else value


def _is_none_word(value: object) -> bool:
    return value == "none" or value is False


def _none_or_value(value: object) -> object:
    return None if _is_none_word(value) else value


class ActivationOffloadConfig(ConfigModel):
    """`training.offload.activations`: the layers of each stage whose saved activations are offloaded."""

    shorthand_key: ClassVar[str | None] = "layers"
    layers: Annotated[
        int | float, value_parser(_parse_layers_or_fraction, "all, a number of layers, or a share", "50 %")
    ] = 1.0
    """of each stage, the first ones: a count, a fraction or all"""
    prefetch: LayerCount = 1
    """layers that are copied back ahead of their backward"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand true to all layers."""
        return {"layers": 1.0} if value is True else super().expand_shorthand(value)

    def activation_offload(self) -> ActivationOffload:
        """The activation offload as the simulator represents it."""
        if isinstance(self.layers, int):
            return ActivationOffload(layers=self.layers, prefetch=self.prefetch)
        return ActivationOffload(share=self.layers, prefetch=self.prefetch)


class OffloadConfig(ConfigModel):
    """`training.offload`: tensors that are kept in host memory."""

    example: ClassVar[str] = "{activations: all}, {optimizer: true} or, with FSDP, {parameters: true}"
    activations: Annotated[ActivationOffloadConfig | None, BeforeValidator(_none_or_value)] = None
    """activations saved for backward; left out: none"""
    optimizer: Annotated[
        float,
        fraction_parser(0.0, 1.0),
        value_parser(_bool_as_fraction, "a share: 0 to 1, or 0 % to 100 %; true or false", "50 %"),
    ] = Field(0.0)
    """fraction of the optimizer states, which the CPU then updates; true: all"""
    gradients: bool = False
    """with the full optimizer: gradients are copied as backward produces them"""
    parameters: bool = False
    """with FSDP: parameter shards, their gradients and the full optimizer"""
    update: Annotated[HostUpdate, enum_parser(HostUpdate)] = HostUpdate.OVERLAPPED
    """of the CPU: copies overlap its slices, or one after the other and in separate passes, as DeepSpeed's"""
    threads: Annotated[int | None, Field(ge=1, le=_MAX_THREADS)] = None
    """of the CPU that update each rank's share; left out: as many as the host's memory keeps busy"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand `none` and false to no offload."""
        return {} if _is_none_word(value) else super().expand_shorthand(value)

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.parameters and "optimizer" in self.model_fields_set and self.optimizer < 1.0:
            raise config_error("parameters on the host take the whole optimizer along; leave optimizer out")
        if self.gradients and not self.parameters and self.optimizer < 1.0:
            raise config_error("gradients go to the host where all of the optimizer is; write optimizer: true")
        of_update = self.model_fields_set & {"update", "threads"}
        if of_update and not (self.parameters or self.optimizer):
            key = min(of_update)
            raise config_error(f"{key} is of an optimizer on the host, which there is none of; add optimizer: true")
        return self

    def offload_policy(self) -> Offload:
        """The offload policy as the simulator represents it."""
        activations = self.activations.activation_offload() if self.activations else None
        states: OptimizerOffload | ShardOffload | None = ShardOffload() if self.parameters else None
        if states is None and self.optimizer:
            states = OptimizerOffload(self.optimizer, gradients=self.gradients)
        return Offload(activations, states, self.update, self.threads)


def check_offload(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the cluster has host memory, and that the layout has what is to be offloaded."""
    if scenario.training.offload == NO_OFFLOAD:
        return
    for check in (
        _check_host_memory,
        _check_not_torch_data_parallel,
        _check_layer_count,
        _check_parameter_offload,
        _check_gradient_offload,
    ):
        yield from check(scenario)


def _check_host_memory(scenario: ResolvedScenario) -> Iterator[str]:
    cluster = scenario.cluster
    if cluster.host_memory is None:
        yield (
            f"training.offload: offload without host memory: {cluster.name} does not say what its hosts have; give "
            f"cluster.node.host_memory: {_EXAMPLE} (in a graph file, the graph's host_memory)"
        )
    elif scenario.training.offload.threads is not None and cluster.host_memory.core_bandwidth is None:
        yield (
            f"training.offload.threads: {cluster.name} does not say what one core of its hosts reads and writes; give "
            "cluster.node.host_memory.core_bandwidth, such as 12 GB/s (STREAM with one thread), or leave threads out"
        )


def _check_not_torch_data_parallel(scenario: ResolvedScenario) -> Iterator[str]:
    if scenario.layout.data.is_single_process:
        yield "training.offload: torch.nn.DataParallel has no offload; use ddp, zero1, zero2 or fsdp"


def _check_layer_count(scenario: ResolvedScenario) -> Iterator[str]:
    activations = scenario.training.offload.activations
    try:
        max_layers = max(
            partition_layers(scenario.layout.layers_per_stage, scenario.model.layer_count, scenario.placement)
        )
    except InputError:  # reported by the layout's checks
        return
    if activations is not None and (activations.layers or 0) > max_layers:
        yield (
            f"training.offload.activations: {activations.layers} layers, but no stage holds more than {max_layers}; "
            f"write {max_layers} at most, or all"
        )


def _check_gradient_offload(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that gradients are reduced in every backward, so that they can be offloaded before the last microbatch."""
    layout, states = scenario.layout, scenario.training.offload.states
    is_requested = isinstance(states, OptimizerOffload) and states.gradients
    is_single_rank = layout.group_size(DP_GROUP) == 1
    if is_requested and not is_single_rank and layout.gradient_sync is not GradientSync.EVERY_BACKWARD:
        yield (
            "training.offload.gradients: they are reduced after the last microbatch only, and are whole on the device "
            "until then; with layout.data zero2 or fsdp, without a pipeline, they can go; or leave gradients out"
        )


def _check_parameter_offload(scenario: ResolvedScenario) -> Iterator[str]:
    layout = scenario.layout
    if not scenario.training.offload.offloads_shards:
        return
    if not layout.data.shards_parameters:
        reason = "layout.data is not fsdp or zero3"
    elif all(group.shard_count == 1 for group in parameter_groups(layout, scenario.training)):
        reason = f"{'shard' if layout.is_hybrid_sharded else 'dp x cp ='} 1 leaves nothing to shard"
    elif any(
        group.shard_count == 1 for group in parameter_groups(layout, scenario.training, experts=layout.has_expert_mesh)
    ):
        reason = f"ep {layout.ep} x etp {layout.effective_etp} leaves nothing of experts to shard"
    else:
        return
    yield f"training.offload.parameters: only sharded parameters are offloaded, and {reason}; optimizer: true fits"
