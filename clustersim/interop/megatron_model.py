"""Which model do arguments of Megatron-LM describe?

A layer's vocabulary comes from `--vocab-size` or from the tokenizer's kind, padded as Megatron does to a multiple of
128 times tp. Activations are told apart by their matrices: GELU and squared ReLU have two, gated ones three.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.megatron_arguments import Reading

_VOCABULARIES: Final[Mapping[str, int]] = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "Llama3Tokenizer": 128256,
}
"""Entries of tokenizers whose kind says it: GPT-2's BPE, and those of Llama 2 and 3."""
NORMS: Final = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS: Final = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary"}
_SOFTMAX: Final = {item: item for item in ("vanilla", "off-by-one", "learnable")}


def read_model(reading: Reading, tp: int) -> dict[str, Any]:
    """The scenario's model; raise InputError for what is missing, or no number where one belongs."""
    hidden, heads = reading.needed("hidden-size"), reading.needed("num-attention-heads")
    swiglu = reading.has("swiglu")
    ffn = reading.number("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    gated = reading.has("quick-geglu") or swiglu
    reading.has("squared-relu")
    biased = not reading.has("disable-bias-linear")
    grouped = reading.has("group-query-attention")
    groups = reading.number("num-query-groups", 1)
    positions = reading.choice("position-embedding-type", POSITIONS, "learned_absolute")
    if reading.has("use-rotary-position-embeddings"):
        positions = "rotary"
    dropout = reading.real("hidden-dropout", 0.1) > 0.0 or reading.real("attention-dropout", 0.1) > 0.0
    model: dict[str, Any] = {
        "name": reading.source,
        "layers": reading.needed("num-layers"),
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": groups if grouped else heads,
        "head_dim": reading.number("kv-channels"),
        "vocab": _vocabulary(reading, tp),
        "max_positions": reading.needed("max-position-embeddings") if positions == "learned" else None,
        "mlp": "swiglu" if gated else "gelu",
        "norm": reading.choice("normalization", NORMS, "LayerNorm"),
        "positions": positions,
        "rotary": reading.real("rotary-percent", 1.0) if positions == "rotary" else None,
        "tied_embeddings": not reading.has("untie-embeddings-and-output-weights"),
        "linear_bias": biased,
        "qkv_bias": biased or reading.has("add-qkv-bias"),
        "qk_norm": reading.has("qk-layernorm"),
        **_scores(reading),
        "dropout": dropout,
        "mtp_layers": reading.number("mtp-num-layers"),
        **_mixture(reading, ffn or 0),
        "latent": _latent(reading),
    }
    if model["latent"]:  # has heads, norms and biases of its own
        model |= dict.fromkeys(("kv_heads", "head_dim", "qkv_bias", "qk_norm", "rotary", "sinks"))
    return {key: value for key, value in model.items() if value is not None}


def _vocabulary(reading: Reading, tp: int) -> int:
    """Entries of the embedding, padded."""
    padded = reading.number("padded-vocab-size")
    if padded is not None:
        return padded
    size = reading.number("vocab-size")
    if size is None:
        kind = reading.word("tokenizer-type", "none") or "none"
        if kind not in _VOCABULARIES and "vocab-file" in reading.arguments:
            kind = "GPT2BPETokenizer"
        if kind not in _VOCABULARIES:
            raise InputError(
                f"{reading.source}: the vocabulary's size is that of a tokenizer which is not here ({kind}); add "
                "--vocab-size, such as --vocab-size 128256"
            )
        size = _VOCABULARIES[kind]
        reading.assumed.append(f"the vocabulary has {size:,} entries, as {kind} has")
    multiple = reading.degree("make-vocab-size-divisible-by", 128) * tp
    return -(-size // multiple) * multiple


def _mixture(reading: Reading, ffn: int) -> dict[str, Any]:
    """Experts, and the runs of layers that have them where the first ones alone do not tell."""
    count = reading.number("num-experts")
    if count is None:
        return {}
    for name in ("moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion", "moe-pad-expert-input-to-capacity"):
        reading.has(name)
    experts: dict[str, Any] = {
        "count": count,
        "top_k": reading.number("moe-router-topk", 2),
        "ffn": reading.number("moe-ffn-hidden-size", ffn),
        "shared": reading.number("moe-shared-expert-intermediate-size"),
        "shared_gate": reading.has("moe-shared-expert-gate") or None,
        "bias": not reading.has("disable-bias-linear") or None,
        "router": "sigmoid" if reading.word("moe-router-score-function") == "sigmoid" else None,
        "router_bias": reading.has("moe-router-enable-expert-bias") or None,
        "groups": reading.number("moe-router-num-groups"),
        "limit": reading.number("moe-router-group-topk"),
        "capacity": reading.real("moe-expert-capacity-factor", 0.0) or None,
    }
    experts = {key: value for key, value in experts.items() if value is not None}
    there = _frequency(reading)
    dense = there.find("1")
    if "0" not in there[dense:]:
        return {"experts": experts | ({"dense_layers": dense} if dense else {})}
    every = dense + 1
    if there == "".join(str(int(at % every == 0)) for at in range(1, len(there) + 1)):
        return {"experts": experts | {"every": every}}
    runs = ((bit, len(list(run))) for bit, run in groupby(there))
    return {
        "experts": experts,
        "stack": [{"layers": many} if bit == "1" else {"layers": many, "experts": 0} for bit, many in runs],
    }


def _frequency(reading: Reading) -> str:
    """A 1 for each layer that has experts: the first of each so many, or as a list has it."""
    text = reading.word("moe-layer-freq", "1") or "1"
    if text.isdecimal() and int(text):
        return "".join(str(int(at % int(text) == 0)) for at in range(reading.needed("num-layers")))
    flags = _listed(reading, "moe-layer-freq", text)
    if "1" not in flags:
        raise reading.error("moe-layer-freq", f"{text!r} has no layer with experts")
    return flags


def _listed(reading: Reading, name: str, text: str) -> str:
    """A 0 or 1 for each layer, as a list such as ([0]*3+[1]*58) has it."""
    layers, plain = reading.needed("num-layers"), text.replace(" ", "").strip("()")
    part = r"\[[01](?:,[01])*\](?:\*\d+)?"
    found = (
        re.findall(r"\[([01](?:,[01])*)\](?:\*(\d+))?", plain) if re.fullmatch(rf"{part}(?:\+{part})*", plain) else []
    )
    flags = "".join(digits.replace(",", "") * min(int(many or 1), layers + 1) for digits, many in found)
    if len(flags) != layers:
        raise reading.error(name, f"{text!r} is not read as {layers} layers; write such as [0]*3+[1]*58")
    return flags


def _scores(reading: Reading) -> dict[str, Any]:
    """Windows of attention, and scores of heads beside those of tokens."""
    sinks = {"sinks": True} if reading.choice("softmax-type", _SOFTMAX, "vanilla") == "learnable" else {}
    size, every = reading.word("window-size"), _global_every(reading)
    if size is None or every == 1:
        return sinks
    found = re.fullmatch(r"\(?(\d+), ?0\)?", size)
    if found is None:
        raise reading.error("window-size", f"{size!r} is no window of tokens before each alone, such as 127,0")
    return sinks | {"window": int(found[1]) + 1} | ({"global_every": every} if every else {})


def _global_every(reading: Reading) -> int | None:
    """Every so-manieth layer has no window; None: all have one."""
    text = reading.word("window-attn-skip-freq")
    if text is None or text.isdecimal():
        return int(text or 0) or None
    flags = _listed(reading, "window-attn-skip-freq", text)
    every = flags.find("0") + 1
    if flags != skipping(every, len(flags)):
        raise reading.error("window-attn-skip-freq", f"{text!r} is not every so-manieth layer; write it as model.stack")
    return every or None


def skipping(every: int, layers: int) -> str:
    """A 1 for each layer that has a window, where every so-manieth has none; every: 0: all have one.

    >>> skipping(3, 7), skipping(0, 4)
    ('1101101', '1111')
    """
    return "".join(str(int(not every or at % every != 0)) for at in range(1, layers + 1))


def _latent(reading: Reading) -> dict[str, int | None] | None:
    if not reading.has("multi-latent-attention"):
        return None
    return {
        "query_rank": reading.number("q-lora-rank", 0),
        "kv_rank": reading.number("kv-lora-rank", 32),
        "nope": reading.number("qk-head-dim", 128),
        "rope": reading.number("qk-pos-emb-head-dim", 64),
        "value_dim": reading.number("v-head-dim", 128),
    }
