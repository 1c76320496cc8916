"""Which model do Megatron-LM arguments define?

The vocabulary size comes from `--vocab-size` or the tokenizer (`tokenizers.yaml`), padded like Megatron-LM's to a
multiple of 128 x tp. Activations are distinguished by their number of matrices only: GELU and squared ReLU have two,
gated ones three.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.interop.deepspeed_config import fork_experts, is_deepspeed_fork
from clustersim.interop.megatron_arguments import MegatronArguments
from clustersim.interop.megatron_hybrid import hybrid_config

NORM_BY_FLAG: Final = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS_BY_FLAG: Final = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary"}
_NO_POSITIONS: Final = {"none": "none"}
_POSITIONS_OF_FORKS: Final = {"absolute": "learned", "rotary": "rotary", "alibi": "alibi"}
"""Names of bigscience's fork of Megatron-LM."""
_NORMS_OF_FORKS: Final = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
"""Names of Megatron-DeepSpeed."""
_HEAD_TYPES: Final = {"multihead": "multihead", "multiquery": "multiquery"}
_TOKENIZER_PATHS: Final = ("tokenizer-model", "tokenizer-name-or-path", "tokenizer-path", "tokenizer-file")
_SOFTMAX_TYPES: Final = {name: name for name in ("vanilla", "off-by-one", "learnable")}


def import_model(parsed: MegatronArguments, tp: int) -> dict[str, Any]:
    """The `model` section; raises InputError for missing or invalid values."""
    hidden, heads = parsed.required_integer("hidden-size"), parsed.required_integer("num-attention-heads")
    is_fork = is_deepspeed_fork(parsed)
    swiglu = parsed.has("swiglu")
    ffn = parsed.integer("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    is_glu = parsed.text("glu-activation") is not None  # of bigscience's fork, whose width stays 4 x hidden
    is_gated = parsed.has("quick-geglu") or swiglu or is_glu
    parsed.has("squared-relu")
    has_bias = not parsed.has("disable-bias-linear")
    is_gqa = parsed.has("group-query-attention")
    query_groups = parsed.integer("num-query-groups", 1)
    if parsed.choice("attention-head-type", _HEAD_TYPES, "multihead") == "multiquery":  # of BigCode's fork
        is_gqa, query_groups = True, 1
    positions = parsed.choice(
        "position-embedding-type", {**POSITIONS_BY_FLAG, **_POSITIONS_OF_FORKS, **_NO_POSITIONS}, "learned_absolute"
    )
    if parsed.has("use-rotary-position-embeddings"):
        positions = "rotary"
    dropout = max(parsed.real_number(f"{module}-dropout", 0.1) for module in ("hidden", "attention")) > 0.0
    rotary_percent = parsed.real_number("rotary-percent", 1.0)
    if positions == "none":
        positions, rotary_percent = "rotary", 0.0
    parsed.unchecked("max-position-embeddings")
    model: dict[str, Any] = {
        "name": parsed.source,
        "layers": parsed.required_integer("num-layers"),
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": query_groups if is_gqa else heads,
        "head_dim": parsed.integer("kv-channels"),
        "vocab": _padded_vocab(parsed, tp),
        "max_positions": parsed.required_integer("max-position-embeddings") if positions == "learned" else None,
        "mlp": "swiglu" if is_gated else "gelu",
        "norm": parsed.choice("normalization", {**NORM_BY_FLAG, **(_NORMS_OF_FORKS if is_fork else {})}, "LayerNorm"),
        "positions": positions,
        "rotary_percent": rotary_percent if positions == "rotary" else None,
        "tied_embeddings": not parsed.has("untie-embeddings-and-output-weights"),
        "linear_bias": has_bias,
        "qkv_bias": has_bias or parsed.has("add-qkv-bias"),
        "qk_norm": parsed.has("qk-layernorm"),
        **_attention_scores_config(parsed),
        "dropout": dropout,
        "mtp_layers": parsed.integer("mtp-num-layers"),
        **(fork_experts(parsed, ffn or 0) if is_fork else _moe_config(parsed, ffn or 0)),
        "mla": _mla_config(parsed),
        "dsa": _dsa_config(parsed),
        "attention_output_gate": parsed.has("attention-output-gate") or None,
    }
    model |= hybrid_config(parsed, hidden)
    if model["mla"]:  # MLA has its own heads, norms and biases
        model |= dict.fromkeys(("kv_heads", "head_dim", "qkv_bias", "qk_norm", "rotary_percent", "attention_sinks"))
    return {key: value for key, value in model.items() if value is not None}


def _padded_vocab(parsed: MegatronArguments, tp: int) -> int:
    """Padded vocabulary size."""
    stated = parsed.integer("padded-vocab-size") or parsed.integer("pad-vocab-size-to")
    multiple = parsed.positive_integer("make-vocab-size-divisible-by", 128) * tp
    extra = parsed.integer("extra-vocab-size")
    if stated:
        return stated
    size = parsed.integer("vocab-size")
    if size is None and "model.vocab" in parsed.context.overridden:
        return 1
    if size is None:
        tokenizer = _known_tokenizer(parsed, extra or 0)
        size = tokenizer.entries
        parsed.assumptions.append(f"the vocabulary has {size:,} entries, as {tokenizer.name} has")
        if tokenizer.is_padded:
            return size
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """A tokenizer whose vocabulary is known. is_padded: whether the entries are those of the embedding."""

    name: str
    entries: int
    is_padded: bool = False


def _tokenizer_of_type(name: str, extra: int) -> _Tokenizer | None:
    """A tokenizer by its type; extra: --extra-vocab-size."""
    entry = _tokenizer_table()["types"].get(name, {})
    if "entries" in entry and not entry.get("extra"):
        return _Tokenizer(name, entry["entries"])
    total = entry["entries"] + extra if "entries" in entry else entry.get("padded", entry.get("totals", {}).get(extra))
    return None if total is None else _Tokenizer(name, total, is_padded=True)


def _known_tokenizer(parsed: MegatronArguments, extra: int) -> _Tokenizer:
    """The tokenizer by its name or path, else by its type; raises InputError for one that is not known."""
    table = _tokenizer_table()
    types = [parsed.arguments.get(name, ())[:1] for name in ("patch-tokenizer-type", "tokenizer-type")]
    given = [value[0] for value in types if value]
    is_bpe = {"vocab-file", "merge-file"} <= {*parsed.arguments}  # BERT's has no merges
    given += ["GPT2BPETokenizer"] if is_bpe and not given else []
    paths = [parsed.arguments.get(flag, ())[:1] for flag in _TOKENIZER_PATHS]
    named = [path[0] for path in paths if path]
    of_type = next((one for name in given if (one := _tokenizer_of_type(name, extra)) is not None), None)
    if of_type is not None and (of_type.is_padded or extra):
        return of_type
    for path in named:
        entry = next((one for form, one in table["names"].items() if re.search(form, path.casefold())), None)
        if entry is not None:
            return _Tokenizer(parsed.shown(path), entry["entries"])
    if of_type is not None and all(map(_says_nothing, named)):
        return of_type
    shown = parsed.shown(" ".join([*given[:1], *named[:1]])) or "none"
    raise InputError(
        f"{parsed.source}: the vocabulary's size is that of a tokenizer which is not here ({shown}); add "
        "--vocab-size, such as --vocab-size 128256, or give --set model.vocab=128256"
    )


def _says_nothing(path: str) -> bool:
    """Whether a tokenizer's path names no tokenizer, so that its type's own is meant."""
    name = path.rstrip("/").rpartition("/")[2]
    is_plain = re.fullmatch(r"(tokenizer|spm|sentencepiece)?(\.(model|json))?", name.casefold())
    is_llama = re.search(r"(?<!code)(?<!tiny)llama(?![-_]?[34])", name.casefold())
    return "\0" in name or is_plain is not None or is_llama is not None


@cache
def _tokenizer_table() -> Mapping[str, Any]:
    return read_mapping(Path(__file__).with_name("tokenizers.yaml"))


def _moe_config(parsed: MegatronArguments, ffn: int) -> dict[str, Any]:
    """The experts, and the layer stack if the number of leading dense layers does not define it."""
    count = parsed.integer("num-experts")
    if count is None:
        return {}
    for name in ("moe-grouped-gemm", "moe-pad-expert-input-to-capacity"):
        parsed.has(name)
    experts: dict[str, Any] = {
        "count": count,
        "top_k": parsed.integer("moe-router-topk", 2),
        "ffn": parsed.integer("moe-ffn-hidden-size", ffn),
        "shared": parsed.integer("moe-shared-expert-intermediate-size"),
        "shared_gate": parsed.has("moe-shared-expert-gate") or None,
        "bias": not parsed.has("disable-bias-linear") or None,
        "router": "sigmoid" if parsed.text("moe-router-score-function") == "sigmoid" else None,
        "router_bias": parsed.has("moe-router-enable-expert-bias") or None,
        "num_groups": parsed.integer("moe-router-num-groups"),
        "group_topk": parsed.integer("moe-router-group-topk"),
        "capacity_factor": parsed.real_number("moe-expert-capacity-factor", 0.0) or None,
    }
    experts = {key: value for key, value in experts.items() if value is not None}
    moe_layers = _moe_layer_flags(parsed)
    dense_layers = moe_layers.find("1")
    if "0" not in moe_layers[dense_layers:]:
        return {"experts": experts | ({"dense_layers": dense_layers} if dense_layers else {})}
    moe_period = dense_layers + 1
    if moe_layers == "".join(str(int(layer % moe_period == 0)) for layer in range(1, len(moe_layers) + 1)):
        return {"experts": experts | {"interleave_moe_layer_step": moe_period}}
    runs = ((bit, len(list(group))) for bit, group in groupby(moe_layers))
    return {
        "experts": experts,
        "stack": [
            {"layers": layer_count} if bit == "1" else {"layers": layer_count, "experts": 0}
            for bit, layer_count in runs
        ],
    }


def _moe_layer_flags(parsed: MegatronArguments) -> str:
    """A 1 for each MoE layer and a 0 for each dense one: every n-th layer from the first, or as listed."""
    text = parsed.text("moe-layer-freq", "1") or "1"
    if text.isdecimal() and int(text):
        return "".join(str(int(layer % int(text) == 0)) for layer in range(parsed.required_integer("num-layers")))
    flags = _parse_layer_list(parsed, "moe-layer-freq", text)
    if "1" not in flags:
        raise parsed.error("moe-layer-freq", f"{text!r} has no layer with experts")
    return flags


def _parse_layer_list(parsed: MegatronArguments, name: str, text: str) -> str:
    """A 0 or 1 for each layer, from a list such as ([0]*3+[1]*58)."""
    layers, stripped = parsed.required_integer("num-layers"), text.replace(" ", "").strip("()")
    term = r"\[[01](?:,[01])*\](?:\*\d+)?"
    terms = (
        re.findall(r"\[([01](?:,[01])*)\](?:\*(\d+))?", stripped)
        if re.fullmatch(rf"{term}(?:\+{term})*", stripped)
        else []
    )
    flags = "".join(digits.replace(",", "") * min(int(repeat or 1), layers + 1) for digits, repeat in terms)
    if len(flags) != layers:
        raise parsed.error(name, f"{text!r} is not read as {layers} layers; write such as [0]*3+[1]*58")
    return flags


def _attention_scores_config(parsed: MegatronArguments) -> dict[str, Any]:
    """Sliding window and attention sinks."""
    sinks = {"attention_sinks": True} if parsed.choice("softmax-type", _SOFTMAX_TYPES, "vanilla") == "learnable" else {}
    size, global_period = parsed.text("window-size"), _global_attention_period(parsed)
    if size is None or global_period == 1:
        return sinks
    match = re.fullmatch(r"\(?(\d+), ?0\)?", size)
    if match is None:
        raise parsed.error("window-size", f"{size!r} is no window of tokens before each alone, such as 127,0")
    return sinks | {"window": int(match[1]) + 1} | ({"window_attn_skip_freq": global_period} if global_period else {})


def _global_attention_period(parsed: MegatronArguments) -> int | None:
    """Return n if every n-th layer has no window; None: all layers have one."""
    text = parsed.text("window-attn-skip-freq")
    if text is None or text.isdecimal():
        return int(text or 0) or None
    flags = _parse_layer_list(parsed, "window-attn-skip-freq", text)
    period = flags.find("0") + 1
    if flags != window_flags(period, len(flags)):
        raise parsed.error("window-attn-skip-freq", f"{text!r} is not every so-manieth layer; write it as model.stack")
    return period or None


def window_flags(period: int, layers: int) -> str:
    """A 1 for each layer with a window, where every `period`-th has none; period 0: all have one.

    >>> window_flags(3, 7), window_flags(0, 4)
    ('1101101', '1111')
    """
    return "".join(str(int(not period or layer % period != 0)) for layer in range(1, layers + 1))


def _mla_config(parsed: MegatronArguments) -> dict[str, int | None] | None:
    if not parsed.has("multi-latent-attention"):
        return None
    return {
        "q_lora_rank": parsed.integer("q-lora-rank", 0),
        "kv_lora_rank": parsed.integer("kv-lora-rank", 32),
        "qk_nope_head_dim": parsed.integer("qk-head-dim", 128),
        "qk_rope_head_dim": parsed.integer("qk-pos-emb-head-dim", 64),
        "v_head_dim": parsed.integer("v-head-dim", 128),
    }


def _dsa_config(parsed: MegatronArguments) -> dict[str, int | None] | None:
    """DeepSeek's sparse attention; raise InputError for what is not modelled of it."""
    if parsed.text("experimental-attention-variant") != "dsa":
        return None
    backend = parsed.text("dsa-kernel-backend") or "none"
    if backend == "none":
        raise parsed.error(
            "dsa-kernel-backend",
            "none computes all scores unfused, which is not modelled; cudnn and tilelang are",
        )
    if parsed.integer("dsa-indexer-topk-freq", 1) != 1:
        raise parsed.error("dsa-indexer-topk-freq", "layers that share selected keys are not modelled; 1 is")
    if not parsed.real_number("dsa-indexer-loss-coeff", 0.0) or not parsed.has("dsa-indexer-use-sparse-loss"):
        raise parsed.error(
            "dsa-indexer-use-sparse-loss",
            "only the indexer's loss over selected keys is modelled; give it, with --dsa-indexer-loss-coeff above 0",
        )
    return {
        "index_n_heads": parsed.integer("dsa-indexer-n-heads", 64),
        "index_head_dim": parsed.integer("dsa-indexer-head-dim", 128),
        "index_topk": parsed.integer("dsa-indexer-topk", 2048),
    }
