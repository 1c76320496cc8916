"""Which model is a configuration of the GPT kind: layer norms and a plain MLP (GPT-2, OPT, BLOOM, Falcon, Phi)?

Defaults of missing keys are those of the families' configuration classes in transformers. ReLU counts as GELU.
"""

from clustersim.model.hf_fields import Config
from clustersim.model.layer_stack import BlockForm, Mlp
from clustersim.model.transformer import Model, Norm, Positions, uniform

_OPT_OFFSET = 2  # OPTLearnedPositionalEmbedding: the first two rows of its table stand for no position


def gpt2(config: Config) -> Model:
    """Read a GPT-2."""
    hidden, heads = config.positive("n_embd"), config.positive("n_head")
    config.dividing("n_head", heads, "n_embd", hidden)
    dropouts = [config.rate(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return uniform(
        name=config.name,
        layers=config.positive("n_layer"),
        hidden=hidden,
        ffn=config.positive("n_inner", 4 * hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("n_positions"),
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.LEARNED,
        tied_embeddings=config.truth("tie_word_embeddings", default=True),
        linear_bias=True,
        qkv_bias=True,
        dropout=max(dropouts) > 0,
    )


def opt(config: Config) -> Model:
    """Read an OPT; the 350M model, with norms after the sums and a narrower embedding, is refused."""
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    config.dividing("num_attention_heads", heads, "hidden_size", hidden)
    config.refuse("do_layer_norm_before", True, default=True)
    config.refuse("word_embed_proj_dim", hidden, default=hidden)
    config.refuse("layer_norm_elementwise_affine", True, default=True)
    config.refuse("_remove_final_layer_norm", False, default=False)
    biases = config.truth("enable_bias", default=True)
    return uniform(
        name=config.name,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_position_embeddings"),
        spare_positions=_OPT_OFFSET,
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.LEARNED,
        tied_embeddings=config.truth("tie_word_embeddings", default=True),
        linear_bias=biases,
        qkv_bias=biases,
        dropout=max(config.rate("dropout", 0.1), config.rate("attention_dropout", 0.0)) > 0,
    )


def bloom(config: Config) -> Model:
    """Read a BLOOM. Its files say hidden_size and n_head, or n_embed and num_attention_heads."""
    hidden = config.positive("n_embed" if "n_embed" in config.content else "hidden_size")
    heads = config.positive("num_attention_heads" if "num_attention_heads" in config.content else "n_head")
    config.dividing("n_head", heads, "hidden_size", hidden)
    config.refuse("apply_residual_connection_post_layernorm", False, default=False)
    return uniform(
        name=config.name,
        layers=config.positive("num_hidden_layers" if "num_hidden_layers" in config.content else "n_layer"),
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("seq_length", 2048),
        embedding_norm=True,
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.ALIBI,
        tied_embeddings=config.truth("tie_word_embeddings", default=True),
        linear_bias=True,
        qkv_bias=True,
        dropout=max(config.rate("hidden_dropout", 0.0), config.rate("attention_dropout", 0.0)) > 0,
    )


def phi(config: Config) -> Model:
    """Read a Phi (1, 1.5 and 2): a parallel block with biases everywhere, also of the logits."""
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    config.dividing("num_attention_heads", heads, "hidden_size", hidden)
    config.refuse("qk_layernorm", False, default=False)
    kv_heads = config.positive("num_key_value_heads", heads)
    config.dividing("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return uniform(
        name=config.name,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        rotary=config.turned(0.5),
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_position_embeddings", 2048),
        mlp=Mlp.GELU,
        block=BlockForm.PARALLEL,
        norm=Norm.LAYERNORM,
        positions=Positions.ROTARY,
        tied_embeddings=config.truth("tie_word_embeddings", default=False),
        linear_bias=True,
        qkv_bias=True,
        head_bias=True,
        dropout=max(config.rate("resid_pdrop", 0.0), config.rate("attention_dropout", 0.0)) > 0,
    )


def falcon(config: Config) -> Model:
    """Read a Falcon: multi-query with one norm (7B), or the new decoder, grouped and with two (40B, 180B)."""
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    config.dividing("num_attention_heads", heads, "hidden_size", hidden)
    biases = config.truth("bias", default=False)
    return uniform(
        name=config.name,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        ffn=config.positive("ffn_hidden_size", 4 * hidden),
        heads=heads,
        kv_heads=_falcon_kv_heads(config, heads),
        head_dim=hidden // heads,
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_position_embeddings", 2048),
        mlp=Mlp.GELU,
        block=_falcon_block(config),
        norm=Norm.LAYERNORM,
        positions=Positions.ALIBI if config.truth("alibi", default=False) else Positions.ROTARY,
        tied_embeddings=config.truth("tie_word_embeddings", default=True),
        linear_bias=biases,
        qkv_bias=biases,
        dropout=max(config.rate("hidden_dropout", 0.0), config.rate("attention_dropout", 0.0)) > 0,
    )


def _falcon_kv_heads(config: Config, heads: int) -> int:
    new = config.truth("new_decoder_architecture", default=False)
    if not new and config.truth("multi_query", default=True):
        return 1
    kv_heads = config.positive("num_kv_heads", heads)
    config.dividing("num_kv_heads", kv_heads, "num_attention_heads", heads)
    return kv_heads


def _falcon_block(config: Config) -> BlockForm:
    if config.truth("new_decoder_architecture", default=False):
        return BlockForm.PARALLEL_NORMS if config.positive("num_ln_in_parallel_attn", 2) == 2 else BlockForm.PARALLEL
    return BlockForm.PARALLEL if config.truth("parallel_attn", default=True) else BlockForm.PRE_NORM
