"""Which model is a DBRX configuration? Its dimensions are in two parts, of attention and of the experts.

Norms are LayerNorms without biases, which stand as those with (a thousandth of a thousandth of the parameters).
Reference: transformers, src/transformers/models/dbrx/configuration_dbrx.py; databricks/dbrx-base config.json.
"""

from collections.abc import Mapping

from clustersim.common.errors import InputError
from clustersim.model.hf_fields import Config
from clustersim.model.layer_stack import FullAttention, LayerRun, LayerSpec, Mlp, RoutedMlp
from clustersim.model.transformer import Model, Norm, Positions


def dbrx(config: Config) -> Model:
    """Read the model; raise InputError naming file and key."""
    hidden, heads = config.positive("d_model"), config.positive("n_heads")
    config.dividing("n_heads", heads, "d_model", hidden)
    attention, experts = _part(config, "attn_config"), _part(config, "ffn_config")
    routed = RoutedMlp(
        experts.positive("moe_num_experts", 4),
        experts.positive("moe_top_k", 1),
        experts.positive("ffn_hidden_size"),
        Mlp.SWIGLU,
    )
    spec = LayerSpec(FullAttention(heads, attention.positive("kv_n_heads", 1), hidden // heads), routed)
    return Model(
        name=config.name,
        stack=(LayerRun(spec, config.positive("n_layers")),),
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_seq_len"),
        norm=Norm.LAYERNORM,
        positions=Positions.ROTARY,
        tied_embeddings=config.truth("tie_word_embeddings", default=False),
        linear_bias=False,
    )


def _part(config: Config, key: str) -> Config:
    found = config.content.get(key)
    if not isinstance(found, Mapping):
        raise InputError(f"{config.path}: {key} is {found!r}, not a mapping, which a dbrx model needs")
    return Config(config.path, found, f"dbrx {key}")
