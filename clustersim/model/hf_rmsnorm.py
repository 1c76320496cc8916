"""Models of RMSNorm and rotary positions, whose sizes have the usual keys of Hugging Face configurations."""

from collections.abc import Iterable
from typing import Any

from clustersim.model.hf_fields import HfConfig
from clustersim.model.layer_stack import LayerSpec, stack_layers
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel


def rmsnorm_model(
    config: HfConfig, specs: Iterable[LayerSpec], *, tied: bool = False, **options: Any
) -> TransformerModel:
    """The model of some layers. tied: whether embeddings are where the file does not say; options: other fields."""
    return TransformerModel(
        name=config.name,
        stack=stack_layers(specs),
        hidden=config.positive_int("hidden_size"),
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_position_embeddings"),
        norm=Norm.RMSNORM,
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=tied),
        linear_bias=False,
        **options,
    )
