"""Published encoders of images (vision transformers), with the sources of their dimensions."""

from functools import partial
from typing import Final

from clustersim.model.layer_stack import MlpType
from clustersim.model.model_ends import AttentionPool, Classifier, ModelHead, NoHead, PatchEmbedding
from clustersim.model.preset_builder import ModelPreset
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model

_VIT: Final = partial(
    uniform_model,
    mlp=MlpType.GELU,
    norm=Norm.LAYERNORM,
    positions=PositionEncoding.LEARNED,
    tied_embeddings=False,
    linear_bias=True,
    qkv_bias=True,
    causal=False,
    vocab=0,
)
_IMAGENET: Final = Classifier(1000)
_RGB: Final = 3


def _image_patches(image: int, patch: int, *, bias: bool = True, class_tokens: int = 1) -> PatchEmbedding:
    """Square patches of square images."""
    return PatchEmbedding((image, image), (patch, patch), _RGB, bias, class_tokens)


def vision_transformer(
    name: str,
    sizes: tuple[int, int, int, int],
    patches: PatchEmbedding,
    *,
    head: ModelHead = _IMAGENET,
    norm_first: bool = False,
) -> TransformerModel:
    """A vision transformer. sizes: layers, hidden, ffn, heads; norm_first: the tokens are normalized first (CLIP)."""
    layers, hidden, ffn, heads = sizes
    return _VIT(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=patches.tokens,
        patches=patches,
        head=head,
        embedding_norm=norm_first,
    )


_DOSOVITSKIY: Final = "Dosovitskiy et al. 2020, arXiv:2010.11929, Table 1"

CLIP_L_336: Final = vision_transformer(
    "clip-vit-l-14-336", (24, 1024, 4096, 16), _image_patches(336, 14, bias=False), head=NoHead(), norm_first=True
)
SIGLIP_SO400M: Final = vision_transformer(
    "siglip-so400m-14-384",
    (27, 1152, 4304, 16),
    _image_patches(384, 14, class_tokens=0),
    head=AttentionPool(heads=16, ffn=4304),
)

VISION_PRESETS: Final = (
    ModelPreset(
        vision_transformer("vit-l-16", (24, 1024, 4096, 16), _image_patches(224, 16)),
        f"{_DOSOVITSKIY}; torchvision vit_l_16",
    ),
    ModelPreset(
        vision_transformer("vit-h-14", (32, 1280, 5120, 16), _image_patches(224, 14)),
        f"{_DOSOVITSKIY}; torchvision vit_h_14",
    ),
    ModelPreset(
        vision_transformer("vit-g-14", (40, 1408, 6144, 16), _image_patches(224, 14)),
        "Zhai et al. 2021, arXiv:2106.04560, Table 2; timm vit_giant_patch14_224",
    ),
    ModelPreset(CLIP_L_336, "Radford et al. 2021, arXiv:2103.00020; openai/clip-vit-large-patch14-336 vision_config"),
    ModelPreset(
        SIGLIP_SO400M,
        "Zhai et al. 2023, arXiv:2303.15343; google/siglip-so400m-patch14-384 vision_config",
    ),
)
