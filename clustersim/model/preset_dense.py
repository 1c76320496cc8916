"""Published dense models of a few series, with the sources of their dimensions.

GPT-3 and Megatron models use Megatron's padded vocabulary of 51,200 and train with dropout, as in
Narayanan et al. 2021 (arXiv:2104.04473); their MLP is four times as wide as the model. Table 2.1 of Brown
et al. 2020 prints 24 heads for 1.3B and a width of 5,140 for 13B, which contradict its own head width;
the usual 16 and 5,120 are used here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from clustersim.model.layer_stack import MlpType
from clustersim.model.preset_builder import ModelPreset
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, uniform_model


@dataclass(frozen=True, slots=True)
class _PresetSeries:
    """Models with a common architecture whose dimensions come from one source."""

    source: str
    builder: Callable[..., TransformerModel]
    vocab: int
    positions: int

    def make_preset(
        self, name: str, *, layers: int, hidden: int, heads: int, kv_heads: int | None = None, ffn: int | None = None
    ) -> ModelPreset:
        """A model of the series. kv_heads: if fewer than heads; ffn: if not four times the hidden width."""
        model = self.builder(
            name=name,
            layers=layers,
            hidden=hidden,
            ffn=ffn or 4 * hidden,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=hidden // heads,
            vocab=self.vocab,
            max_positions=self.positions,
        )
        return ModelPreset(model, self.source)


_GPT: Final = partial(
    uniform_model,
    mlp=MlpType.GELU,
    norm=Norm.LAYERNORM,
    positions=PositionEncoding.LEARNED,
    tied_embeddings=True,
    linear_bias=True,
    qkv_bias=True,
    dropout=True,
)
_LLAMA: Final = partial(
    uniform_model,
    mlp=MlpType.SWIGLU,
    norm=Norm.RMSNORM,
    positions=PositionEncoding.ROTARY,
    tied_embeddings=False,
    linear_bias=False,
    qkv_bias=False,
)
# Squared ReLU, treated as GELU; no biases except the norms'.
_NEMOTRON: Final = partial(_LLAMA, mlp=MlpType.GELU, norm=Norm.LAYERNORM)

_SMALL_SOURCE: Final = "small, for laptops; no published model"
_GPT_SMALL: Final = _PresetSeries(_SMALL_SOURCE, _GPT, vocab=50257, positions=1024)
_GPT2: Final = _PresetSeries(
    "Radford et al. 2019; openai-community/gpt2* config.json", _GPT, vocab=50257, positions=1024
)
_GPT3: Final = _PresetSeries("Brown et al. 2020, arXiv:2005.14165, Table 2.1", _GPT, vocab=51200, positions=2048)
_MEGATRON: Final = _PresetSeries("Narayanan et al. 2021, arXiv:2104.04473, Table 1", _GPT, vocab=51200, positions=2048)
_KORTHIKANTI: Final = _PresetSeries(
    "Korthikanti et al. 2022, arXiv:2205.05198, Table 3", _GPT, vocab=51200, positions=2048
)
_LLAMA_SMALL: Final = _PresetSeries(_SMALL_SOURCE, _LLAMA, vocab=32000, positions=2048)
_LLAMA2: Final = _PresetSeries(
    "Touvron et al. 2023, arXiv:2307.09288; meta-llama/Llama-2-*-hf config.json", _LLAMA, vocab=32000, positions=4096
)
_LLAMA3: Final = _PresetSeries(
    "Llama 3 herd, arXiv:2407.21783, Table 3; meta-llama/Meta-Llama-3* config.json",
    _LLAMA,
    vocab=128256,
    positions=131072,
)
_MISTRAL: Final = _PresetSeries(
    "Jiang et al. 2023, arXiv:2310.06825; mistralai/Mistral-7B-v0.3 config.json (full attention)",
    _LLAMA,
    vocab=32768,
    positions=32768,
)
_QWEN: Final = _PresetSeries(
    "Qwen2.5 technical report, arXiv:2412.15115, Table 1; Qwen/Qwen2.5-* config.json",
    partial(_LLAMA, qkv_bias=True),
    vocab=152064,
    positions=131072,
)
_NEMOTRON_15B: Final = _PresetSeries(
    "Parmar et al. 2024, arXiv:2402.16819, Table 1", _NEMOTRON, vocab=256000, positions=4096
)
_NEMOTRON_340B: Final = _PresetSeries(
    "Nemotron-4 340B technical report, arXiv:2406.11704, Table 1", _NEMOTRON, vocab=256000, positions=4096
)

DENSE_PRESETS: Final = (
    _GPT_SMALL.make_preset("gpt-tiny", layers=6, hidden=384, heads=6),
    _GPT2.make_preset("gpt2-small", layers=12, hidden=768, heads=12),
    _GPT2.make_preset("gpt2-medium", layers=24, hidden=1024, heads=16),
    _GPT2.make_preset("gpt2-large", layers=36, hidden=1280, heads=20),
    _GPT2.make_preset("gpt2-xl", layers=48, hidden=1600, heads=25),
    _GPT3.make_preset("gpt3-1.3b", layers=24, hidden=2048, heads=16),
    _GPT3.make_preset("gpt3-2.7b", layers=32, hidden=2560, heads=32),
    _GPT3.make_preset("gpt3-6.7b", layers=32, hidden=4096, heads=32),
    _GPT3.make_preset("gpt3-13b", layers=40, hidden=5120, heads=40),
    _GPT3.make_preset("gpt3-175b", layers=96, hidden=12288, heads=96),
    _MEGATRON.make_preset("megatron-1.7b", layers=24, hidden=2304, heads=24),
    _MEGATRON.make_preset("megatron-3.6b", layers=30, hidden=3072, heads=32),
    _MEGATRON.make_preset("megatron-7.5b", layers=36, hidden=4096, heads=32),
    _MEGATRON.make_preset("megatron-18.4b", layers=40, hidden=6144, heads=48),
    _KORTHIKANTI.make_preset("megatron-22b", layers=48, hidden=6144, heads=64),
    _MEGATRON.make_preset("megatron-39.1b", layers=48, hidden=8192, heads=64),
    _MEGATRON.make_preset("megatron-76.1b", layers=60, hidden=10240, heads=80),
    _MEGATRON.make_preset("megatron-145.6b", layers=80, hidden=12288, heads=96),
    _MEGATRON.make_preset("megatron-310.1b", layers=96, hidden=16384, heads=128),
    _MEGATRON.make_preset("megatron-530b", layers=105, hidden=20480, heads=128),
    _MEGATRON.make_preset("megatron-1t", layers=128, hidden=25600, heads=160),
    _LLAMA_SMALL.make_preset("llama-tiny", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408),
    _LLAMA2.make_preset("llama2-7b", layers=32, hidden=4096, heads=32, ffn=11008),
    _LLAMA2.make_preset("llama2-13b", layers=40, hidden=5120, heads=40, ffn=13824),
    _LLAMA2.make_preset("llama2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    _LLAMA3.make_preset("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    _LLAMA3.make_preset("llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    _LLAMA3.make_preset("llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248),
    _MISTRAL.make_preset("mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    _QWEN.make_preset("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944),
    _QWEN.make_preset("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568),
    _NEMOTRON_15B.make_preset("nemotron4-15b", layers=32, hidden=6144, heads=48, kv_heads=8),
    _NEMOTRON_340B.make_preset("nemotron4-340b", layers=96, hidden=18432, heads=96, kv_heads=8),
)
