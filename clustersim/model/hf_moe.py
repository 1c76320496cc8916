"""Which MLP does each layer of a MoE model have, according to its Hugging Face `config.json`?

Families use different keys for the same dimensions; a table maps them (transformers,
src/transformers/models/*/configuration_*.py and modeling_*.py). Layers that stay dense: the first ones
(`first_k_dense_replace`), all but every n-th (`decoder_sparse_step`, `interleave_moe_layer_step`,
`moe_layer_freq`), and listed ones (`mlp_only_layers`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.hf_fields import HfConfig
from clustersim.model.layer_stack import DenseMlp, MlpSpec, MlpType, MoeMlp, Router, ScoreFunction

_SCORE_FUNCTIONS: Final = {"softmax": ScoreFunction.SOFTMAX, "sigmoid": ScoreFunction.SIGMOID}


@dataclass(frozen=True, slots=True)
class MoeConfigKeys:
    """Configuration keys of a family's MoE layers, and its properties that files do not state.

    experts, top_k, ffn: keys; dense_ffn: key of the width of dense layers (None: all layers are MoE);
    shared_count: key of the number of shared experts of the same width; shared_ffn: key of the width of the
    single shared expert; always_shared: there is one shared expert as wide as a routed one; shared_gate: the
    shared output is gated; bias: router and experts have biases; moe_layer_step: key of n where every n-th
    layer is MoE; dense_layers: key of a list of dense layers, moe_layers: key of a complete list of MoE
    layers; counts_from_zero: every n-th counts layers from 0 (else from 1); first_dense_count: key of the
    number of first layers that are dense; scores: score function without `scoring_func`; correction_bias: the
    router has a load-balancing correction bias.
    """

    experts: str
    top_k: str
    ffn: str
    dense_ffn: str | None = None
    shared_count: str | None = None
    shared_ffn: str | None = None
    always_shared: bool = False
    shared_gate: bool = False
    bias: bool = False
    moe_layer_step: str | None = None
    dense_layers: str | None = None
    moe_layers: str | None = None
    counts_from_zero: bool = False
    first_dense_count: str | None = None
    scores: ScoreFunction = ScoreFunction.SOFTMAX
    correction_bias: bool = False

    def read_mlps(self, config: HfConfig, layers: int) -> list[MlpSpec]:
        """The MLP of each layer."""
        moe = self._read_moe(config)
        if self.dense_ffn is None:
            return [moe] * layers
        is_moe_layer = self._moe_layer_mask(config, layers)
        if all(is_moe_layer):
            return [moe] * layers
        dense = DenseMlp(config.positive_int(self.dense_ffn), MlpType.SWIGLU)
        return [moe if is_moe else dense for is_moe in is_moe_layer]

    def _read_moe(self, config: HfConfig) -> MoeMlp:
        experts, top_k, ffn = (config.positive_int(key) for key in (self.experts, self.top_k, self.ffn))
        if top_k > experts:
            raise InputError(
                f"{config.path}: {self.top_k} {top_k} is above {self.experts} {experts}; at most {experts} fits"
            )
        return MoeMlp(
            experts,
            top_k,
            ffn,
            MlpType.SWIGLU,
            shared=(shared := self._shared_ffn(config, ffn)),
            shared_gate=self.shared_gate and shared > 0,
            bias=self.bias,
            router=self._read_router(config, experts),
        )

    def _shared_ffn(self, config: HfConfig, ffn: int) -> int:
        if self.shared_ffn is not None:
            return config.nonnegative_int(self.shared_ffn, 0)
        if self.shared_count is not None:
            return ffn * config.nonnegative_int(self.shared_count, 0)
        return ffn if self.always_shared else 0

    def _read_router(self, config: HfConfig, experts: int) -> Router:
        scoring = config.content.get("scoring_func")
        if scoring is not None and scoring not in _SCORE_FUNCTIONS:
            raise InputError(
                f"{config.path}: scoring_func {scoring!r} is not modelled; {' and '.join(_SCORE_FUNCTIONS)} are"
            )
        groups = config.positive_int("n_group", 1)
        config.require_divides("n_group", groups, self.experts, experts)
        max_groups = config.positive_int("topk_group", groups)
        scores = self.scores if scoring is None else _SCORE_FUNCTIONS[scoring]
        return Router(scores, groups, max_groups if max_groups < groups else None, self.correction_bias)

    def _moe_layer_mask(self, config: HfConfig, layers: int) -> list[bool]:
        """Whether each layer is a MoE layer."""
        if self.moe_layers is not None and (indices := config.layer_indices(self.moe_layers, layers)) is not None:
            return [layer in indices for layer in range(layers)]
        first_moe_layer = config.nonnegative_int(self.first_dense_count, 0) if self.first_dense_count else 0
        step = config.positive_int(self.moe_layer_step, 1) if self.moe_layer_step else 1
        index_offset = 0 if self.counts_from_zero else 1
        dense = (config.layer_indices(self.dense_layers, layers) if self.dense_layers else None) or frozenset()
        return [
            layer >= first_moe_layer and (layer + index_offset) % step == 0 and layer not in dense
            for layer in range(layers)
        ]


_QWEN_KEYS: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_DEEPSEEK_KEYS: Final = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
MOE_CONFIG_KEYS: Final[Mapping[str, MoeConfigKeys]] = MappingProxyType(
    {
        "mixtral": MoeConfigKeys("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        "olmoe": MoeConfigKeys("num_experts", "num_experts_per_tok", "intermediate_size"),
        "qwen2_moe": MoeConfigKeys(
            *_QWEN_KEYS,
            dense_ffn="intermediate_size",
            shared_ffn="shared_expert_intermediate_size",
            shared_gate=True,
            moe_layer_step="decoder_sparse_step",
            dense_layers="mlp_only_layers",
        ),
        "qwen3_moe": MoeConfigKeys(
            *_QWEN_KEYS,
            dense_ffn="intermediate_size",
            moe_layer_step="decoder_sparse_step",
            dense_layers="mlp_only_layers",
        ),
        "gpt_oss": MoeConfigKeys("num_local_experts", "num_experts_per_tok", "intermediate_size", bias=True),
        "llama4_text": MoeConfigKeys(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            dense_ffn="intermediate_size_mlp",
            always_shared=True,
            moe_layer_step="interleave_moe_layer_step",
            moe_layers="moe_layers",
            scores=ScoreFunction.SIGMOID,
        ),
        "glm4_moe": MoeConfigKeys(
            *_DEEPSEEK_KEYS,
            dense_ffn="intermediate_size",
            shared_count="n_shared_experts",
            first_dense_count="first_k_dense_replace",
            scores=ScoreFunction.SIGMOID,
            correction_bias=True,
        ),
        "deepseek_v2": MoeConfigKeys(
            *_DEEPSEEK_KEYS,
            dense_ffn="intermediate_size",
            shared_count="n_shared_experts",
            first_dense_count="first_k_dense_replace",
            moe_layer_step="moe_layer_freq",
            counts_from_zero=True,
        ),
        "deepseek_v3": MoeConfigKeys(
            *_DEEPSEEK_KEYS,
            dense_ffn="intermediate_size",
            shared_count="n_shared_experts",
            first_dense_count="first_k_dense_replace",
            moe_layer_step="moe_layer_freq",
            counts_from_zero=True,
            scores=ScoreFunction.SIGMOID,
            correction_bias=True,
        ),
    }
)
"""MoE configuration keys by family."""
