"""What lies in a rank's memory for the whole step?

Parameters, gradients and optimizer states, sharded as ZeRO's stage says (Rajbhandari et al. 2020, section 5: with 2
bytes for parameters and gradients and 12 for master weights and moments of P parameters on N ranks, 16 P, 4 P + 12 P/N,
2 P + 14 P/N and 16 P/N bytes), less what is on the host, with buffers for what comes and goes; the layers that ZeRO-3
has gathered; the bucket of whole gradients that ZeRO-2 fills (one: the next is filled while it is reduced only if the
network lags); messages between stages, a posted activation and a posted gradient for each virtual stage (Megatron-LM's
interleaved tests hold as much between steps, too); workspaces of libraries; buffers of process groups; the driver's
context.
Where gradients are reduced after the last microbatch only, as with a pipeline, they are whole until then, whatever the
stage; and the parameters that ZeRO-3 gathers for a pipeline's first forward stay.
Gradients that the optimizer reads as a wider copy are held as that, too: it is replaced in the next step only
(Megatron-LM, `_copy_model_grads_to_main_grads`); so are those that DeepSpeed's `BF16_Optimizer` has added to its sums,
until the next backward.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.memory.activations import Activations
from clustersim.model.framework import Framework
from clustersim.model.layer_stack import RoutedMlp
from clustersim.model.operators import EXPERTS, Layer
from clustersim.model.overheads import Accumulation, Grouping
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.quantization import kept_copies
from clustersim.model.training import Optimizer
from clustersim.parallel.data_parallel_strategy import FullyShard, NaiveDataParallel, Zero2
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan


class Category(IdentityEnum):
    """What memory is used for; the value is its name in answers."""

    PARAMETERS = "parameters"
    COPIES = "parameters in narrow formats"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    OFFLOAD = "offload buffers"
    MESSAGES = "messages and buckets"
    WORKSPACE = "workspaces"
    COMMUNICATION = "communication buffers"
    CONTEXT = "driver context"
    FRAGMENTATION = "fragmentation"


SHARDED: Final = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
"""What there is of every parameter, and ZeRO shards."""
STATES: Final = (*SHARDED, Category.COPIES, Category.COMMUNICATION, Category.CONTEXT)
"""What stays for the whole step, whatever the microbatches and what is computed again."""
Weights = tuple[float, Bytes]
"""Parameters, and bytes of them, their gradients and optimizer states."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of what stays. context: of the accelerator's driver and libraries."""

    plan: Plan
    framework: Framework
    context: Bytes

    def resident(self, pipeline_rank: int) -> dict[Category, Bytes]:
        """Bytes by category that a rank holds for the whole step; activations and fragmentation are not among them."""
        stages, held = self.plan.stages_on_rank(pipeline_rank), self._held(pipeline_rank)
        buckets = sum(self._fullest_bucket(group, stages) for group, _ in held)
        each = [(self.per_parameter(group), count) for group, count in held]
        return {
            **{use: sum(count * sizes[use] for sizes, count in each) for use in SHARDED},
            Category.COPIES: self.copies(stages),
            Category.GATHERED: self.gathered(stages),
            Category.OFFLOAD: Activations(self.plan).buffers(stages) + self.passing(stages),
            Category.MESSAGES: self.receives(stages) + buckets,
            Category.WORKSPACE: self.framework.workspace + self.grouped_workspace(stages),
            Category.COMMUNICATION: self.groups * self.framework.communicator,
            Category.CONTEXT: self.context,
        }

    def copies(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Copies of weights in the format of products, of some stages."""
        elements = sum(
            operator.cast for stage in stages for unit in self.plan.stage_units(stage) for operator in unit.operators
        )
        return kept_copies(self.plan.training.recipe, elements)

    def weights(self, pipeline_rank: int) -> dict[str, Weights]:
        """By name of its group, parameters that a rank computes with, and bytes of them, gradients and states."""
        held = self._held(pipeline_rank)
        return {group.name: (count, count * sum(self.per_parameter(group).values())) for group, count in held}

    def experts_and_others(self, pipeline_rank: int) -> tuple[Weights, Weights]:
        """What experts take on a pipeline rank, and all other weights."""
        weights = self.weights(pipeline_rank)
        experts = weights.pop(EXPERTS, (0.0, 0.0))
        return experts, (sum(count for count, _ in weights.values()), sum(size for _, size in weights.values()))

    def saved(self) -> Bytes:
        """Bytes of a checkpoint of the whole model: trained weights as stored, their master copies and moments.

        What several ranks hold of the same is counted once; frozen weights are not saved.
        """
        ranks = self.plan.layout.world_size // self.plan.layout.pp
        return sum(
            count * ranks / group.dp_size * (group.formats.stored.bytes + self._state_bytes(group))
            for pipeline_rank in range(self.plan.layout.pp)
            for group, count in self._held(pipeline_rank)
            if group.is_trained
        )

    def _held(self, pipeline_rank: int) -> list[tuple[ParameterGroup, float]]:
        """Parameters of each group on a pipeline rank's stages, before ZeRO shards them."""
        stages = self.plan.stages_on_rank(pipeline_rank)
        return [
            (group, float(sum(self.plan.parameter_count(stage, group.name) for stage in stages)))
            for group in self.plan.parameter_groups
        ]

    def grouped_workspace(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """What libraries take for grouped products, where the layers of some stages have them."""
        mixtures = any(mixture.alone is None for mixture in _mixtures(stages))
        grouped = self.plan.training.grouping is not Grouping.LOOP
        return self.framework.grouped_workspace if mixtures and grouped else 0.0

    def per_parameter(self, group: ParameterGroup) -> dict[Category, Bytes]:
        """Bytes by category for each parameter of a group on a rank."""
        states = (1.0 - self.plan.training.offload.share) * self._state_bytes(group) / self._shards(group, 1)
        gradients = self._gradient_bytes(group) + self._extra_gradient_bytes(group)
        own = self._parameter_bytes(group), gradients, states
        return dict(zip(SHARDED, own, strict=True))

    def _extra_gradient_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of a parameter's gradients as backward made them, where these stay.

        The copy that the optimizer reads of narrow gradients is there when activations are not (Megatron-LM frees it
        with the next step's `zero_grad`).
        """
        training = self.plan.with_weight_formats(group.formats)
        if not group.is_trained or training.offload.gradients:
            return 0.0
        converts = training.accumulation is Accumulation.CONVERTED
        made = training.recipe.activations
        return made.bytes if converts and made is not group.formats.gradients else 0.0

    def _parameter_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of a parameter, unless it is on the host, and of backward's copy of it."""
        own = 0.0 if self.plan.training.offload.shards else group.formats.stored.bytes / self._shards(group, 3)
        return (
            own if group.secondary_group is None else own + group.formats.gathered.bytes / group.secondary_shard_count
        )

    def _gradient_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of the gradient of a parameter; none of frozen ones, and of those that leave for the host."""
        if not group.is_trained or self.plan.offloads_unreduced_gradients:
            return 0.0
        if self.plan.accumulates_full_gradients:
            return group.formats.gradients.bytes
        leave = self.plan.training.offload.gradients and not self.plan.accumulates_sharded_gradients(group)
        return 0.0 if leave else group.formats.gradients.bytes / self._shards(group, 2)

    def _state_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of master weights and moments per parameter; of frozen ones there are none."""
        if not group.is_trained:
            return 0.0
        moments = 2 if self.plan.training.optimizer is Optimizer.ADAM else 1
        copied = 0.0 if group.formats.copy is None else group.formats.copy.bytes
        return moments * group.formats.moments.bytes + copied

    def _shards(self, group: ParameterGroup, stage: int) -> int:
        """Ranks over which ZeRO spreads what its stage `stage` shards."""
        return group.shard_count if self.plan.layout.data.zero_stage >= stage else 1

    def gathered(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """Whole units that ZeRO-3 holds at once, neighbours on their stage, and one unit's whole gradients."""
        match self.plan.layout.data:
            case FullyShard() as strategy:
                groups, trained = self.plan.parameter_groups, self.plan.trained_groups
                units = [self.plan.stage_units(stage) for stage in stages]
                whole = [[_whole(unit, groups, lambda formats: formats.gathered) for unit in item] for item in units]
                dropped = strategy.reshards_parameters(is_pipelined=self.plan.layout.is_pipelined)
                held = _fullest(whole, strategy.prefetch_depth + 1) if dropped else sum(map(sum, whole))
                if self.plan.accumulates_full_gradients:
                    return held
                every = (unit for element in units for unit in element)
                return held + max(_whole(unit, trained, lambda formats: formats.gradients) for unit in every)
        return 0.0

    def passing(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """What is on its way: shards of parameters from the host to their gathers, and gradients of one unit to it.

        Of gradients that nobody reduces, those of the unit whose backward runs are there, too.
        """
        offload, ahead = self.plan.training.offload, 0
        if isinstance(self.plan.layout.data, FullyShard) and offload.shards:
            ahead = self.plan.layout.data.prefetch_depth + 1
        away = (2 if self.plan.offloads_unreduced_gradients else 1) * offload.gradients
        units = {id(unit): unit for stage in stages for unit in self.plan.stage_units(stage)}.values()
        return max(
            sum(
                unit.counts.get(group.name, 0) / self._shards(group, 2)
                * (ahead * group.host_format.bytes + away * group.is_trained * group.formats.gradients.bytes)
                for group in self.plan.parameter_groups
            )
            for unit in units
        )  # fmt: skip

    def _fullest_bucket(self, group: ParameterGroup, stages: Iterable[PipelineStage]) -> Bytes:
        """The largest of the buckets that a rank's stages fill in turn."""
        counts = [(stage, float(self.plan.parameter_count(stage, group.name))) for stage in stages]
        return max(self.bucket(group, count, first=self.plan.is_first_chunk(stage)) for stage, count in counts)

    def bucket(self, group: ParameterGroup, count: float, *, first: bool) -> Bytes:
        """A bucket of a stage's `count` whole gradients of a group, where those of ZeRO-2 wait for their reduction.

        first: whether the stage is the first pipeline rank's first.
        """
        match self.plan.layout.data:
            case Zero2() as strategy if (
                group.dp_size > 1 and group.is_trained and not self.plan.accumulates_full_gradients
            ):
                width = group.formats.gradients.bytes
                ranks = self.plan.layout.group_size(DP_GROUP)
                return min(strategy.bucket_bytes(ranks, width, is_first_chunk=first), count * width)
        return 0.0

    @property
    def groups(self) -> int:
        """Process groups that the rank is in (those of one member need no buffers)."""
        layout = self.plan.layout
        if isinstance(layout.data, NaiveDataParallel):
            return 1
        return sum(degree > 1 for degree in layout.all_degrees.values()) + layout.is_hybrid_sharded

    def receives(self, stages: Iterable[PipelineStage]) -> Bytes:
        """A posted activation and a posted gradient for each virtual stage, of what stages send there.

        A rank with fewer stages than others has as many.
        """
        if self.plan.layout.pp == 1:
            return 0.0
        wider = sum(
            self.plan.sent_activation_count(at) - 1 for stage in stages for at in (stage.index - 1, stage.index)
        )
        return (2 * self.plan.placement.max_chunks + wider) * self.plan.activation_bytes / self.plan.layout.tp


def _fullest(stages: Iterable[Sequence[Bytes]], many: int) -> Bytes:
    """The largest sum of so many neighbours of one stage."""
    return max(sum(units[place : place + many]) for units in stages for place in range(max(1, len(units) - many + 1)))


def _mixtures(stages: Iterable[PipelineStage]) -> Iterable[RoutedMlp]:
    """The mixtures of experts of some stages."""
    return (run.spec.mlp for stage in stages for run in stage.stack if isinstance(run.spec.mlp, RoutedMlp))


def _whole(unit: Layer, groups: Iterable[ParameterGroup], kept: Callable[[WeightFormats], DType]) -> Bytes:
    """Bytes of those of a unit's parameters that are sharded, gathered. kept: in which of their formats."""
    sharded = (group for group in groups if group.shard_count > 1)
    return float(sum(unit.counts.get(group.name, 0) * kept(group.formats).bytes for group in sharded))
