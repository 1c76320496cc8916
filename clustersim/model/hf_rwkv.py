"""Reader of RWKV-7 configurations: time mixing and channel mixing in every layer.

flash-linear-attention, fla/models/rwkv7/configuration_rwkv7.py, and the released config.json files (fla-hub). Channel
mixing is an MLP of two matrices (squared ReLU) whose input is mixed with the token before it. A norm is in front of the
first layer, and that layer's time mixing has no share of the first layer's values, which it makes.
"""

from dataclasses import replace

from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_state_space import ANY_LENGTH
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpType, stack_layers
from clustersim.model.mixers.rwkv7 import Rwkv7
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel


def read_rwkv7(config: HfConfig) -> TransformerModel:
    """Read an RWKV-7 configuration."""
    for key, value in (("attn", None), ("norm_first", True), ("norm_bias", True), ("hidden_act", "sqrelu")):
        config.require_value(key, value, default=value)
    hidden, head_dim = config.positive_int("hidden_size", 2048), config.positive_int("head_dim", 64)
    config.require_divides("head_dim", head_dim, "hidden_size", hidden)
    ranks = {"decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64, "v_low_rank_dim": 16}
    sizes = [config.positive_int(key, default) for key, default in ranks.items()]
    ffn = config.positive_int("intermediate_size", config.positive_int("hidden_ratio", 4) * hidden)
    mlp = DenseMlp(ffn, MlpType.GELU, token_shift=True)
    others = Rwkv7(hidden // head_dim, head_dim, *sizes)
    first = replace(others, value_rank=0)
    count = config.layer_count("num_hidden_layers")
    return TransformerModel(
        name=config.name,
        stack=stack_layers(LayerSpec(mixer, mlp) for mixer in (first, *(count - 1) * [others])),
        hidden=hidden,
        vocab=config.positive_int("vocab_size", 65536),
        max_positions=ANY_LENGTH,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
        embedding_norm=True,
    )
