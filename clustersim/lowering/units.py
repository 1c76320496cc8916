"""Units of a pipeline stage: the operations of its embedding, layers and head.

A unit is what FSDP gathers at once and what a layer-wise timeline shows: the embedding, one layer, or the
head (final norm, logits, loss). Full recomputation runs a layer's forward again before its backward;
selective recomputation only some of its modules (or all operations but those whose outputs are saved). Both
run to the end or, with `training.early_stop`, until everything that backward needs is there. The embedding
and the head are never recomputed. A reference model's forward runs unit by unit with the model's, where frameworks run
one pass after the other. Where backward is split, recomputation comes before the input gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from clustersim.common.cached_method import cached_by
from clustersim.common.interning import Interner
from clustersim.common.units import Bytes
from clustersim.lowering.scan_copies import scan_copies
from clustersim.memory.activations import Activations
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.layer_stack import LayerSpec, LayerStack
from clustersim.model.layers import LayerOperators
from clustersim.model.model_ends import Projector
from clustersim.model.training import DotsSaveableRecompute, SelectiveOpRecompute, SelectiveRecompute
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layer_sharding import LayerSharding
from clustersim.parallel.mesh import ENCODER_IMAGES_GROUP
from clustersim.parallel.plan import EncoderPlan, Plan, StageLayers
from clustersim.parallel.tensor_parallel import (
    backward_operations,
    forward_operations,
    input_gradient_operations,
    recomputed_forward,
    recomputed_modules,
    recomputed_operations,
    weight_gradient_operations,
)
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveType, CommOp, Operation, WorkType


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Embedding, layer or head of a stage. Compared by identity, as equal layers share a unit.

    parameters_by_group: parameters on this rank by parameter group; used_by_group: with those of earlier units that it
    uses again; is_head: final norm, logits and loss; has_backward:
    backward runs through it; input_gradients, weight_gradients: the halves of `backward`, where a schedule splits it.
    """

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    input_gradients: tuple[Operation, ...]
    weight_gradients: tuple[Operation, ...]
    parameters_by_group: Mapping[str, int]
    used_by_group: Mapping[str, int]
    is_head: bool = False
    has_backward: bool = True

    @property
    def parameter_count(self) -> int:
        """Number of parameters on this rank."""
        return sum(self.parameters_by_group.values())

    def operations(self, kind: ActionKind) -> tuple[Operation, ...]:
        """Operations of a pass through the unit."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward
            case ActionKind.BACKWARD:
                return self.backward
            case ActionKind.INPUT_GRADIENT:
                return self.input_gradients
            case ActionKind.WEIGHT_GRADIENT:
                return self.weight_gradients


@dataclass(frozen=True)
class UnitBuilder:
    """Builds the units of a plan's stages; equal layers share a unit."""

    plan: Plan
    _specs: Interner[LayerSpec] = field(default_factory=Interner)
    _class_by_content: dict[tuple[LayerStack, tuple[bool, ...], tuple[int | None, ...]], int] = field(
        default_factory=dict
    )

    @cached_by(lambda _, stage: stage.index)
    def stage_class(self, stage: PipelineStage) -> int:
        """Index of the equivalence class of a stage: equal for stages with equal work."""
        ends = stage.has_encoder, stage.has_embedding, stage.has_head
        content = stage.stack, ends, self.plan.load_indices(stage)
        return self._class_by_content.setdefault(content, len(self._class_by_content))

    @cached_by(lambda _, stage, kind: (stage.index, kind))
    def stage_operations(self, stage: PipelineStage, kind: ActionKind) -> tuple[Operation, ...]:
        """Operations of a pass through a full stage."""
        return pass_operations(self.stage_units(stage), kind)

    @cached_by(lambda _, stage: stage.index)
    def stage_units(self, stage: PipelineStage) -> tuple[Unit, ...]:
        """Units of a stage in model order."""
        layer_runs = [run for run in self.plan.layer_runs(stage) for _ in range(run.layers.count)]
        layers = [
            self.layer_unit(*layer_run) for layer_run in zip(layer_runs, self.plan.load_indices(stage), strict=True)
        ]
        embedding_units = [self.embedding_unit(self.plan.embedding)] if stage.has_embedding else []
        mtp_embeddings = [self.embedding_unit(mtp_embedding) for mtp_embedding in self.plan.mtp_embeddings(stage)]
        main_layer_count = len(layers) - stage.mtp_layer_count
        head_units = [self.head_unit(self.plan.stage_head(stage))] if stage.has_head else []
        encoder = self.plan.stage_encoder(stage)
        return (
            *(() if encoder is None else self._encoder_units(encoder)),
            *embedding_units,
            *layers[:main_layer_count],
            *mtp_embeddings,
            *layers[main_layer_count:],
            *head_units,
        )

    def _encoder_units(self, encoder: EncoderPlan) -> tuple[Unit, ...]:
        """Units of an encoder; behind its last one replicas on the model's ranks gather a sequence's tokens.

        Backward scatters the sum of the gradients, of which each rank has those of its part of the sequence; without
        sequence and context parallelism each has all.
        """
        *others, last = UnitBuilder(encoder.plan).stage_units(encoder.stage)
        layout, sizes = self.plan.layout, (ENCODER_IMAGES_GROUP.name, encoder.projected_bytes)
        if layout.encoder_ranks:
            return *others, last
        if layout.has_encoder_mesh:
            gather = Operation(CommOp("gather images", CollectiveType.ALL_GATHER, *sizes), WorkType.FORWARD)
            last = replace(last, forward=(*last.forward, gather))
        if layout.has_encoder_mesh and last.has_backward and (layout.sequence_parallel or layout.cp > 1):
            dtype = self.plan.training.recipe.activations
            comm_op = CommOp("scatter gradients of images", CollectiveType.REDUCE_SCATTER, *sizes, reduce_dtype=dtype)
            scatter = Operation(comm_op, WorkType.BACKWARD)
            last = replace(last, backward=(scatter, *last.backward), input_gradients=(scatter, *last.input_gradients))
        return *others, last

    def _layer_key(self, layer_run: StageLayers, load_index: int | None) -> tuple[int, bool, bool, int | None]:
        return self._specs.index_of(layer_run.layers.spec), layer_run.recomputed, layer_run.offloaded, load_index

    @cached_by(_layer_key)
    def layer_unit(self, layer_run: StageLayers, load_index: int | None) -> Unit:
        """The unit of one layer; load_index: index of its expert load factors."""
        spec = layer_run.layers.spec
        layer, sharding = self.plan.layer_by_spec[spec], self.plan.layer_sharding(spec, load_index=load_index)
        recomputed = self._recomputed_operations(layer, sharding, recomputed=layer_run.recomputed)
        unit = self._offload_unreduced(
            self._with_reference(
                self._with_scan_copies(
                    _build_unit(self._unit_name("layer"), layer, sharding, recomputed), layer, layer_run
                )
            )
        )
        if not layer_run.offloaded:
            return unit
        return _offload_activations(unit, Activations(self.plan).layer_bytes_of(layer_run))

    def _recomputed_operations(
        self, layer: LayerOperators, sharding: LayerSharding, *, recomputed: bool
    ) -> list[Operation]:
        """Operations of a layer that are recomputed; recomputed: the layer is among those with full recomputation."""
        early_stop = self.plan.training.early_stop
        match self.plan.training.recompute:
            case SelectiveRecompute(modules):
                return recomputed_modules(layer, sharding, modules, early_stop=early_stop)
            case SelectiveOpRecompute():
                return recomputed_operations(layer, sharding, early_stop=early_stop)
            case DotsSaveableRecompute():
                return recomputed_operations(layer, sharding, early_stop=True, saves_products=True)
        return recomputed_forward(layer, sharding, early_stop=early_stop) if recomputed else []

    def embedding_unit(self, layer: LayerOperators) -> Unit:
        """Unit of an embedding."""
        sharding = replace(self.plan.layer_sharding(), has_sharded_input=False)
        return self._offload_unreduced(
            self._with_reference(_build_unit(self._unit_name("embedding"), layer, sharding, []))
        )

    def head_unit(self, layer: LayerOperators) -> Unit:
        """Unit of an output head."""
        unit = _build_unit(self._unit_name("head"), layer, self._head_sharding, [])
        model = self.plan.model
        loss_count = 1 + model.mtp_layers if model.has_vocabulary_loss else 0
        reductions = loss_count * self._head_sharding.vocab_parallel_loss(self.plan.layer_shard.tokens)
        is_last = not isinstance(model.head, Projector)
        return self._offload_unreduced(
            self._with_reference(replace(unit, forward=(*unit.forward, *reductions), is_head=is_last))
        )

    @property
    def _head_sharding(self) -> LayerSharding:
        """Collectives of the head, whose output is the loss, or the tokens that a projector hands on."""
        sharding, model, shard = self.plan.layer_sharding(), self.plan.model, self.plan.layer_shard
        if not isinstance(model.head, Projector):
            return replace(sharding, has_sharded_output=False)
        tokens = shard.batch * model.head.projected_tokens(shard.sequence)
        return replace(
            sharding,
            activation_bytes=float(tokens * model.head.widths[-1] * self.plan.training.recipe.activations.bytes),
            has_sharded_input=model.gradients.layers is not GradientFlow.NONE,
        )

    def _unit_name(self, name: str) -> str:
        """A unit's name; in front of it that of its tower, if the model has several."""
        label = self.plan.model.label
        return f"{label} {name}" if label else name

    def _with_scan_copies(self, unit: Unit, layer: LayerOperators, layer_run: StageLayers) -> Unit:
        """The unit with the copies of what a loop over layers saves, where the framework makes them."""
        training = self.plan.training
        if layer_run.recomputed or not (training.overheads.scan_copies and unit.has_backward):
            return unit
        copies = scan_copies(layer, training.recompute, training.recipe.activations)
        return replace(unit, forward=(*unit.forward, *copies))

    def _with_reference(self, unit: Unit) -> Unit:
        """The unit with the forward of the reference model's, if there is one, before its own."""
        return replace(unit, forward=(*unit.forward, *unit.forward)) if self.plan.training.reference_model else unit

    def _offload_unreduced(self, unit: Unit) -> Unit:
        """The unit; its gradients are offloaded after its backward if the plan offloads unreduced gradients."""
        if not self.plan.offloads_unreduced_gradients:
            return unit
        groups = self.plan.trained_groups
        gradient_bytes = float(
            sum(unit.parameters_by_group.get(group.name, 0) * group.formats.gradients.bytes for group in groups)
        )
        if not gradient_bytes:
            return unit
        return replace(
            unit,
            backward=_offload_gradients(unit.backward, gradient_bytes),
            weight_gradients=_offload_gradients(unit.weight_gradients, gradient_bytes),
        )


def pass_operations(units: Sequence[Unit], kind: ActionKind) -> tuple[Operation, ...]:
    """Operations of a pass through units, given in model order."""
    return tuple(operation for unit in execution_order(units, kind) for operation in unit.operations(kind))


def execution_order(units: Sequence[Unit], kind: ActionKind) -> Sequence[Unit]:
    """Units in execution order of a pass: forward in model order, backward in reverse, as far as it goes."""
    return units if kind is ActionKind.FORWARD else tuple(unit for unit in reversed(units) if unit.has_backward)


def _offload_activations(unit: Unit, size_bytes: Bytes) -> Unit:
    """The unit with `size_bytes` of activations offloaded to the host between its forward and its backward."""
    *preceding, last = unit.forward
    return replace(
        unit,
        forward=(*preceding, replace(last, d2h_bytes=size_bytes)),
        backward=_prefetch_activations(unit.backward, size_bytes),
        input_gradients=_prefetch_activations(unit.input_gradients, size_bytes),
    )


def _offload_gradients(operations: tuple[Operation, ...], size_bytes: Bytes) -> tuple[Operation, ...]:
    *preceding, last = operations
    return *preceding, replace(last, gradient_d2h_bytes=size_bytes)


def _prefetch_activations(operations: tuple[Operation, ...], size_bytes: Bytes) -> tuple[Operation, ...]:
    *preceding, last = (replace(operations[0], h2d_bytes=size_bytes), *operations[1:])
    return *preceding, replace(last, is_last_use=True)


def _build_unit(name: str, layer: LayerOperators, sharding: LayerSharding, recomputed: list[Operation]) -> Unit:
    if not layer.has_backward:
        forward = tuple(forward_operations(layer, sharding))
        return Unit(
            name, forward, (), (), (), layer.parameters_by_group, layer.used_parameters_by_group, has_backward=False
        )
    return Unit(
        name=name,
        forward=tuple(forward_operations(layer, sharding)),
        backward=(*recomputed, *backward_operations(layer, sharding)),
        input_gradients=(*recomputed, *input_gradient_operations(layer, sharding)),
        weight_gradients=tuple(weight_gradient_operations(layer, sharding)),
        parameters_by_group=layer.parameters_by_group,
        used_by_group=layer.used_parameters_by_group,
    )
