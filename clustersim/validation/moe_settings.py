"""Which mixture of experts did a published run train, and where were its experts?

Columns say how many experts there are, how many of them a token meets, and how wide they are; they do not say windows,
biases, norms, routers or latent attention. Where all that a row states is what a shipped preset has, the row's layers
are the preset's, so many of them as the row has. Else the columns are all there is, with the leading dense layers of
the notes.

How tokens travel, beside what, and over how many ranks an expert is cut, is what the notes say; else what the software
does.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from clustersim.model.layer_stack import AttentionSpec, FullAttention, LatentAttention
from clustersim.model.presets import PRESETS
from clustersim.model.transformer import TransformerModel
from clustersim.program.task import TokenDispatcher
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.framework_defaults import Software, wide_format

_CUT: Final = re.compile(r"\b(?:ETP ?=?|expert-tensor-parallel-size )(\d+)")
_FIRST_DENSE: Final = (re.compile(r"dense_layers=(\d+)"), re.compile(r"first (\d+) layer(?:s|\(s\))? dense"))
_DISPATCHERS: Final = (  # as notes name them
    (re.compile(r"\bDeepEP\b|backend=deepep", re.IGNORECASE), TokenDispatcher.DEEPEP),
    (re.compile(r"\bHybridEP\b|backend=hybridep", re.IGNORECASE), TokenDispatcher.HYBRIDEP),
    (re.compile(r"all-?gather dispatcher|dispatcher-type allgather", re.IGNORECASE), TokenDispatcher.ALL_GATHER),
    (re.compile(r"\ball-?to-?all\b", re.IGNORECASE), TokenDispatcher.ALL_TO_ALL),
)


_BESIDE: Final = re.compile(
    r"\b(?:A2A|EP) overlap\b|expert-parallel communication overlap on|moe_a2a_overlap", re.IGNORECASE
)
# Megatron Bridge's `moe_a2a_overlap` sets both (`_set_moe_a2a_overlap_overrides` of its performance recipes)
_PUT_OFF: Final = re.compile(r"delayed wgrad|moe_a2a_overlap")
_CAPACITY: Final = re.compile(r"capacity factor (\d+(?:\.\d+)?)(?: and|,) padd")
PLAIN: Final = TokenDispatcher.ALL_TO_ALL.value
"""The dispatcher of software whose recipes say nothing else."""
_LOOP: Final = "experts one after the other"
# of Hybrid-EP in recipes that were timed: NVIDIA-NeMo/Megatron-Bridge v0.3.0 to v0.5.1, scripts/performance/utils/
# overrides.py (`moe_hybridep_num_sms`)
_RECIPES_SMS: Final = 32
_TIMED: Final = re.compile(r"\brecipe |full.iteration")
FUSED_MLP: Final = "cutedsl_fused_grouped_mlp=True"  # as notes have it of Megatron Bridge's recipes
_LATENT: Final = re.compile(r"latent[ -]attention")
_UNMODELLED: Final = {  # as notes say it
    "optimizer muon": "optimizer muon is not modelled",
    "fine-grained-activation-offloading": "activations of single operators on the host are not modelled",
}
RECIPE: Final = "recipe defaults"  # as notes say that a recipe ran as it stands
# moe_flex_dispatcher_backend of Megatron Bridge's performance recipes in bf16, by preset and how the GPU's name begins
# (scripts/performance/configs/{deepseek,gpt_oss}/*_workload_base_configs.py, gpt_oss as of release 0.4)
_OF_RECIPES: Final = {
    ("deepseek-v3", ""): TokenDispatcher.HYBRIDEP,
    ("gpt-oss-120b", "b200"): TokenDispatcher.HYBRIDEP,
    ("gpt-oss-120b", "b300"): TokenDispatcher.HYBRIDEP,
    ("gpt-oss-120b", "gb200"): TokenDispatcher.HYBRIDEP,
}
# whose recipes give the loss of routers' load a coefficient: moe_aux_loss_coeff in Megatron Bridge's
# src/megatron/bridge/models/{deepseek/deepseek_v3,qwen/qwen3_moe}_bridge.py, of which the first reads Moonlight, and in
# Megatron-MoE-ModelZoo's model_configs/benchmarking
_BALANCED: Final = ("deepseek-v3", "moonlight-16b-a3b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x22b")
# whose recipes of Megatron Bridge keep moments in bf16 (exp_avg_dtype) and run shared experts beside the all-to-all
# (moe_shared_expert_overlap; src/megatron/bridge/recipes/{deepseek/deepseek_v3,moonlight/moonlight_16b}.py)
_NARROW: Final = ("deepseek-v3", "moonlight-16b-a3b")
# moe_router_fusion is off in recipes of Megatron Bridge but for those that were timed (set_*_common_configs of
# scripts/performance/configs); of Moonlight none was, nor of finetuning
_UNTUNED: Final = ("moonlight-16b-a3b",)
_FINETUNED: Final = re.compile(r"\bSFT\b")
_UNFUSED: Final = "permute fusion off"


def public_model(case: Case) -> str | None:
    """The preset that has all dimensions that a row states, whatever its name; None: there is none.

    Of several, that with the nearest vocabulary.
    """
    agreeing = {
        name: abs(model.vocab - case.whole("vocab")) for name, model in _mixtures().items() if _agree(case, model)
    }
    return min(agreeing, key=agreeing.__getitem__, default=None)


def require_mixture(case: Case, preset: str | None) -> None:
    """Refuse what cannot be said of a mixture's run; columns alone do not say latent attention."""
    reasons = [reason for words, reason in _UNMODELLED.items() if words in case.text("notes")]
    if preset is None and _LATENT.search(case.text("notes")):
        reasons.append("latent attention of a model that is not shipped")
    if reasons:
        raise CannotPredictError(reasons[0])


def dense_width(case: Case) -> int:
    """Width of a mixture's dense layers; of its experts where it has none of these."""
    dense = _first_dense(case) or not case.text("moe_ffn_hidden")
    return case.whole("ffn_hidden" if dense else "moe_ffn_hidden")


def experts_overheads(case: Case, software: Software) -> dict[str, Any]:
    """What `training.overheads` says of a run's experts; Megatron-LM's command line names grouped products."""
    notes, preset = case.text("notes"), public_model(case)
    said = {
        "router_loss": (True, preset in _BALANCED and software.balances),
        "permute_unfused": (_UNFUSED in notes, _UNFUSED in notes or software.fused_routing),
        "router_unfused": (not software.fused_routing, software.fused_routing or _router_unfused(case, software)),
        "grouping": ("fused", True) if FUSED_MLP in notes else ("loop", _in_a_loop(notes)),
    }
    found = {key: value for key, (value, applies) in said.items() if applies}
    return {"overheads": found} if found else {}


def _in_a_loop(notes: str) -> bool:
    return _LOOP in notes or ("num-experts" in notes and "moe-grouped-gemm" not in notes)


def experts_formats(case: Case, software: Software) -> dict[str, str]:
    """In which formats recipes of mixtures keep what others keep in FP32."""
    narrow = software.mixtures and public_model(case) in _NARROW
    return {"moments": wide_format(case)} if narrow else {}


def _router_unfused(case: Case, software: Software) -> bool:
    """Whether a recipe of Megatron Bridge chooses experts by one operation after the other."""
    tuned = public_model(case) not in _UNTUNED and not _FINETUNED.search(case.text("notes"))
    return software.mixtures and not tuned


def experts_section(case: Case, preset: str | None) -> dict[str, Any]:
    """What `model.experts` says of a run, beside what its preset has."""
    dense, capacity = _first_dense(case), _CAPACITY.search(case.text("notes"))
    placed: dict[str, Any] = {} if dense is None else {"dense_layers": dense}
    placed |= {} if capacity is None else {"capacity": float(capacity[1])}
    if preset is not None:
        return placed
    ffn = case.whole("moe_ffn_hidden", case.whole("ffn_hidden"))
    shared = case.text("shared_experts")
    return {
        "count": case.whole("experts"),
        "top_k": case.whole("top_k"),
        "ffn": ffn,
        "shared": 0 if shared in ("", "0") else round(case.number("shared_experts") * ffn),
        **placed,
    }


def experts_layout(case: Case, software: Software) -> dict[str, Any]:
    """What `layout` says of a run's experts."""
    dispatcher, served = _dispatcher(case), experts_served(case)
    section: dict[str, Any] = {"ep": case.whole("ep", 1), "dispatcher": dispatcher.value}
    if dispatcher is TokenDispatcher.HYBRIDEP and _TIMED.search(case.text("notes")):
        section["dispatcher_sms"] = _RECIPES_SMS
    if software.mixtures and dispatcher is TokenDispatcher.ALL_TO_ALL and public_model(case) in _NARROW:
        section |= {"overlap_shared_experts": True}
    if served["overlap"]:
        section |= {"overlap_expert_communication": True, "delay_wgrad": served["delayed wgrad"]}
    stated = _CUT.search(case.text("notes"))
    if stated:
        return section | {"etp": int(stated[1])}
    return section | ({"etp": 1} if software.whole_experts else {})


def experts_served(case: Case) -> dict[str, str | float | None]:
    """How experts of a run got their tokens, by what can differ; `PLAIN`, False and None are what most do."""
    notes = case.text("notes")
    capacity = _CAPACITY.search(notes)
    return {
        "dispatcher": _dispatcher(case).value,
        "overlap": _BESIDE.search(notes) is not None,
        "delayed wgrad": _PUT_OFF.search(notes) is not None,
        "capacity": None if capacity is None else float(capacity[1]),
    }


@cache
def _mixtures() -> dict[str, TransformerModel]:
    """Shipped models of which every layer behind the first with experts has the same ones."""
    return {
        name: model_preset.model for name, model_preset in PRESETS.items() if len(model_preset.model.distinct_moes) == 1
    }


def _agree(case: Case, model: TransformerModel) -> bool:
    """Whether a model has what a row states of it. Vocabularies are padded, and layers cut."""
    (routed,) = model.distinct_moes
    stated = {
        "hidden": model.hidden,
        "experts": routed.experts,
        "top_k": routed.top_k,
        "moe_ffn_hidden": routed.ffn,
        "shared_experts": routed.shared // routed.ffn,
        "tied_embeddings": "yes" if model.tied_embeddings else "no",
    }
    of_layers = all(_says(case, heads) for heads in map(_heads, model.distinct_attentions))
    return _says(case, stated) and of_layers and case.whole("layers") <= model.layer_count


def _heads(attention: AttentionSpec) -> dict[str, int]:
    """Heads of latent attention have keys of two parts, of which tables state one or the sum."""
    stated = {"heads": attention.heads, "kv_heads": attention.kv_heads}
    match attention:
        case FullAttention(head_dim=width):
            return stated | {"head_dim": width}
        case LatentAttention():
            return stated


def _says(case: Case, stated: Mapping[str, int | str]) -> bool:
    return all(case.text(column) in ("", str(value)) for column, value in stated.items())


def _first_dense(case: Case) -> int | None:
    """How many first layers have a dense MLP, where notes say it: of a cut model before of the whole."""
    found = next(filter(None, (words.search(case.text("notes")) for words in _FIRST_DENSE)), None)
    return None if found is None else int(found[1])


def _dispatcher(case: Case) -> TokenDispatcher:
    """How tokens travel: the all-to-all is what recipes of Megatron-LM, NeMo and Megatron Bridge set otherwise."""
    notes, gpu = case.text("notes"), case.text("gpu")
    named = next((dispatcher for words, dispatcher in _DISPATCHERS if words.search(notes)), None)
    if named is not None or RECIPE not in notes:
        return named or TokenDispatcher.ALL_TO_ALL
    recipes = _OF_RECIPES.items()
    model = public_model(case)
    return next(
        (found for (name, begins), found in recipes if name == model and gpu.startswith(begins)),
        TokenDispatcher.ALL_TO_ALL,
    )
