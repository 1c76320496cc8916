"""Models of equal layers, as most tests have them: their dimensions, and their one kind of layer on a rank."""

from types import SimpleNamespace

from clustersim.model import layers
from clustersim.model.layer_stack import LayerGroup
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, uniform_dimensions
from clustersim.parallel.layer_partition import PipelineStage


def sizes(model: TransformerModel) -> SimpleNamespace:
    """Dimensions as attributes."""
    return SimpleNamespace(**uniform_dimensions(model))


def layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """A layer of a model whose layers are equal."""
    (spec,) = model.distinct_specs
    return layers.transformer_layer(model, spec, training, shard)


def stage(model: TransformerModel, number: int, count: int, *, embedding: bool, head: bool) -> PipelineStage:
    """A stage of so many layers of a model whose layers are equal."""
    (spec,) = model.distinct_specs
    return PipelineStage(number, (LayerGroup(spec, count),) if count else (), embedding, head)
