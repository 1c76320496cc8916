"""Models of equal layers, as used by most tests: their dimensions, layers and stages."""

from types import SimpleNamespace

from clustersim.model import layers
from clustersim.model.layer_stack import LayerGroup
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, uniform_dimensions
from clustersim.parallel.layer_partition import PipelineStage


def model_dimensions(model: TransformerModel) -> SimpleNamespace:
    """Dimensions of a model as attributes."""
    return SimpleNamespace(**uniform_dimensions(model))


def uniform_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """A layer of a model with equal layers."""
    (spec,) = model.distinct_specs
    return layers.transformer_layer(model, spec, training, shard)


def uniform_stage(
    model: TransformerModel, stage_index: int, layer_count: int, *, embedding: bool, head: bool
) -> PipelineStage:
    """A stage with this many layers of a model with equal layers."""
    (spec,) = model.distinct_specs
    return PipelineStage(stage_index, (LayerGroup(spec, layer_count),) if layer_count else (), embedding, head)
