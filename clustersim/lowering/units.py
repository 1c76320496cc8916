"""What does a stage consist of, as operations?

A unit is what ZeRO-3 gathers at once and what a layer-wise timeline shows: the embedding, one layer, or the head (final
norm, logits, loss). Full recomputation runs a layer's forward again before its backward, selective recomputation only
some modules of it (or all but what it keeps of single operations), both to the end or, with `training.early_stop`,
until all is there that backward needs; the embedding and the head are never run again.
Where backward is run in halves, what is run again comes before the input gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from clustersim.common.units import Bytes
from clustersim.memory.activations import Activations
from clustersim.model.layer_stack import LayerSpec, LayerStack
from clustersim.model.layers import LayerOperators
from clustersim.model.training import SelectiveOpRecompute, SelectiveRecompute
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.plan import Plan, StageLayers
from clustersim.parallel.tensor_parallel import (
    LayerSharding,
    backward_operations,
    forward_operations,
    input_gradient_operations,
    recomputed_forward,
    recomputed_modules,
    recomputed_operations,
    weight_gradient_operations,
)
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a stage. counts: parameters on this rank by their group; head: final norm, logits and loss.

    inputs, weights: the halves of `backward`, where a schedule runs them apart.
    """

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    inputs: tuple[Operation, ...]
    weights: tuple[Operation, ...]
    counts: Mapping[str, int]
    head: bool = False

    @property
    def parameters(self) -> int:
        """Parameters on this rank."""
        return sum(self.counts.values())

    def operations(self, kind: ActionKind) -> tuple[Operation, ...]:
        """Operations of a pass through the unit."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward
            case ActionKind.BACKWARD:
                return self.backward
            case ActionKind.INPUT_GRADIENT:
                return self.inputs
            case ActionKind.WEIGHT_GRADIENT:
                return self.weights


@dataclass(frozen=True)
class Units:
    """Builds the units of a plan's stages; equal units share their operations.

    What is known of stages is kept by their numbers, and of layers by their kind's identity first, because to hash
    stacks and kinds of layers again and again costs more.
    """

    plan: Plan
    _known: dict[int, tuple[Unit, ...]] = field(default_factory=dict)
    _layers: dict[tuple[LayerSpec, bool, bool, int | None], Unit] = field(default_factory=dict)
    _met: dict[tuple[int, bool, bool, int | None], Unit] = field(default_factory=dict)
    _operations: dict[tuple[int, ActionKind], tuple[Operation, ...]] = field(default_factory=dict)
    _shapes: dict[int, int] = field(default_factory=dict)
    _numbers: dict[tuple[LayerStack, bool, bool, tuple[int | None, ...]], int] = field(default_factory=dict)

    def of(self, stage: PipelineStage) -> tuple[Unit, ...]:
        """Units of a stage in model order."""
        if stage.index not in self._known:
            self._known[stage.index] = self._build(stage)
        return self._known[stage.index]

    def shape(self, stage: PipelineStage) -> int:
        """A number that stages have in common whose work is equal."""
        known = self._shapes.get(stage.index)
        if known is None:
            what = stage.stack, stage.has_embedding, stage.has_head, self.plan.load_indices(stage)
            known = self._shapes[stage.index] = self._numbers.setdefault(what, len(self._numbers))
        return known

    def operations(self, stage: PipelineStage, kind: ActionKind) -> tuple[Operation, ...]:
        """Operations of a pass through a whole stage."""
        found = self._operations.get((stage.index, kind))
        if found is None:
            found = self._operations[stage.index, kind] = operations_of(self.of(stage), kind)
        return found

    def _build(self, stage: PipelineStage) -> tuple[Unit, ...]:
        every = [run for run in self.plan.layer_runs(stage) for _ in range(run.layers.count)]
        layers = [self.layer(*item) for item in zip(every, self.plan.load_indices(stage), strict=True)]
        before = [self.embedding(self.plan.embedding)] if stage.has_embedding else []
        further = [self.embedding(mtp_embedding) for mtp_embedding in self.plan.mtp_embeddings(stage)]
        behind = len(layers) - stage.mtp_layer_count
        after = [self.head(self.plan.stage_head(stage))] if stage.has_head else []
        return (*before, *layers[:behind], *further, *layers[behind:], *after)

    def layer(self, run: StageLayers, load: int | None) -> Unit:
        """A layer of a run; load: number of its own."""
        spec, again = run.layers.spec, run.recomputed
        met = id(spec), again, run.offloaded, load
        if met in self._met:
            return self._met[met]
        key = spec, again, run.offloaded, load
        found = self._layers.get(key)
        if found is None:
            layer, sharding = self.plan.layer_by_spec[spec], self.plan.layer_sharding(spec, load_index=load)
            found = _unit("layer", layer, sharding, self._repeated(layer, sharding, again=again))
            found = self._without_gradients(found)
            if run.offloaded:
                found = _copied(found, Activations(self.plan).layer_bytes_of(run))
            self._layers[key] = found
        self._met[met] = found
        return found

    def _repeated(self, layer: LayerOperators, sharding: LayerSharding, *, again: bool) -> list[Operation]:
        """What is run again of a layer; again: the layer is among those that are recomputed in full."""
        early_stop = self.plan.training.early_stop
        match self.plan.training.recompute:
            case SelectiveRecompute(modules):
                return recomputed_modules(layer, sharding, modules, early_stop=early_stop)
            case SelectiveOpRecompute():
                return recomputed_operations(layer, sharding, early_stop=early_stop)
        return recomputed_forward(layer, sharding, early_stop=early_stop) if again else []

    def embedding(self, first: LayerOperators) -> Unit:
        """An embedding of the plan's."""
        sharding = replace(self.plan.layer_sharding(), has_sharded_input=False)
        return self._without_gradients(_unit("embedding", first, sharding, []))

    def head(self, last: LayerOperators) -> Unit:
        """A head of the plan's."""
        sharding = replace(self.plan.layer_sharding(), has_sharded_output=False)
        unit = _unit("head", last, sharding, [])
        reductions = (1 + self.plan.model.mtp_layers) * sharding.vocab_parallel_loss(self.plan.layer_shard.tokens)
        return self._without_gradients(replace(unit, forward=(*unit.forward, *reductions), head=True))

    def _without_gradients(self, unit: Unit) -> Unit:
        """The unit, whose gradients go to the host after its backward if those of the plan do so unreduced."""
        if not self.plan.offloads_unreduced_gradients:
            return unit
        groups = self.plan.trained_groups
        size = float(sum(unit.counts.get(group.name, 0) * group.formats.gradients.bytes for group in groups))
        if not size:
            return unit
        return replace(unit, backward=_leaving(unit.backward, size), weights=_leaving(unit.weights, size))


def operations_of(units: Sequence[Unit], kind: ActionKind) -> tuple[Operation, ...]:
    """Operations of a pass through units, given in model order."""
    return tuple(operation for unit in in_order(units, kind) for operation in unit.operations(kind))


def in_order(units: Sequence[Unit], kind: ActionKind) -> Sequence[Unit]:
    """Units as a pass runs them: forward in model order, backward in reverse."""
    return units if kind is ActionKind.FORWARD else units[::-1]


def _copied(unit: Unit, size: Bytes) -> Unit:
    """The unit with so many bytes of activations on the host from its forward to its backward."""
    *most, last = unit.forward
    return replace(
        unit,
        forward=(*most, replace(last, d2h_bytes=size)),
        backward=_fetching(unit.backward, size),
        inputs=_fetching(unit.inputs, size),
    )


def _leaving(operations: tuple[Operation, ...], size: Bytes) -> tuple[Operation, ...]:
    *most, last = operations
    return *most, replace(last, gradient_d2h_bytes=size)


def _fetching(operations: tuple[Operation, ...], size: Bytes) -> tuple[Operation, ...]:
    *most, last = (replace(operations[0], h2d_bytes=size), *operations[1:])
    return *most, replace(last, is_last_use=True)


def _unit(name: str, part: LayerOperators, sharding: LayerSharding, again: list[Operation]) -> Unit:
    return Unit(
        name=name,
        forward=tuple(forward_operations(part, sharding)),
        backward=(*again, *backward_operations(part, sharding)),
        inputs=(*again, *input_gradient_operations(part, sharding)),
        weights=tuple(weight_gradient_operations(part, sharding)),
        counts=part.parameters_by_group,
    )
