"""Readers of configurations in Llama's form whose keys have names of their own: Qwen 1, ChatGLM, EXAONE 3, Orion.

Each reader says the file in the keys of `hf_llama`, or changes what differs: the MLP of Arcee and Apertus has two
matrices (squared ReLU, xIELU with two learned scalars a layer, both treated as GELU). Sources: the configuration_*.py
and modeling_*.py next to the released config.json, and transformers, src/transformers/models. Scales (MiniCPM) are
left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from clustersim.model.attention_spec import QkNorm
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_llama import LlamaFamily
from clustersim.model.hf_moe import MOE_CONFIG_KEYS, MoeConfigKeys
from clustersim.model.layer_stack import BlockForm, MlpType
from clustersim.model.transformer import Norm, TransformerModel, resize_model


def read_qwen(config: HfConfig) -> TransformerModel:
    """Read a Qwen 1 configuration: its intermediate_size is that of gate and up together."""
    config.require_value("no_bias", True, default=True)
    values = {
        "intermediate_size": config.positive_int("intermediate_size") // 2,
        "max_position_embeddings": config.positive_int("seq_length"),
        "head_dim": config.positive_int("kv_channels", 128),
    }
    return LlamaFamily(qkv_bias=True).read_model(config.with_values(**values))


def read_chatglm(config: HfConfig) -> TransformerModel:
    """Read a ChatGLM 2, 3 or GLM-4-9B configuration; half of each head has rotary positions."""
    config.require_value("rmsnorm", True, default=True)
    config.require_value("add_bias_linear", False, default=False)
    config.require_value("apply_residual_connection_post_layernorm", False, default=False)
    heads = config.positive_int("num_attention_heads")
    is_grouped = config.boolean("multi_query_attention", default=False)
    values = {
        "num_hidden_layers": config.positive_int("num_layers"),
        "intermediate_size": config.positive_int("ffn_hidden_size"),
        "num_key_value_heads": config.positive_int("multi_query_group_num", 1) if is_grouped else heads,
        "head_dim": config.positive_int("kv_channels", 128),
        "vocab_size": config.positive_int("padded_vocab_size"),
        "max_position_embeddings": config.positive_int("seq_length"),
    }
    family = LlamaFamily(qkv_bias=config.boolean("add_qkv_bias", default=False), rotary_fraction=0.5)
    return family.read_model(config.with_values(**values))


def read_exaone(config: HfConfig) -> TransformerModel:
    """Read an EXAONE 3 or 3.5 configuration."""
    values = {"num_hidden_layers": config.positive_int("num_layers")}
    return LlamaFamily().read_model(config.with_values(**values))


def read_orion(config: HfConfig) -> TransformerModel:
    """Read an Orion configuration: Llama with LayerNorm."""
    return replace(LlamaFamily().read_model(config), norm=Norm.LAYERNORM)


def read_arcee(config: HfConfig) -> TransformerModel:
    """Read an Arcee configuration: Llama with an MLP of two matrices."""
    return _with_two_matrices(LlamaFamily(allows_linear_bias=True).read_model(config))


def read_apertus(config: HfConfig) -> TransformerModel:
    """Read an Apertus configuration: an MLP of two matrices, norms of queries and keys."""
    return _with_two_matrices(LlamaFamily(qk_norm=QkNorm.PER_HEAD).read_model(config))


def _with_two_matrices(model: TransformerModel) -> TransformerModel:
    return resize_model(model, mlp=MlpType.GELU)


def _granite_shared(config: HfConfig) -> TransformerModel:
    keys = MoeConfigKeys(
        "num_local_experts", "num_experts_per_tok", "intermediate_size", shared_ffn="shared_intermediate_size"
    )
    return LlamaFamily(moe_keys=keys).read_model(config)


def _deepseek(config: HfConfig) -> TransformerModel:
    return LlamaFamily(moe_keys=MOE_CONFIG_KEYS["deepseek_v2"]).read_model(config)


def _flex_olmo(config: HfConfig) -> TransformerModel:
    family = LlamaFamily(qk_norm=QkNorm.ALL_HEADS, block=BlockForm.POST_NORM, moe_keys=MOE_CONFIG_KEYS["olmoe"])
    return family.read_model(config)


def _plain(**properties: Any) -> Callable[[HfConfig], TransformerModel]:
    return LlamaFamily(**properties).read_model


RENAMED_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {
        "qwen": read_qwen,
        "chatglm": read_chatglm,
        "exaone": read_exaone,
        "orion": read_orion,
        "arcee": read_arcee,
        "apertus": read_apertus,
        "minicpm": _plain(tied_embeddings=True),
        **{family: _plain() for family in ("aquila", "xverse", "Yi", "helium")},
    }
)
"""Readers of dense families."""
MOE_RENAMED_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {"deepseek": _deepseek, "granitemoeshared": _granite_shared, "flex_olmo": _flex_olmo}
)
"""Readers of families with experts."""
