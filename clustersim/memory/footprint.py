"""What occupies a rank's memory for the whole step?

Parameters, gradients and optimizer states, sharded by ZeRO stage (Rajbhandari et al. 2020, section 5: with 2 bytes for
parameters and gradients and 12 for master weights and moments of P parameters on N ranks, 16 P, 4 P + 12 P/N, 2 P + 14
P/N and 16 P/N bytes), less what is offloaded, with buffers for offload transfers; the layers that ZeRO-3 has gathered;
the bucket of unsharded gradients that ZeRO-2 fills (one: the next is filled while it is reduced only if the network
lags); receive buffers between stages, one activation and one gradient for each virtual stage (Megatron-LM's
interleaved tests hold as much between steps, too); library workspaces and gradients (`memory.kept_gradients`);
communicator buffers; the driver's context. Where gradients are reduced after the last microbatch only, as with a
pipeline, they are unsharded until then, whatever the stage; and the parameters that ZeRO-3 gathers for a pipeline's
first forward stay. DDP and the distributed optimizers keep gradients in buffers for the whole step. FSDP has them from
a stage's first backward to the reduction in its last: so few stages' at once, where an order runs the backwards of one
stage after the other (`memory.ledger`; PyTorch, `FSDPParamGroup.post_backward` in
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). In PyTorch, gradients are freed after the optimizer's step,
so that a step's only backward creates them while it frees activations, and the shards of FSDP are its master weights:
there is no copy in the compute format but the gathered one. Gradients of which the optimizer reads a higher-precision
copy are held in that form, too: the copy is replaced in the next step only (Megatron-LM,
`_copy_model_grads_to_main_grads`); so are gradients that DeepSpeed's `BF16_Optimizer` has added to its sums, until the
next backward. Where the optimizer runs in backward, those of one unit exist at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes
from clustersim.memory.activations import Activations
from clustersim.memory.kept_gradients import kept_gradient_elements
from clustersim.model.framework import Framework
from clustersim.model.layer_stack import MoeMlp
from clustersim.model.operators import EXPERTS, LayerOperators
from clustersim.model.overheads import Accumulation, Grouping
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.quantization import cached_weight_bytes
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, Zero2
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan


class MemoryCategory(IdentityEnum):
    """What memory is used for; the value is its label in results."""

    PARAMETERS = "parameters"
    COPIES = "low-precision parameter copies"
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


SHARDED_CATEGORIES: Final = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
"""Categories that exist for every parameter and are sharded by ZeRO."""
CONSTANT_CATEGORIES: Final = (
    *SHARDED_CATEGORIES,
    MemoryCategory.COPIES,
    MemoryCategory.COMMUNICATION,
    MemoryCategory.CONTEXT,
)
"""Categories that are constant over the step, whatever the microbatches and the recomputation."""
WeightUse = tuple[float, Bytes]
"""Parameter count, and bytes of the parameters, their gradients and optimizer states."""


@dataclass(frozen=True)
class Footprint:
    """Memory that is resident for the whole step. context_bytes: of the accelerator's driver and libraries."""

    plan: Plan
    framework: Framework
    context_bytes: Bytes

    def resident_bytes(self, pipeline_rank: int) -> dict[MemoryCategory, Bytes]:
        """Bytes by category that a rank holds for the whole step, without activations and fragmentation."""
        stages, group_counts = self.plan.stages_on_rank(pipeline_rank), self._parameters_by_group(pipeline_rank)
        bucket_bytes = sum(self._largest_bucket(group, stages) for group, _ in group_counts)
        sizes_and_counts = [(self.bytes_per_parameter(group), count) for group, count in group_counts]
        sharded = {
            category: sum(count * sizes[category] for sizes, count in sizes_and_counts)
            for category in SHARDED_CATEGORIES
        }
        sharded[MemoryCategory.GRADIENTS] += self.updated_gradient_bytes(stages)
        return {
            **sharded,
            MemoryCategory.COPIES: self.low_precision_copy_bytes(stages),
            MemoryCategory.GATHERED: self.gathered_bytes(stages),
            MemoryCategory.OFFLOAD: Activations(self.plan).offload_buffer_bytes(stages) + self.in_transit_bytes(stages),
            MemoryCategory.MESSAGES: self.receive_buffer_bytes(stages) + bucket_bytes,
            MemoryCategory.WORKSPACE: self.workspace_bytes(stages),
            MemoryCategory.COMMUNICATION: self.communicator_count(pipeline_rank) * self.framework.communicator_bytes,
            MemoryCategory.CONTEXT: self.context_bytes,
        }

    def updated_gradient_bytes(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of the gradients of one unit, where each is updated and freed while backward runs.

        Where backward creates gradients (FSDP), the buffer that they are reduced from holds those of a unit.
        """
        is_counted = self.creates_gradients and self.plan.layout.data.shards_parameters
        if is_counted or not self.plan.training.optimizer_in_backward:
            return 0.0
        units = (unit for stage in stages for unit in self.plan.stage_units(stage))
        widths = {
            group.name: group.formats.gradients.bytes / self._shard_count(group, 2)
            for group in self.plan.trained_groups
        }
        return max(
            sum(unit.used_parameters_by_group.get(name, 0) * width for name, width in widths.items()) for unit in units
        )

    def low_precision_copy_bytes(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of the weights' copies in the matmul format, over some stages."""
        elements = sum(
            operator.cached_cast_elements
            for stage in stages
            for unit in self.plan.stage_units(stage)
            for operator in unit.operators
        )
        return cached_weight_bytes(self.plan.training.recipe, elements)

    def weights_by_group(self, pipeline_rank: int) -> dict[str, WeightUse]:
        """By parameter group name: parameters on a rank, and bytes of them, their gradients and states."""
        group_counts = self._parameters_by_group(pipeline_rank)
        return {
            group.name: (count, count * sum(self.bytes_per_parameter(group).values())) for group, count in group_counts
        }

    def split_experts(self, pipeline_rank: int) -> tuple[WeightUse, WeightUse]:
        """Weight memory of experts on a pipeline rank, and of all other weights."""
        weights = self.weights_by_group(pipeline_rank)
        experts = weights.pop(EXPERTS, (0.0, 0.0))
        return experts, (sum(count for count, _ in weights.values()), sum(size for _, size in weights.values()))

    def checkpoint_bytes(self) -> Bytes:
        """Bytes of a checkpoint of the full model: trained weights as stored, their master copies and moments.

        Replicas are counted once; frozen weights are not saved.
        """
        ranks_at = self.plan.layout.ranks_at
        return sum(
            count
            * ranks_at(pipeline_rank)
            / group.dp_size
            * (self._stored_format(group).bytes + self._state_bytes(group))
            for pipeline_rank in range(self.plan.layout.pp)
            for group, count in self._parameters_by_group(pipeline_rank)
            if group.is_trained
        )

    def _parameters_by_group(self, pipeline_rank: int) -> list[tuple[ParameterGroup, float]]:
        """Parameters of each group on a pipeline rank's stages, before ZeRO sharding."""
        stages = self.plan.stages_on_rank(pipeline_rank)
        return [
            (group, float(sum(self.plan.parameter_count(stage, group.name) for stage in stages)))
            for group in self.plan.parameter_groups
        ]

    def workspace_bytes(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """Bytes that libraries keep for some stages' layers: workspaces, and gradients that nobody reads."""
        layers = (self.plan.layer_by_spec[run.spec] for stage in stages for run in stage.stack)
        kept = kept_gradient_elements(layers) if self.plan.keeps_weight_gradients else 0
        kept_bytes = kept * self.plan.training.recipe.activations.bytes
        return self.framework.workspace_bytes + self.grouped_workspace_bytes(stages) + kept_bytes

    def grouped_workspace_bytes(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """Bytes of library workspaces for grouped GEMMs, where the layers of some stages have them."""
        has_grouped_experts = any(moe.single_dense_mlp is None for moe in _moe_layers(stages))
        is_grouped = self.plan.training.grouping is not Grouping.LOOP
        return self.framework.grouped_workspace_bytes if has_grouped_experts and is_grouped else 0.0

    def bytes_per_parameter(self, group: ParameterGroup) -> dict[MemoryCategory, Bytes]:
        """Bytes by category for each parameter of a group on a rank."""
        states = (1.0 - self.plan.training.offload.share) * self._state_bytes(group) / self._shard_count(group, 1)
        gradients = self._gradient_bytes(group) + self._extra_gradient_bytes(group)
        sizes = self._parameter_bytes(group), gradients, states
        return dict(zip(SHARDED_CATEGORIES, sizes, strict=True))

    def _extra_gradient_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes per parameter of gradients in the format that backward produces, where these stay.

        The higher-precision copy that the optimizer reads exists when activations do not (Megatron-LM frees it
        with the next step's `zero_grad`).
        """
        training = self.plan.with_weight_formats(group.formats)
        if not group.is_trained or training.offload.offloads_gradients:
            return 0.0
        converts = training.accumulation is Accumulation.CONVERTED
        produced = training.recipe.activations
        return produced.bytes if converts and produced is not group.formats.gradients else 0.0

    def _parameter_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes per parameter, unless it is on the host, and of its secondary shards (hpZ)."""
        stored = (
            0.0
            if self.plan.training.offload.offloads_shards
            else self._stored_format(group).bytes / self._shard_count(group, 3)
        )
        if self.plan.training.reference_model and self.plan.training.lora is None:
            stored += group.formats.stored.bytes / self._shard_count(group, 3)
        return (
            stored
            if group.secondary_group is None
            else stored + group.formats.gathered.bytes / group.secondary_shard_count
        )

    def _shards_master_weights(self, group: ParameterGroup) -> bool:
        """Whether the shards of a group's weights are its master weights."""
        is_fsdp = self.framework.torch_fsdp and isinstance(self.plan.layout.data, FullyShard)
        has_master = group.is_trained and group.formats.master_copy is not None
        return is_fsdp and has_master and not self.plan.training.offload.share

    def _stored_format(self, group: ParameterGroup) -> DType:
        """The format of a group's stored weights or, where these are the master weights, of those."""
        formats = group.formats
        return formats.updated if self._shards_master_weights(group) else formats.stored

    @property
    def creates_gradients(self) -> bool:
        """Whether a step's only backward creates all gradients, as PyTorch does where nothing buffers them (DDP)."""
        layout = self.plan.layout
        is_unbuffered = isinstance(layout.data, FullyShard) or layout.group_size(DP_GROUP) == 1
        has_one_backward = self.plan.microbatches == 1 and not layout.is_pipelined
        return self.framework.torch_fsdp and is_unbuffered and has_one_backward

    def created_bytes_per_parameter(self, group: ParameterGroup) -> Bytes:
        """Bytes of gradient per parameter that a step's only backward creates."""
        return self._kept_gradient_bytes(group) if self.creates_gradients else 0.0

    def created_gradient_bytes(self, pipeline_rank: int) -> Bytes:
        """Bytes of the gradients that a step's only backward creates on a rank."""
        return sum(
            count * self.created_bytes_per_parameter(group) for group, count in self._parameters_by_group(pipeline_rank)
        )

    def _gradient_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of gradient per parameter that stay for the whole step."""
        return 0.0 if self.creates_gradients else self._kept_gradient_bytes(group)

    def _kept_gradient_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of gradient per parameter; 0 for frozen ones, and for those offloaded to the host."""
        if not group.is_trained or self.plan.offloads_unreduced_gradients or self.plan.training.optimizer_in_backward:
            return 0.0
        if self.plan.accumulates_full_gradients and not self.frees_reduced_gradients:
            return group.formats.gradients.bytes
        offloaded = self.plan.training.offload.offloads_gradients and not self.plan.accumulates_sharded_gradients(group)
        return 0.0 if offloaded else group.formats.gradients.bytes / self._shard_count(group, 2)

    @property
    def frees_reduced_gradients(self) -> bool:
        """Whether gradients are accumulated unsharded, but freed once they are reduced (FSDP)."""
        return self.plan.accumulates_full_gradients and isinstance(self.plan.layout.data, FullyShard)

    def unreduced_gradient_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes by which a stage's gradients exceed what is resident of them, until they are reduced."""
        return sum(
            self.plan.parameter_count(stage, group.name) * self.unreduced_bytes_per_parameter(group)
            for group in self.plan.parameter_groups
        )

    def unreduced_bytes_per_parameter(self, group: ParameterGroup) -> Bytes:
        """The same for each parameter of a group; 0 where gradients are not freed once they are reduced."""
        if not (self.frees_reduced_gradients and group.is_trained):
            return 0.0
        return group.formats.gradients.bytes - self._kept_gradient_bytes(group)

    def reduction_buffer_bytes(self, stage: PipelineStage) -> Bytes:
        """Bytes of the buffer from which the gradients of a stage's largest unit are reduced."""
        return max(
            (
                _gathered_unit_bytes(unit, self.plan.trained_groups, lambda formats: formats.gradients)
                for unit in self.plan.stage_units(stage)
            ),
            default=0.0,
        )

    def _state_bytes(self, group: ParameterGroup) -> Bytes:
        """Bytes of moments and of separate master weights per parameter; 0 for frozen ones."""
        if not group.is_trained:
            return 0.0
        has_copy = group.formats.master_copy is not None and not self._shards_master_weights(group)
        master_bytes = group.formats.updated.bytes if has_copy else 0.0
        return group.state_bytes + master_bytes

    def _shard_count(self, group: ParameterGroup, stage: int) -> int:
        """Number of ranks over which ZeRO shards what its stage `stage` shards."""
        return group.shard_count if self.plan.layout.data.zero_stage >= stage else 1

    def gathered_bytes(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """Bytes of the adjacent unsharded units that ZeRO-3 holds at once, and of one unit's full gradients."""
        match self.plan.layout.data:
            case FullyShard() as strategy:
                groups = self.plan.parameter_groups
                units = [self.plan.stage_units(stage) for stage in stages]
                unit_bytes = [
                    [_gathered_unit_bytes(unit, groups, lambda formats: formats.gathered) for unit in stage_units]
                    for stage_units in units
                ]
                reshards = strategy.reshards_parameters(is_pipelined=self.plan.layout.is_pipelined)
                total, window = sum(map(sum, unit_bytes)), _max_window(unit_bytes, strategy.prefetch_depth + 1)
                parameter_bytes = max(window, min(total, self.framework.zero3_live_bytes)) if reshards else total
                if self.plan.accumulates_full_gradients:
                    return parameter_bytes
                buffers = max(map(self.reduction_buffer_bytes, stages)) + self.framework.zero3_bucket_bytes
                return parameter_bytes + buffers
        return 0.0

    def in_transit_bytes(self, stages: tuple[PipelineStage, ...]) -> Bytes:
        """Bytes in transit to or from the host: prefetched parameter shards, and gradients of one unit.

        With gradients that are never reduced, those of the unit whose backward runs are there, too.
        """
        offload, prefetched = self.plan.training.offload, 0
        if self.plan.layout.data.shards_parameters and offload.offloads_shards:
            prefetched = self.plan.layout.data.prefetch_depth + 1
        leaving = (2 if self.plan.offloads_unreduced_gradients else 1) * offload.offloads_gradients
        if not prefetched and not leaving:
            return 0.0
        return max(
            sum(
                unit.parameters_by_group.get(group.name, 0) / self._shard_count(group, 2)
                * (prefetched * group.host_format.bytes + leaving * group.is_trained * group.formats.gradients.bytes)
                for group in self.plan.parameter_groups
            )
            for stage in stages
            for unit in self.plan.stage_units(stage)
        )  # fmt: skip

    def _largest_bucket(self, group: ParameterGroup, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of the largest of the buckets that a rank's stages fill in turn."""
        counts = [(stage, float(self.plan.parameter_count(stage, group.name))) for stage in stages]
        return max(self.bucket_bytes(group, count, is_first=self.plan.is_first_chunk(stage)) for stage, count in counts)

    def bucket_bytes(self, group: ParameterGroup, count: float, *, is_first: bool) -> Bytes:
        """Bytes of the ZeRO-2 bucket in which `count` unsharded gradients of a group wait for their reduction.

        is_first: whether the stage is the first pipeline rank's first.
        """
        waiting_bytes = count * self.waiting_bytes_per_parameter(group)
        return min(self.bucket_limit(group, is_first=is_first), waiting_bytes) if waiting_bytes else 0.0

    def bucket_limit(self, group: ParameterGroup, *, is_first: bool) -> Bytes:
        """Bytes that a bucket of a group's gradients holds at most; 0 unless the strategy is ZeRO-2."""
        match self.plan.layout.data:
            case Zero2() as strategy:
                ranks = self.plan.layout.group_size(DP_GROUP)
                return strategy.bucket_bytes(ranks, group.formats.gradients.bytes, is_first_chunk=is_first)
        return 0.0

    def waiting_bytes_per_parameter(self, group: ParameterGroup) -> Bytes:
        """Bytes of gradient per parameter that ZeRO-2 holds while it waits for its reduction, more than what is kept.

        Gradients that are reduced once are reduced in place, as ZeRO-1's are: the kept shard is one of the bucket's.
        Gradients of a further microbatch wait next to the shard that they will be added to.
        """
        strategy = self.plan.layout.data
        is_bucketed = isinstance(strategy, Zero2) and group.dp_size > 1 and group.is_trained
        if not is_bucketed or self.plan.accumulates_full_gradients:
            return 0.0
        width = group.formats.gradients.bytes
        reduces_once = self.plan.layout.gradient_sync is not GradientSync.EVERY_BACKWARD
        return width - self._kept_gradient_bytes(group) if reduces_once else width

    def communicator_count(self, pipeline_rank: int = 0) -> int:
        """Number of communicators with more than one member of a pipeline rank's ranks."""
        layout = self.plan.layout
        if layout.encoder_ranks and pipeline_rank == 0:
            return sum(degree > 1 for degree in layout.encoder_layout.degrees.values())
        if layout.data.is_single_process:
            return 1
        return sum(degree > 1 for degree in layout.all_degrees.values()) + layout.is_hybrid_sharded

    def receive_buffer_bytes(self, stages: Iterable[PipelineStage]) -> Bytes:
        """Bytes of receive buffers: an activation and a gradient for each virtual stage.

        A rank with fewer stages than others has as many buffers.
        """
        if self.plan.layout.pp == 1:
            return 0.0
        extra_copies = sum(
            self.plan.sent_activation_count(boundary) - 1
            for stage in stages
            for boundary in (stage.index - 1, stage.index)
        )
        return (2 * self.plan.placement.max_chunks + extra_copies) * self.plan.activation_bytes / self.plan.layout.tp


def _max_window(stages: Iterable[Sequence[Bytes]], count: int) -> Bytes:
    """The largest sum of `count` adjacent units of one stage."""
    return max(sum(units[start : start + count]) for units in stages for start in range(max(1, len(units) - count + 1)))


def _moe_layers(stages: Iterable[PipelineStage]) -> Iterable[MoeMlp]:
    """The MoE MLPs of some stages."""
    return (run.spec.moe for stage in stages for run in stage.stack if run.spec.moe is not None)


def _gathered_unit_bytes(
    unit: LayerOperators, groups: Iterable[ParameterGroup], dtype_of: Callable[[WeightFormats], DType]
) -> Bytes:
    """Bytes of a unit's sharded parameters when gathered. dtype_of: selects one of their formats."""
    sharded_groups = (group for group in groups if group.shard_count > 1)
    return float(
        sum(
            unit.used_parameters_by_group.get(group.name, 0) * dtype_of(group.formats).bytes for group in sharded_groups
        )
    )
