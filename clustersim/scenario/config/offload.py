"""What may a scenario file say of offload to the host, and does it agree with the rest?

offload:
  activations: all           # or 8 layers of each stage, or 50 % of them; {layers: 8, prefetch: 2}
  optimizer: true            # or the part of its states that is on the host, such as 50 %
  gradients: true            # beside the whole optimizer: they go during backward (ZeRO-Offload)
  parameters: true           # with FSDP: shards, their gradients and the optimizer
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.common.errors import InputError, shown
from clustersim.model.layer_stack import MOST_LAYERS
from clustersim.model.offload import NOTHING, ActivationOffload, Offload, OptimizerOffload, ShardOffload
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, NaiveDataParallel
from clustersim.parallel.layer_partition import partition_layers
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import parameter_groups
from clustersim.scenario.config_reader import Layers, Section, mistake, reads, share
from clustersim.scenario.resolved import Setup

_EXAMPLE = "{capacity: 2 TB, bandwidth: 600 GB/s, to_host: 50 GB/s, from_host: 50 GB/s, latency: 10 us, update: 0.46}"
_PART = share(0.0, 1.0).func


def _some_layers(value: object) -> object:
    """A number of layers as it is; `all` or a share as a share."""
    if value == "all" or value is True:
        return 1.0
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_LAYERS:
            raise mistake(f"{shown(value)} is not a number of layers from 1 to {MOST_LAYERS:,}")
        return value
    if isinstance(value, str) and "%" not in value:
        raise mistake(f"{shown(value)} is neither all, nor a number of layers, nor a share such as 50 %")
    return _PART(value)  # type: ignore[call-arg]


def _part(value: object) -> object:
    """A share, of which true is all and false nothing."""
    return float(value) if isinstance(value, bool) else value


def _is_nothing(value: object) -> bool:
    return value == "none" or value is False


def _absent(value: object) -> object:
    return None if _is_nothing(value) else value


class ActivationsSection(Section):
    """`training.offload.activations`: of which layers of each stage what they keep goes to the host."""

    short: ClassVar[str | None] = "layers"
    layers: Annotated[int | float, reads(_some_layers, "all, a number of layers, or a share", "50 %")] = 1.0
    """of each stage, the first ones: a number, a share or all"""
    prefetch: Layers = 1
    """layers that are copied back ahead"""

    @classmethod
    def written_out(cls, value: object) -> object:
        """True is all layers."""
        return {"layers": 1.0} if value is True else super().written_out(value)

    def choice(self) -> ActivationOffload:
        """The offload as the inside knows it."""
        if isinstance(self.layers, int):
            return ActivationOffload(layers=self.layers, prefetch=self.prefetch)
        return ActivationOffload(share=self.layers, prefetch=self.prefetch)


class OffloadSection(Section):
    """`training.offload`: what lives on the host."""

    example: ClassVar[str] = "{activations: all}, {optimizer: true} or, with FSDP, {parameters: true}"
    activations: Annotated[ActivationsSection | None, BeforeValidator(_absent)] = None
    """what layers keep from forward to backward; left out: none"""
    optimizer: Annotated[
        float, share(0.0, 1.0), reads(_part, "a share: 0 to 1, or 0 % to 100 %; true or false", "50 %")
    ] = Field(0.0)
    """part of the optimizer's states, which the CPU then updates; true: all"""
    gradients: bool = False
    """beside the whole optimizer: gradients go while backward makes them"""
    parameters: bool = False
    """with FSDP: shards, their gradients and the whole optimizer"""

    @classmethod
    def written_out(cls, value: object) -> object:
        """None is nothing."""
        return {} if _is_nothing(value) else super().written_out(value)

    @model_validator(mode="after")
    def _shards_take_all(self) -> Self:
        if self.parameters and "optimizer" in self.model_fields_set and self.optimizer < 1.0:
            raise mistake("parameters on the host take the whole optimizer along; leave optimizer out")
        if self.gradients and not self.parameters and self.optimizer < 1.0:
            raise mistake("gradients go to the host where all of the optimizer is; write optimizer: true")
        return self

    def choice(self) -> Offload:
        """The offload as the inside knows it."""
        activations = self.activations.choice() if self.activations else None
        if self.parameters:
            return Offload(activations, ShardOffload())
        states = OptimizerOffload(self.optimizer, gradients=self.gradients) if self.optimizer else None
        return Offload(activations, states)


def check_offload(scenario: Setup) -> Iterator[str]:
    """Whether there is a host to offload to, and whether the layout has what is to be offloaded."""
    if scenario.training.offload == NOTHING:
        return
    for check in (_has_host, _not_naive, _has_layers, _has_shards, _reduces_in_time):
        yield from check(scenario)


def _has_host(scenario: Setup) -> Iterator[str]:
    cluster = scenario.cluster
    if cluster.host is None:
        yield (
            f"training.offload: offload without host memory: {cluster.name} does not say what its hosts have; give "
            f"cluster.node.host_memory: {_EXAMPLE} (in a graph file, the graph's host_memory)"
        )


def _not_naive(scenario: Setup) -> Iterator[str]:
    if isinstance(scenario.layout.data, NaiveDataParallel):
        yield "training.offload: torch.nn.DataParallel has no offload; use ddp, zero1, zero2 or fsdp"


def _has_layers(scenario: Setup) -> Iterator[str]:
    activations = scenario.training.offload.activations
    try:
        most = max(partition_layers(scenario.layout.layers_per_stage, scenario.model.layers, scenario.placement))
    except InputError:  # told of the layout
        return
    if activations is not None and (activations.layers or 0) > most:
        yield (
            f"training.offload.activations: {activations.layers} layers, but no stage holds more than {most}; "
            f"{most} or all fits"
        )


def _reduces_in_time(scenario: Setup) -> Iterator[str]:
    """Gradients that are whole until the last microbatch cannot leave before; shards go as FSDP reduces them."""
    layout, states = scenario.layout, scenario.training.offload.states
    asked = isinstance(states, OptimizerOffload) and states.gradients
    alone = layout.group_size(DP_GROUP) == 1
    if asked and not alone and layout.gradient_sync is not GradientSync.EVERY_BACKWARD:
        yield (
            "training.offload.gradients: they are reduced after the last microbatch only, and are whole on the device "
            "until then; with layout.data zero2 or fsdp, without a pipeline, they can go; or leave gradients out"
        )


def _has_shards(scenario: Setup) -> Iterator[str]:
    layout = scenario.layout
    if not scenario.training.offload.shards:
        return
    if not isinstance(layout.data, FullyShard):
        why = "layout.data is not fsdp or zero3"
    elif all(group.shard_count == 1 for group in parameter_groups(layout, scenario.training)):
        why = f"{'shard' if layout.is_hybrid_sharded else 'dp x cp ='} 1 leaves nothing to shard"
    elif any(
        group.shard_count == 1 for group in parameter_groups(layout, scenario.training, experts=layout.has_expert_mesh)
    ):
        why = f"ep {layout.ep} x etp {layout.effective_etp} leaves nothing of experts to shard"
    else:
        return
    yield f"training.offload.parameters: only sharded parameters are offloaded, and {why}; optimizer: true fits"
