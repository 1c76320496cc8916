"""Readers of GPT-style configurations: LayerNorm and a plain MLP (GPT-2, OPT, BLOOM, Falcon, Phi).

Defaults of missing keys are those of the families' configuration classes in transformers. ReLU is treated
as GELU.
"""

from clustersim.model.hf_fields import HfConfig
from clustersim.model.layer_stack import BlockForm, MlpType
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model

_OPT_POSITION_OFFSET = 2  # OPTLearnedPositionalEmbedding: the first two rows of its table are not positions


def read_gpt2(config: HfConfig) -> TransformerModel:
    """Read a GPT-2 configuration."""
    hidden, heads = config.positive_int("n_embd"), config.positive_int("n_head")
    config.require_divides("n_head", heads, "n_embd", hidden)
    dropouts = [config.fraction_below_one(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return uniform_model(
        name=config.name,
        layers=config.positive_int("n_layer"),
        hidden=hidden,
        ffn=config.positive_int("n_inner", 4 * hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("n_positions"),
        mlp=MlpType.GELU,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.LEARNED,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=True,
        qkv_bias=True,
        dropout=max(dropouts) > 0,
    )


def read_opt(config: HfConfig) -> TransformerModel:
    """Read an OPT configuration; the 350M model, with post-norm and a narrower embedding, is refused."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    config.require_value("do_layer_norm_before", True, default=True)
    config.require_value("word_embed_proj_dim", hidden, default=hidden)
    config.require_value("layer_norm_elementwise_affine", True, default=True)
    config.require_value("_remove_final_layer_norm", False, default=False)
    biases = config.boolean("enable_bias", default=True)
    return uniform_model(
        name=config.name,
        layers=config.positive_int("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive_int("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_position_embeddings"),
        spare_positions=_OPT_POSITION_OFFSET,
        mlp=MlpType.GELU,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.LEARNED,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=biases,
        qkv_bias=biases,
        dropout=max(config.fraction_below_one("dropout", 0.1), config.fraction_below_one("attention_dropout", 0.0)) > 0,
    )


def read_bloom(config: HfConfig) -> TransformerModel:
    """Read a BLOOM configuration. Its keys are hidden_size and n_head, or n_embed and num_attention_heads."""
    hidden = config.positive_int("n_embed" if "n_embed" in config.content else "hidden_size")
    heads = config.positive_int("num_attention_heads" if "num_attention_heads" in config.content else "n_head")
    config.require_divides("n_head", heads, "hidden_size", hidden)
    config.require_value("apply_residual_connection_post_layernorm", False, default=False)
    return uniform_model(
        name=config.name,
        layers=config.positive_int("num_hidden_layers" if "num_hidden_layers" in config.content else "n_layer"),
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("seq_length", 2048),
        embedding_norm=True,
        mlp=MlpType.GELU,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.ALIBI,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=True,
        qkv_bias=True,
        dropout=max(
            config.fraction_below_one("hidden_dropout", 0.0), config.fraction_below_one("attention_dropout", 0.0)
        )
        > 0,
    )


def read_phi(config: HfConfig) -> TransformerModel:
    """Read a Phi configuration (1, 1.5 and 2): a parallel block with biases everywhere, including the logits."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    config.require_value("qk_layernorm", False, default=False)
    kv_heads = config.positive_int("num_key_value_heads", heads)
    config.require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return uniform_model(
        name=config.name,
        layers=config.positive_int("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive_int("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        rotary_percent=config.rotary_fraction(0.5),
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_position_embeddings", 2048),
        mlp=MlpType.GELU,
        block=BlockForm.PARALLEL,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        linear_bias=True,
        qkv_bias=True,
        head_bias=True,
        dropout=max(config.fraction_below_one("resid_pdrop", 0.0), config.fraction_below_one("attention_dropout", 0.0))
        > 0,
    )


def read_falcon(config: HfConfig) -> TransformerModel:
    """Read a Falcon configuration: multi-query, one norm (7B), or grouped-query, two norms (40B, 180B)."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    biases = config.boolean("bias", default=False)
    return uniform_model(
        name=config.name,
        layers=config.positive_int("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive_int("ffn_hidden_size", 4 * hidden),
        heads=heads,
        kv_heads=_falcon_kv_heads(config, heads),
        head_dim=hidden // heads,
        vocab=config.positive_int("vocab_size"),
        max_positions=config.positive_int("max_position_embeddings", 2048),
        mlp=MlpType.GELU,
        block=_falcon_block(config),
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.ALIBI if config.boolean("alibi", default=False) else PositionEncoding.ROTARY,
        tied_embeddings=config.boolean("tie_word_embeddings", default=True),
        linear_bias=biases,
        qkv_bias=biases,
        dropout=max(
            config.fraction_below_one("hidden_dropout", 0.0), config.fraction_below_one("attention_dropout", 0.0)
        )
        > 0,
    )


def _falcon_kv_heads(config: HfConfig, heads: int) -> int:
    new_decoder = config.boolean("new_decoder_architecture", default=False)
    if not new_decoder and config.boolean("multi_query", default=True):
        return 1
    kv_heads = config.positive_int("num_kv_heads", heads)
    config.require_divides("num_kv_heads", kv_heads, "num_attention_heads", heads)
    return kv_heads


def _falcon_block(config: HfConfig) -> BlockForm:
    if config.boolean("new_decoder_architecture", default=False):
        return (
            BlockForm.PARALLEL_NORMS if config.positive_int("num_ln_in_parallel_attn", 2) == 2 else BlockForm.PARALLEL
        )
    return BlockForm.PARALLEL if config.boolean("parallel_attn", default=True) else BlockForm.PRE_NORM
