"""Which dimensions do a row's notes state as Megatron-LM arguments?

Rows of its functional tests state dimensions in the notes, such as `num-layers 32; hidden-size 4096`, and
leave the columns empty. Missing arguments have that program's defaults (megatron/training/arguments.py):
FFN size 4 x hidden, as many KV heads as query heads, tied embeddings. The tests' vocabulary is GPT-2's, and
every vocabulary is padded to a multiple of 128 x tp.
"""

from collections.abc import Mapping
from typing import Final

_COLUMN_BY_ARGUMENT: Final = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn_hidden",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "kv-channels": "head_dim",
    "num-experts": "experts",
    "moe-router-topk": "top_k",
    "moe-ffn-hidden-size": "moe_ffn_hidden",
    "vocab-size": "vocab",
}
_REQUIRED_ARGUMENTS: Final = ("num-layers", "hidden-size", "num-attention-heads")  # required, else nothing is parsed
_SHARED_EXPERT_ARGUMENT: Final = "moe-shared-expert-intermediate-size"
_GPT2_VOCAB: Final = "50257"
_VOCAB_MULTIPLE: Final = 128  # each tensor-parallel rank's part of the vocabulary is a multiple of this


def stated_dimensions(notes: str, tp: str) -> Mapping[str, str]:
    """Cells by column; empty if the notes do not define the model. tp: the row's cell, 1 if it is not a number."""
    tokens = [argument.split() for argument in notes.split(";")]
    arguments = {pair[0]: pair[1] for pair in tokens if len(pair) == 2 and pair[1].isdecimal()}
    if not all(name in arguments for name in _REQUIRED_ARGUMENTS):
        return {}
    cells = {column: arguments[name] for name, column in _COLUMN_BY_ARGUMENT.items() if name in arguments}
    multiple = _VOCAB_MULTIPLE * (int(tp) if tp.isdecimal() else 1)
    vocab = -(-int(cells.get("vocab", _GPT2_VOCAB)) // multiple) * multiple
    defaults = {"family": "gpt", "mlp": "gelu", "ffn_hidden": str(4 * int(cells["hidden"])), "tied_embeddings": "yes"}
    return {**defaults, **cells, **_shared_experts(arguments, cells), "vocab": str(vocab)}


def _shared_experts(arguments: Mapping[str, str], cells: Mapping[str, str]) -> Mapping[str, str]:
    """Total width of the shared experts as a multiple of a routed expert's."""
    width = arguments.get(_SHARED_EXPERT_ARGUMENT)
    expert_width = int(cells.get("moe_ffn_hidden", cells.get("ffn_hidden", 4 * int(cells["hidden"]))))
    return {} if width is None else {"shared_experts": f"{int(width) / expert_width:g}"}
