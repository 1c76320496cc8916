"""Which MoE model did a published run train, and how were its experts distributed?

Columns state the number of experts, top-k and their width, but not windows, biases, norms, routers or MLA.
If all that a row states agrees with a packaged preset, the row's layers are the preset's, as many as the
row has. Otherwise the columns define the model, with the leading dense layers stated in the notes.

The dispatcher, its overlap and the expert tensor parallelism come from the notes, else from the software's
defaults.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from clustersim.model.attention_spec import FullAttention, SoftmaxAttention
from clustersim.model.presets import code_presets
from clustersim.model.transformer import TransformerModel
from clustersim.program.task import TokenDispatcher
from clustersim.results.natural_routing import NATURAL_VARIATIONS
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.framework_defaults import FrameworkDefaults, high_precision_format

_ETP_NOTE: Final = re.compile(r"\b(?:ETP ?=?|expert-tensor-parallel-size )(\d+)")
_DENSE_LAYER_NOTES: Final = (re.compile(r"dense_layers=(\d+)"), re.compile(r"first (\d+) layer(?:s|\(s\))? dense"))
_DISPATCHER_NOTES: Final = (  # patterns of the notes
    (re.compile(r"\bdeepep-uccl\b", re.IGNORECASE), TokenDispatcher.DEEPEP_UCCL),
    (re.compile(r"\bDeepEP\b|backend=deepep", re.IGNORECASE), TokenDispatcher.DEEPEP),
    (re.compile(r"\bHybridEP\b|backend=hybridep", re.IGNORECASE), TokenDispatcher.HYBRIDEP),
    (re.compile(r"all-?gather dispatcher|dispatcher-type allgather", re.IGNORECASE), TokenDispatcher.ALL_GATHER),
    (re.compile(r"\ball-?to-?all\b", re.IGNORECASE), TokenDispatcher.ALL_TO_ALL),
)


_A2A_OVERLAP_NOTE: Final = re.compile(
    r"\b(?:A2A|EP|all-to-all|expert-parallel communication) overlap\b(?! off)|moe_a2a_overlap(?!=False)", re.IGNORECASE
)
# Megatron Bridge's `moe_a2a_overlap` sets both (`_set_moe_a2a_overlap_overrides` of its performance recipes)
_DELAYED_WGRAD_NOTE: Final = re.compile(r"delayed wgrad|moe_a2a_overlap(?!=False)")
_NO_SHARED_EXPERT_OVERLAP: Final = "shared-expert overlap off"  # text in the notes
_CAPACITY_NOTE: Final = re.compile(r"capacity factor (\d+(?:\.\d+)?)(?: and|,) padd")
DEFAULT_DISPATCHER: Final = TokenDispatcher.ALL_TO_ALL.value
"""The dispatcher of software whose recipes select no other."""
_SEQUENTIAL_EXPERTS_NOTE: Final = "experts one after the other"
# SMs of Hybrid-EP in performance recipes: NVIDIA-NeMo/Megatron-Bridge v0.3.0 to v0.5.1, scripts/performance/utils/
# overrides.py (`moe_hybridep_num_sms`)
_RECIPE_SM_COUNT: Final = 32
_TIMED_RECIPE_NOTE: Final = re.compile(r"\brecipe |full.iteration")
FUSED_MLP_NOTE: Final = "cutedsl_fused_grouped_mlp=True"  # text in the notes of Megatron Bridge's recipes
_MLA_NOTE: Final = re.compile(r"latent[ -]attention")
_UNSUPPORTED_NOTES: Final = {  # text in the notes
    "fine-grained-activation-offloading": "activations of single operators on the host are not modelled",
}
# models whose recipes set a coefficient for the load-balancing loss: moe_aux_loss_coeff in Megatron Bridge's
# src/megatron/bridge/models/{deepseek/deepseek_v3,kimi/kimi,qwen/qwen3_moe}_bridge.py, of which the first reads
# Moonlight, and in Megatron-MoE-ModelZoo's model_configs/benchmarking
_AUX_LOSS_MODELS: Final = (
    "deepseek-v3", "kimi-k2", "moonlight-16b-a3b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x22b",
)  # fmt: skip
# models whose Megatron Bridge recipes keep bf16 moments (exp_avg_dtype) and gradients (grad_reduce_in_fp32=False of
# their MixedPrecisionConfig, in the library's recipes, too) and overlap shared experts with the A2A
# (moe_shared_expert_overlap; src/megatron/bridge/recipes/{deepseek/deepseek_v3,moonlight/moonlight_16b}.py)
_BF16_STATE_MODELS: Final = ("deepseek-v3", "moonlight-16b-a3b")
_BF16_MOMENTS_NOTE: Final = "bf16 moments"  # text in the notes
_UNFUSED_PERMUTE_NOTE: Final = "permute fusion off"
_EARLY_FREE_ROUTING_NOTE: Final = "experts chosen freely in the first 100 steps"


def matching_preset(case: ValidationCase) -> str | None:
    """The preset that agrees with every dimension the row states, whatever its name; None if there is none.

    If several agree, the one with the nearest vocabulary size.
    """
    vocab_distance = {
        name: abs(model.vocab - case.positive_int("vocab"))
        for name, model in _moe_presets().items()
        if _matches(case, model)
    }
    return min(vocab_distance, key=vocab_distance.__getitem__, default=None)


def require_expressible_moe(case: ValidationCase, preset: str | None) -> None:
    """Raise CannotPredictError for MoE runs that scenarios cannot express; columns alone do not describe MLA."""
    reasons = [reason for note, reason in _UNSUPPORTED_NOTES.items() if note in case.text("notes")]
    if preset is None and _MLA_NOTE.search(case.text("notes")):
        reasons.append("latent attention of a model that is not packaged")
    if reasons:
        raise CannotPredictError(reasons[0])


def dense_ffn_size(case: ValidationCase) -> int:
    """FFN width of the dense layers of an MoE model; that of its experts if it has no dense layers."""
    uses_dense_column = _dense_layer_count(case) or not case.text("moe_ffn_hidden")
    return case.positive_int("ffn_hidden" if uses_dense_column else "moe_ffn_hidden")


def moe_overheads(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """Keys of `training.overheads` of an MoE run; Megatron-LM command lines in the notes state grouped GEMM."""
    notes, preset = case.text("notes"), matching_preset(case)
    has_loss = preset in _AUX_LOSS_MODELS and defaults.has_aux_loss
    candidates = {
        "router_loss": (True, has_loss),
        "permute_unfused": (_UNFUSED_PERMUTE_NOTE in notes, _UNFUSED_PERMUTE_NOTE in notes or defaults.fused_routing),
        "router_unfused": (False, defaults.fused_routing),
        "indices_unfused": (False, defaults.fused_routing),  # --enable-experimental in model_configs/benchmarking
        "grouping": ("fused", True) if FUSED_MLP_NOTE in notes else ("loop", _runs_experts_sequentially(notes)),
    }
    return {key: value for key, (value, applies) in candidates.items() if applies}


def _runs_experts_sequentially(notes: str) -> bool:
    return _SEQUENTIAL_EXPERTS_NOTE in notes or ("num-experts" in notes and "moe-grouped-gemm" not in notes)


def moe_expert_load(case: ValidationCase) -> dict[str, float]:
    """`training.expert_load` of runs whose routers have hardly been trained and are free to choose.

    Loads are drawn for each expert; those of a rank vary by as much as other publishers' runs of that age say
    (`results.natural_routing`).
    """
    if _EARLY_FREE_ROUTING_NOTE not in case.text("notes"):
        return {}
    experts_per_rank = case.positive_int("experts") / case.positive_int("ep", 1)
    return {"expert_load": max(NATURAL_VARIATIONS) * math.sqrt(experts_per_rank)}


def moe_precision(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, str]:
    """`training.precision` entries of MoE recipes that keep optimizer moments or gradients below FP32."""
    is_known = defaults.has_model_recipes  # then they are in the recipe
    has_bf16_states = defaults.moe_only and not is_known and matching_preset(case) in _BF16_STATE_MODELS
    has_bf16_moments = has_bf16_states or _BF16_MOMENTS_NOTE in case.text("notes")
    names = [*(["moments"] if has_bf16_moments else []), *(["gradients"] if has_bf16_states else [])]
    return dict.fromkeys(names, high_precision_format(case))


def experts_config(case: ValidationCase, preset: str | None) -> dict[str, Any]:
    """The `model.experts` section of a run, apart from what its preset contains."""
    dense_layers, capacity = _dense_layer_count(case), _CAPACITY_NOTE.search(case.text("notes"))
    config: dict[str, Any] = {} if dense_layers is None else {"dense_layers": dense_layers}
    config |= {} if capacity is None else {"capacity_factor": float(capacity[1])}
    if preset is not None:
        return config
    ffn = case.positive_int("moe_ffn_hidden", case.positive_int("ffn_hidden"))
    shared = case.text("shared_experts")
    return {
        "count": case.positive_int("experts"),
        "top_k": case.positive_int("top_k"),
        "ffn": ffn,
        "shared": 0 if shared in ("", "0") else round(case.positive_float("shared_experts") * ffn),
        **config,
    }


def moe_layout(case: ValidationCase, defaults: FrameworkDefaults) -> dict[str, Any]:
    """The `layout` entries of a run's experts; without what a row leaves to its recipe."""
    dispatcher, options = _dispatcher(case), token_dispatch_options(case)
    config: dict[str, Any] = {"ep": case.positive_int("ep", 1)}
    leaves_to_recipe = defaults.leaves_to_recipe(case)
    if not leaves_to_recipe or _stated_dispatcher(case):
        config["dispatcher"] = dispatcher.value
    if dispatcher is TokenDispatcher.HYBRIDEP and _TIMED_RECIPE_NOTE.search(case.text("notes")):
        config["dispatcher_num_sms"] = _RECIPE_SM_COUNT
    if defaults.has_model_recipes and not leaves_to_recipe:
        config |= {"overlap_moe_expert_parallel_comm": False, "moe_shared_expert_overlap": False}
    if options["overlap"]:
        config |= {"overlap_moe_expert_parallel_comm": True}
        config |= {} if leaves_to_recipe else {"delay_wgrad_compute": options["delayed wgrad"]}
    elif not leaves_to_recipe and _overlaps_shared_experts(case, defaults, dispatcher):
        config |= {"moe_shared_expert_overlap": True}
    etp = _ETP_NOTE.search(case.text("notes"))
    if etp:
        return config | {"etp": int(etp[1])}
    return config | {"etp": 1 if defaults.unsharded_experts else case.positive_int("tp", 1)}


def _overlaps_shared_experts(case: ValidationCase, defaults: FrameworkDefaults, dispatcher: TokenDispatcher) -> bool:
    """Whether shared experts run during the all-to-all; never with overlapped dispatch, which Megatron rejects."""
    has_overlap = defaults.moe_only and dispatcher is TokenDispatcher.ALL_TO_ALL
    is_switched_off = _NO_SHARED_EXPERT_OVERLAP in case.text("notes")
    return has_overlap and not is_switched_off and matching_preset(case) in _BF16_STATE_MODELS


def token_dispatch_options(case: ValidationCase) -> dict[str, str | float | None]:
    """Options of the token dispatch; `DEFAULT_DISPATCHER`, False and None are the defaults."""
    notes = case.text("notes")
    capacity = _CAPACITY_NOTE.search(notes)
    return {
        "dispatcher": _dispatcher(case).value,
        "overlap": _A2A_OVERLAP_NOTE.search(notes) is not None,
        "delayed wgrad": _DELAYED_WGRAD_NOTE.search(notes) is not None,
        "capacity": None if capacity is None else float(capacity[1]),
    }


@cache
def _moe_presets() -> dict[str, TransformerModel]:
    """Packaged MoE models whose MoE layers are all equal."""
    return {
        name: model_preset.model
        for name, model_preset in code_presets().items()
        if len(model_preset.model.distinct_moes) == 1
    }


def _matches(case: ValidationCase, model: TransformerModel) -> bool:
    """Whether a model agrees with every dimension that a row states.

    Vocabulary and layer count may differ; only models of equal layers may have more than their preset.
    """
    (moe,) = model.distinct_moes
    stated = {
        "hidden": model.hidden,
        "experts": moe.experts,
        "top_k": moe.top_k,
        "moe_ffn_hidden": moe.ffn,
        "shared_experts": moe.shared // moe.ffn,
        "tied_embeddings": "yes" if model.tied_embeddings else "no",
    }
    heads_match = all(_is_consistent(case, heads) for heads in map(_heads, model.distinct_attentions))
    has_layers = len(model.stack) == 1 or case.positive_int("layers") <= model.layer_count
    return _is_consistent(case, stated) and heads_match and has_layers


def _heads(attention: SoftmaxAttention) -> dict[str, int]:
    """Heads of attention; MLA's key dimension is left out, as tables state one of its components or the sum."""
    stated = {"heads": attention.heads, "kv_heads": attention.kv_heads}
    match attention:
        case FullAttention(head_dim=width):
            return stated | {"head_dim": width}
    return stated


def _is_consistent(case: ValidationCase, stated: Mapping[str, int | str]) -> bool:
    return all(case.text(column) in ("", str(value)) for column, value in stated.items())


def _dense_layer_count(case: ValidationCase) -> int | None:
    """Number of leading dense layers that the notes state; the first pattern refers to the truncated model."""
    match = next(filter(None, (pattern.search(case.text("notes")) for pattern in _DENSE_LAYER_NOTES)), None)
    return None if match is None else int(match[1])


def _dispatcher(case: ValidationCase) -> TokenDispatcher:
    """The dispatcher: as noted, else all-to-all."""
    return _stated_dispatcher(case) or TokenDispatcher.ALL_TO_ALL


def _stated_dispatcher(case: ValidationCase) -> TokenDispatcher | None:
    notes = case.text("notes")
    return next((dispatcher for pattern, dispatcher in _DISPATCHER_NOTES if pattern.search(notes)), None)
