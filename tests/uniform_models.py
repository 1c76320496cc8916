"""Models of equal layers, as most tests have them: their dimensions, and their one kind of layer on a rank."""

from types import SimpleNamespace

from clustersim.model import layers
from clustersim.model.layer_stack import LayerGroup
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, uniform_dimensions
from clustersim.parallel.layer_partition import PipelineStage


def model_dimensions(model: TransformerModel) -> SimpleNamespace:
    """Dimensions as attributes."""
    return SimpleNamespace(**uniform_dimensions(model))


def uniform_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """A layer of a model whose layers are equal."""
    (spec,) = model.distinct_specs
    return layers.transformer_layer(model, spec, training, shard)


def uniform_stage(
    model: TransformerModel, stage_index: int, layer_count: int, *, embedding: bool, head: bool
) -> PipelineStage:
    """A stage of so many layers of a model whose layers are equal."""
    (spec,) = model.distinct_specs
    return PipelineStage(stage_index, (LayerGroup(spec, layer_count),) if layer_count else (), embedding, head)
