"""Published diffusion transformers, with the sources of their dimensions."""

from dataclasses import replace
from functools import partial
from typing import Final

from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.conditioning import Conditioning, Modulation, TextInput
from clustersim.model.cross_attention_spec import CrossAttention
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerGroup, LayerSpec, LayerStack, MlpType
from clustersim.model.model_ends import PatchEmbedding, PatchHead
from clustersim.model.preset_builder import ModelPreset
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel

_DIFFUSION: Final = partial(
    TransformerModel,
    vocab=0,
    norm=Norm.LAYERNORM,
    layernorm_vectors=0,
    tied_embeddings=False,
    linear_bias=True,
)
_OWN_MATRIX: Final = Modulation(6)
_TIME: Final = 256
"""sines and cosines of a time step"""


def _attention(heads: int, head_dim: int, qk_norm: QkNorm | None = None) -> FullAttention:
    return FullAttention(heads, heads, head_dim, qkv_bias=True, qk_norm=qk_norm, causal=False)


def _model(
    name: str, hidden: int, stack: LayerStack, patches: PatchEmbedding, *, positions: PositionEncoding
) -> TransformerModel:
    return _DIFFUSION(
        name=name, stack=stack, hidden=hidden, max_positions=patches.tokens, positions=positions, patches=patches
    )


_DIT_LAYER: Final = LayerSpec(_attention(16, 72), DenseMlp(4608, MlpType.GELU), modulation=_OWN_MATRIX)
_DIT: Final = replace(
    _model(
        "dit-xl-2",
        1152,
        (LayerGroup(_DIT_LAYER, 28),),
        PatchEmbedding((32, 32), (2, 2), 4),
        positions=PositionEncoding.SINUSOIDAL,
    ),
    head=PatchHead(2 * 2 * 8, Modulation(2)),
    conditioning=Conditioning((_TIME,), classes=1001),
)

_WAN_LAYER: Final = LayerSpec(
    _attention(40, 128, QkNorm.ALL_HEADS),
    DenseMlp(13824, MlpType.GELU),
    cross=CrossAttention(40, 128, keys=512, key_hidden=5120, qkv_bias=True, qk_norm=True),
    modulation=Modulation(6, shares_matrix=True),
)
_WAN: Final = replace(
    _model(
        "wan2.1-14b",
        5120,
        (LayerGroup(_WAN_LAYER, 40),),
        PatchEmbedding((21, 60, 104), (1, 2, 2), 16),
        positions=PositionEncoding.ROTARY,
    ),
    head=PatchHead(2 * 2 * 16, Modulation(2, shares_matrix=True)),
    conditioning=Conditioning((_TIME,), shared_vectors=6, text=TextInput(512, 4096, matrices=2)),
)

_FLUX_TEXT: Final = 512
_FLUX_MLP: Final = DenseMlp(12288, MlpType.GELU)
_FLUX_ATTENTION: Final = _attention(24, 128, QkNorm.PER_HEAD)
_FLUX_DOUBLE: Final = LayerSpec(_FLUX_ATTENTION, _FLUX_MLP, modulation=_OWN_MATRIX, stream_tokens=_FLUX_TEXT)
_FLUX_SINGLE: Final = LayerSpec(_FLUX_ATTENTION, _FLUX_MLP, BlockForm.PARALLEL_FUSED, modulation=Modulation(3))
_FLUX: Final = replace(
    _model(
        "flux.1-dev",
        3072,
        (LayerGroup(_FLUX_DOUBLE, 19), LayerGroup(_FLUX_SINGLE, 38)),
        PatchEmbedding((128, 128), (2, 2), 16),
        positions=PositionEncoding.ROTARY,
    ),
    head=PatchHead(2 * 2 * 16, Modulation(2), drops=_FLUX_TEXT),
    conditioning=Conditioning((_TIME, _TIME, 768), text=TextInput(_FLUX_TEXT, 4096, matrices=1, joins=True)),
)

DIFFUSION_PRESETS: Final = (
    ModelPreset(_DIT, "Peebles and Xie 2022, arXiv:2212.09748, Table 1; facebookresearch/DiT models.py (256 x 256)"),
    ModelPreset(
        _WAN, "Wan 2.1, arXiv:2503.20314, section 4.2; Wan-AI/Wan2.1-T2V-14B config.json (81 frames, 480 x 832)"
    ),
    ModelPreset(_FLUX, "black-forest-labs/FLUX.1-dev transformer config.json (1,024 x 1,024)"),
)
