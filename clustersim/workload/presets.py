"""Which published models can be named, and where do their dimensions come from?

GPT-3 and Megatron models use Megatron's padded vocabulary of 51,200 and train with dropout, as in Narayanan et al. 2021
(arXiv:2104.04473); their MLP is four times as wide as the model. Table 2.1 of Brown et al. 2020 prints 24 heads for
1.3B and a width of 5,140 for 13B, which contradict its own head width; the usual 16 and 5,120 stand here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.errors import InputError, nearest
from clustersim.workload.stack import Mlp
from clustersim.workload.transformer import Model, Norm, Positions, uniform

_GPT2 = "Radford et al. 2019; openai-community/gpt2* config.json"
_GPT3 = "Brown et al. 2020, arXiv:2005.14165, Table 2.1"
_MEGATRON = "Narayanan et al. 2021, arXiv:2104.04473, Table 1"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, Table 3"
_LLAMA2 = "Touvron et al. 2023, arXiv:2307.09288; meta-llama/Llama-2-*-hf config.json"
_LLAMA3 = "Llama 3 herd, arXiv:2407.21783, Table 3; meta-llama/Meta-Llama-3* config.json"
_NEMOTRON_15B = "Parmar et al. 2024, arXiv:2402.16819, Table 1"
_NEMOTRON_340B = "Nemotron-4 340B technical report, arXiv:2406.11704, Table 1"
_MISTRAL = "Jiang et al. 2023, arXiv:2310.06825; mistralai/Mistral-7B-v0.3 config.json (full attention)"
_QWEN = "Qwen2.5 technical report, arXiv:2412.15115, Table 1; Qwen/Qwen2.5-* config.json"
_HERE = "small, for laptops; no published model"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the source of its dimensions."""

    model: Model
    source: str


def preset(name: str) -> Model:
    """The model of that name; raise InputError with the nearest name if there is none.

    >>> preset("llama3-8b").hidden
    4096
    """
    if name not in PRESETS:
        raise InputError(f"there is no model {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name].model


def _gpt(name: str, source: str, size: tuple[int, int, int], *, vocab: int = 51200, positions: int = 2048) -> Preset:
    """size: layers, hidden, heads."""
    layers, hidden, heads = size
    model = uniform(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=positions,
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.LEARNED,
        tied_embeddings=True,
        linear_bias=True,
        qkv_bias=True,
        dropout=True,
    )
    return Preset(model, source)


def _llama(
    name: str,
    source: str,
    size: tuple[int, int, int, int, int],
    *,
    vocab: int,
    positions: int,
    qkv_bias: bool = False,
) -> Preset:
    """size: layers, hidden, ffn, heads, key/value heads."""
    layers, hidden, ffn, heads, kv_heads = size
    model = uniform(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=positions,
        mlp=Mlp.SWIGLU,
        norm=Norm.RMSNORM,
        positions=Positions.ROTARY,
        tied_embeddings=False,
        linear_bias=False,
        qkv_bias=qkv_bias,
    )
    return Preset(model, source)


def _nemotron(name: str, source: str, size: tuple[int, int, int, int]) -> Preset:
    """size: layers, hidden, heads, key/value heads. Squared ReLU, no biases but the norms', vocabulary 256,000."""
    layers, hidden, heads, kv_heads = size
    model = uniform(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=256000,
        max_positions=4096,
        mlp=Mlp.GELU,
        norm=Norm.LAYERNORM,
        positions=Positions.ROTARY,
        tied_embeddings=False,
        linear_bias=False,
        qkv_bias=False,
    )
    return Preset(model, source)


_SHIPPED: Final = (
    _gpt("gpt-tiny", _HERE, (6, 384, 6), vocab=50257, positions=1024),
    _gpt("gpt2-small", _GPT2, (12, 768, 12), vocab=50257, positions=1024),
    _gpt("gpt2-medium", _GPT2, (24, 1024, 16), vocab=50257, positions=1024),
    _gpt("gpt2-large", _GPT2, (36, 1280, 20), vocab=50257, positions=1024),
    _gpt("gpt2-xl", _GPT2, (48, 1600, 25), vocab=50257, positions=1024),
    _gpt("gpt3-1.3b", _GPT3, (24, 2048, 16)),
    _gpt("gpt3-2.7b", _GPT3, (32, 2560, 32)),
    _gpt("gpt3-6.7b", _GPT3, (32, 4096, 32)),
    _gpt("gpt3-13b", _GPT3, (40, 5120, 40)),
    _gpt("gpt3-175b", _GPT3, (96, 12288, 96)),
    _gpt("megatron-1.7b", _MEGATRON, (24, 2304, 24)),
    _gpt("megatron-3.6b", _MEGATRON, (30, 3072, 32)),
    _gpt("megatron-7.5b", _MEGATRON, (36, 4096, 32)),
    _gpt("megatron-18.4b", _MEGATRON, (40, 6144, 48)),
    _gpt("megatron-22b", _KORTHIKANTI, (48, 6144, 64)),
    _gpt("megatron-39.1b", _MEGATRON, (48, 8192, 64)),
    _gpt("megatron-76.1b", _MEGATRON, (60, 10240, 80)),
    _gpt("megatron-145.6b", _MEGATRON, (80, 12288, 96)),
    _gpt("megatron-310.1b", _MEGATRON, (96, 16384, 128)),
    _gpt("megatron-530b", _MEGATRON, (105, 20480, 128)),
    _gpt("megatron-1t", _MEGATRON, (128, 25600, 160)),
    _llama("llama-tiny", _HERE, (8, 512, 1408, 8, 4), vocab=32000, positions=2048),
    _llama("llama2-7b", _LLAMA2, (32, 4096, 11008, 32, 32), vocab=32000, positions=4096),
    _llama("llama2-13b", _LLAMA2, (40, 5120, 13824, 40, 40), vocab=32000, positions=4096),
    _llama("llama2-70b", _LLAMA2, (80, 8192, 28672, 64, 8), vocab=32000, positions=4096),
    _llama("llama3-8b", _LLAMA3, (32, 4096, 14336, 32, 8), vocab=128256, positions=131072),
    _llama("llama3-70b", _LLAMA3, (80, 8192, 28672, 64, 8), vocab=128256, positions=131072),
    _llama("llama3-405b", _LLAMA3, (126, 16384, 53248, 128, 8), vocab=128256, positions=131072),
    _llama("mistral-7b", _MISTRAL, (32, 4096, 14336, 32, 8), vocab=32768, positions=32768),
    _llama("qwen2.5-7b", _QWEN, (28, 3584, 18944, 28, 4), vocab=152064, positions=131072, qkv_bias=True),
    _llama("qwen2.5-72b", _QWEN, (80, 8192, 29568, 64, 8), vocab=152064, positions=131072, qkv_bias=True),
    _nemotron("nemotron4-15b", _NEMOTRON_15B, (32, 6144, 48, 8)),
    _nemotron("nemotron4-340b", _NEMOTRON_340B, (96, 18432, 96, 8)),
)

PRESETS: Final[Mapping[str, Preset]] = MappingProxyType({shipped.model.name: shipped for shipped in _SHIPPED})
