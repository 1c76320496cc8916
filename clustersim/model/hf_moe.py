"""Which MLP does each layer of a mixture of experts have, by its Hugging Face `config.json`?

Families call the same things differently; a table says what (transformers, src/transformers/models/*/configuration_*.py
and modeling_*.py). Layers that stay dense: the first (`first_k_dense_replace`), all but every so-manieth
(`decoder_sparse_step`, `interleave_moe_layer_step`, `moe_layer_freq`), and those that are listed (`mlp_only_layers`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.hf_fields import Config
from clustersim.model.layer_stack import AnyMlp, DenseMlp, Mlp, RoutedMlp, Router, Scores

_SCORES: Final = {"softmax": Scores.SOFTMAX, "sigmoid": Scores.SIGMOID}


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a family calls the parts of its mixture, and what it has that files do not say.

    experts, top_k, ffn: keys; dense: the key of the width of layers without experts (None: all have some); shared: the
    key of how many experts of the same width every token passes, shared_ffn: of the width of one for every token;
    shared_always: there is one as wide as an expert; shared_gate: it is weighted; bias: router and experts have biases;
    step: the key of every so-manieth layer; listed: of a list of dense layers, chosen: of a list of those with experts,
    which says all; from_zero: every so-manieth counts layers
    from 0 (else from 1); first: the key of how many first layers are dense; scores: without `scoring_func`;
    corrected: scores are corrected to balance the load.
    """

    experts: str
    top_k: str
    ffn: str
    dense: str | None = None
    shared: str | None = None
    shared_ffn: str | None = None
    shared_always: bool = False
    shared_gate: bool = False
    bias: bool = False
    step: str | None = None
    listed: str | None = None
    chosen: str | None = None
    from_zero: bool = False
    first: str | None = None
    scores: Scores = Scores.SOFTMAX
    corrected: bool = False

    def read(self, config: Config, layers: int) -> list[AnyMlp]:
        """The MLP of each layer."""
        routed = self._routed(config)
        if self.dense is None:
            return [routed] * layers
        sparse = self._sparse(config, layers)
        if all(sparse):
            return [routed] * layers
        dense = DenseMlp(config.positive(self.dense), Mlp.SWIGLU)
        return [routed if experts else dense for experts in sparse]

    def _routed(self, config: Config) -> RoutedMlp:
        experts, top_k, ffn = (config.positive(key) for key in (self.experts, self.top_k, self.ffn))
        if top_k > experts:
            raise InputError(
                f"{config.path}: {self.top_k} {top_k} is above {self.experts} {experts}; at most {experts} fits"
            )
        return RoutedMlp(
            experts,
            top_k,
            ffn,
            Mlp.SWIGLU,
            shared=self._shared(config, ffn),
            shared_gate=self.shared_gate,
            bias=self.bias,
            router=self._router(config, experts),
        )

    def _shared(self, config: Config, ffn: int) -> int:
        if self.shared_ffn is not None:
            return config.positive(self.shared_ffn)
        if self.shared is not None:
            return ffn * config.whole(self.shared, 0)
        return ffn if self.shared_always else 0

    def _router(self, config: Config, experts: int) -> Router:
        said = config.content.get("scoring_func")
        if said is not None and said not in _SCORES:
            raise InputError(f"{config.path}: scoring_func {said!r} is not modelled; {' and '.join(_SCORES)} are")
        groups = config.positive("n_group", 1)
        config.dividing("n_group", groups, self.experts, experts)
        limit = config.positive("topk_group", groups)
        scores = self.scores if said is None else _SCORES[said]
        return Router(scores, groups, limit if limit < groups else None, self.corrected)

    def _sparse(self, config: Config, layers: int) -> list[bool]:
        """Whether each layer has experts."""
        if self.chosen is not None and (places := config.places(self.chosen, layers)) is not None:
            return [place in places for place in range(layers)]
        first = config.whole(self.first, 0) if self.first else 0
        every = config.positive(self.step, 1) if self.step else 1
        ahead = 0 if self.from_zero else 1
        dense = (config.places(self.listed, layers) if self.listed else None) or frozenset()
        return [place >= first and (place + ahead) % every == 0 and place not in dense for place in range(layers)]


_QWEN: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_DEEPSEEK: Final = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
MIXTURES: Final[Mapping[str, Mixture]] = MappingProxyType(
    {
        "mixtral": Mixture("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        "olmoe": Mixture("num_experts", "num_experts_per_tok", "intermediate_size"),
        "qwen2_moe": Mixture(
            *_QWEN, dense="intermediate_size", shared_ffn="shared_expert_intermediate_size", shared_gate=True,
            step="decoder_sparse_step", listed="mlp_only_layers",
        ),
        "qwen3_moe": Mixture(
            *_QWEN, dense="intermediate_size", step="decoder_sparse_step", listed="mlp_only_layers"
        ),
        "gpt_oss": Mixture("num_local_experts", "num_experts_per_tok", "intermediate_size", bias=True),
        "llama4_text": Mixture(
            "num_local_experts", "num_experts_per_tok", "intermediate_size", dense="intermediate_size_mlp",
            shared_always=True, step="interleave_moe_layer_step", chosen="moe_layers", scores=Scores.SIGMOID,
        ),
        "glm4_moe": Mixture(
            *_DEEPSEEK, dense="intermediate_size", shared="n_shared_experts", first="first_k_dense_replace",
            scores=Scores.SIGMOID, corrected=True,
        ),
        "deepseek_v2": Mixture(
            *_DEEPSEEK, dense="intermediate_size", shared="n_shared_experts", first="first_k_dense_replace",
            step="moe_layer_freq", from_zero=True,
        ),
        "deepseek_v3": Mixture(
            *_DEEPSEEK, dense="intermediate_size", shared="n_shared_experts", first="first_k_dense_replace",
            step="moe_layer_freq", from_zero=True, scores=Scores.SIGMOID, corrected=True,
        ),
    }
)  # fmt: skip
"""By family."""
