"""Models of equal layers, as most tests have them: their dimensions, and their one kind of layer on a rank."""

from types import SimpleNamespace

from clustersim.model import layers
from clustersim.model.layer_stack import LayerRun
from clustersim.model.operators import Layer, Shard
from clustersim.model.training import Training
from clustersim.model.transformer import Model, dimensions
from clustersim.parallel.layer_partition import PipelineStage


def sizes(model: Model) -> SimpleNamespace:
    """Dimensions as attributes."""
    return SimpleNamespace(**dimensions(model))


def layer(model: Model, training: Training, shard: Shard) -> Layer:
    """A layer of a model whose layers are equal."""
    (spec,) = model.specs
    return layers.layer(model, spec, training, shard)


def stage(model: Model, number: int, count: int, *, embedding: bool, head: bool) -> PipelineStage:
    """A stage of so many layers of a model whose layers are equal."""
    (spec,) = model.specs
    return PipelineStage(number, (LayerRun(spec, count),) if count else (), embedding, head)
