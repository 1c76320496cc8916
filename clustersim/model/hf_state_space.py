"""Readers of configurations of state spaces alone: Mamba, Falcon Mamba and Mamba 2, layers of a mixer without an MLP.

Defaults are those of transformers, src/transformers/models/{mamba,falcon_mamba,mamba2}/configuration_*.py. Falcon
Mamba's norms of step sizes, B and C learn nothing, and are left out.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from clustersim.model.hf_fields import HfConfig
from clustersim.model.layer_stack import LayerGroup, LayerSpec
from clustersim.model.mixer import Mixer
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel

ANY_LENGTH: Final = 2**20
"""Positions of a model that has none: no sequence is too long for it."""


def read_mamba(config: HfConfig) -> TransformerModel:
    """Read a Mamba or Falcon Mamba configuration."""
    config.require_value("use_bias", False, default=False)
    hidden = config.positive_int("hidden_size")
    rank = config.content.get("time_step_rank", "auto")
    mixer = Mamba1(
        config.positive_int("intermediate_size", config.positive_int("expand", 2) * hidden),
        config.positive_int("state_size", 16),
        -(-hidden // 16) if rank in (None, "auto") else config.positive_int("time_step_rank"),
        config.positive_int("conv_kernel", 4),
        config.boolean("use_conv_bias", default=True),
    )
    return _model(config, mixer, tied=True)


def read_mamba2(config: HfConfig) -> TransformerModel:
    """Read a Mamba 2 configuration."""
    config.require_value("use_bias", False, default=False)
    mixer = Mamba2(
        config.positive_int("num_heads", 128),
        config.positive_int("head_dim", 64),
        config.positive_int("state_size", 128),
        config.positive_int("n_groups", 8),
        config.positive_int("conv_kernel", 4),
        config.boolean("use_conv_bias", default=True),
    )
    return _model(config, mixer, tied=False)


def _model(config: HfConfig, mixer: Mixer, *, tied: bool) -> TransformerModel:
    return TransformerModel(
        name=config.name,
        stack=(LayerGroup(LayerSpec(mixer, None), config.positive_int("num_hidden_layers")),),
        hidden=config.positive_int("hidden_size"),
        vocab=config.positive_int("vocab_size"),
        max_positions=ANY_LENGTH,
        norm=Norm.RMSNORM,
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=tied),
        linear_bias=False,
    )


STATE_SPACE_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {"mamba": read_mamba, "falcon_mamba": read_mamba, "mamba2": read_mamba2}
)
"""Readers by family."""
