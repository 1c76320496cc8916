"""Reader of DBRX configurations, whose dimensions are in two sections, for attention and for the experts.

Norms are LayerNorms without biases, treated as LayerNorms with biases (a millionth of the parameters).
Reference: transformers, src/transformers/models/dbrx/configuration_dbrx.py; databricks/dbrx-base
config.json.
"""

from collections.abc import Mapping

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention
from clustersim.model.hf_fields import HfConfig
from clustersim.model.layer_stack import LayerGroup, LayerSpec, MlpType, MoeMlp
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel


def read_dbrx(config: HfConfig) -> TransformerModel:
    """Read the model; raise InputError naming file and key."""
    hidden, heads = config.positive_int("d_model"), config.positive_int("n_heads")
    config.require_divides("n_heads", heads, "d_model", hidden)
    attention, experts = _section(config, "attn_config"), _section(config, "ffn_config")
    moe = MoeMlp(
        experts.positive_int("moe_num_experts", 4),
        experts.positive_int("moe_top_k", 1),
        experts.positive_int("ffn_hidden_size"),
        MlpType.SWIGLU,
    )
    spec = LayerSpec(FullAttention(heads, attention.positive_int("kv_n_heads", 1), hidden // heads), moe)
    return TransformerModel(
        name=config.name,
        stack=(LayerGroup(spec, config.positive_int("n_layers")),),
        hidden=hidden,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_seq_len"),
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=False,
    )


def _section(config: HfConfig, key: str) -> HfConfig:
    section = config.content.get(key)
    if not isinstance(section, Mapping):
        raise InputError(f"{config.path}: {key} is {section!r}, not a mapping, which a dbrx model needs")
    return HfConfig(config.path, section, f"dbrx {key}")
