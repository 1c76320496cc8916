"""What does a stage consist of, as operations?

A unit is what ZeRO-3 gathers at once and what a layer-wise timeline shows: the embedding, one layer, or the head (final
norm, logits, loss). Full recomputation runs a layer's forward again before its backward, selective recomputation only
its attention core; the embedding and the head are never run again.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor import Sharding, backward, core_again, forward
from clustersim.program.task import Operation, Work
from clustersim.workload.layers import Layer, embedding, head, layer
from clustersim.workload.training import FullRecompute, SelectiveRecompute


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a stage. parameters: on this rank; head: final norm, logits and loss."""

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    parameters: int
    head: bool = False


@dataclass(frozen=True)
class Units:
    """Builds the units of a plan's stages; equal units share their operations."""

    plan: Plan
    _known: dict[Stage, tuple[Unit, ...]] = field(default_factory=dict)

    def of(self, stage: Stage) -> tuple[Unit, ...]:
        """Units of a stage in model order."""
        if stage not in self._known:
            self._known[stage] = self._build(stage)
        return self._known[stage]

    def _build(self, stage: Stage) -> tuple[Unit, ...]:
        again = self._recomputed(stage)
        layers = [self.recomputed] * again + [self.kept] * (stage.layers - again)
        before = [self.embedding] if stage.embedding else []
        after = [self._head(stage)] if stage.head else []
        return (*before, *layers, *after)

    def parameters(self, stage: Stage) -> int:
        """Parameters of a stage on one rank."""
        return sum(unit.parameters for unit in self.of(stage))

    @cached_property
    def kept(self) -> Unit:
        """A layer that keeps what backward needs (but for what selective recomputation runs again)."""
        again: list[Operation] = []
        if isinstance(self.plan.training.recompute, SelectiveRecompute):
            again = core_again(self._layer, self._sharding)
        return _unit("layer", self._layer, self._sharding, again)

    @cached_property
    def recomputed(self) -> Unit:
        """A layer whose forward is run again before its backward."""
        return _unit("layer", self._layer, self._sharding, forward(self._layer, self._sharding, Work.RECOMPUTE))

    @cached_property
    def embedding(self) -> Unit:
        """The token embedding."""
        lookup = embedding(self.plan.model, self.plan.training, self.plan.shard)
        return _unit("embedding", lookup, replace(self._sharding, enters=False), [])

    @cached_property
    def logits(self) -> Unit:
        """Final norm, logits and loss, with logits weights of their own."""
        return self._ending(self._last)

    @cached_property
    def tied_logits(self) -> Unit:
        """Final norm, logits and loss on the stage that holds the embedding, whose matrix the logits use."""
        operators = self._last.operators
        shared = [replace(each, parameters=0) if each.weight_gradient else each for each in operators]
        return self._ending(replace(self._last, operators=tuple(shared)))

    def _ending(self, last: Layer) -> Unit:
        unit = _unit("head", last, replace(self._sharding, leaves=False), [])
        reductions = self._sharding.over_vocabulary(self.plan.shard.tokens)
        return replace(unit, forward=(*unit.forward, *reductions), head=True)

    def _head(self, stage: Stage) -> Unit:
        """The head; a tied embedding on the same stage counts (and reduces) the shared matrix."""
        shared = self.plan.model.tied_embeddings and stage.embedding
        return self.tied_logits if shared else self.logits

    def _recomputed(self, stage: Stage) -> int:
        match self.plan.training.recompute:
            case FullRecompute(None):
                return stage.layers
            case FullRecompute(int() as layers):
                return min(layers, stage.layers)
        return 0

    @cached_property
    def _layer(self) -> Layer:
        return layer(self.plan.model, self.plan.training, self.plan.shard)

    @cached_property
    def _last(self) -> Layer:
        return head(self.plan.model, self.plan.training, self.plan.shard)

    @property
    def _sharding(self) -> Sharding:
        return self.plan.sharding


def _unit(name: str, part: Layer, sharding: Sharding, again: list[Operation]) -> Unit:
    return Unit(
        name=name,
        forward=tuple(forward(part, sharding)),
        backward=(*again, *backward(part, sharding)),
        parameters=sum(operator.parameters for operator in part.operators),
    )
