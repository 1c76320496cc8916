"""Which layer of a family do the operators lack? Said where a `config.json` of it is refused.

Sources: transformers, src/transformers/models/*/modeling_*.py, or the modeling_*.py next to the released config.json.
"""

from types import MappingProxyType
from typing import Final

_ENCODER: Final = "attention in both directions, of an encoder"
_CROSS: Final = "an encoder, and the decoder's cross-attention to it"
_WKV: Final = "the recurrence of RWKV's time mixing"
_DIFFUSION: Final = "attention in both directions, of a diffusion language model"
_FAMILIES_BY_LAYER: Final = {
    _ENCODER: (
        "bert roberta xlm-roberta camembert albert deberta deberta-v2 distilbert electra modernbert nomic_bert esm "
        "eurobert mpnet ernie longformer big_bird"
    ),
    _CROSS: "t5 mt5 umt5 bart mbart pegasus led longt5 switch_transformers whisper t5gemma m2m_100 nllb-moe fsmt",
    "a reader of image encoders (presets are at hand)": "vit clip siglip siglip_vision_model dinov2 swin convnext",
    _WKV: "rwkv rwkv5 rwkv6",
    _DIFFUSION: "llada dream sdar",
    "a short gated convolution in place of attention": "lfm2 lfm2_moe",
    "per-layer embeddings and several residual streams that take turns": "gemma3n gemma3n_text",
    "a gated linear recurrent unit": "recurrent_gemma",
    "an attention block whose weights several layers share, next to Mamba 1 of several heads": "zamba",
    "cross-attention to the states of an image encoder": "mllama mllama_text_model",
    "layers of which each has heads and an MLP of another size": "openelm",
    "layers without attention, or with a linear one, as a search chose them": "deci nemotron-nas nemotron_nas",
    "a dense MLP next to the experts of each layer": "arctic",
    "attention whose projections are experts": "jetmoe",
    "norms inside attention and MLP, around ternary weights": "bitnet",
    "two attentions and two dense MLPs around the experts of a layer, and experts that compute nothing": (
        "longcat_flash"
    ),
    "layers with windows whose heads are not as many as those of the others": "mimo_v2_flash",
}
MISSING_LAYERS: Final = MappingProxyType(
    {family: layer for layer, families in _FAMILIES_BY_LAYER.items() for family in families.split()}
)
"""What is missing, by family (`model_type`)."""
