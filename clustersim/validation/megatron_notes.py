"""Which dimensions do a row's notes state, in the words of Megatron-LM's command line?

Rows of its functional tests say what their columns leave empty as `num-layers 32; hidden-size 4096`. What they do not
say is that program's default (megatron/training/arguments.py): an MLP four times as wide as the model, as many heads of
keys as of queries, tied embeddings; the tests' vocabulary is GPT-2's, and every vocabulary is padded to a multiple of
128 for each tensor-parallel rank.
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
_REQUIRED_ARGUMENTS: Final = ("num-layers", "hidden-size", "num-attention-heads")  # without which nothing is said
_SHARED_EXPERT_ARGUMENT: Final = "moe-shared-expert-intermediate-size"
_GPT2_VOCAB: Final = "50257"
_VOCAB_MULTIPLE: Final = 128  # of the vocabulary, of which each tensor-parallel rank has a multiple


def stated_dimensions(notes: str, tp: str) -> Mapping[str, str]:
    """Cells by column; none if the notes do not say what the model is. tp: the row's cell, of which no number is 1."""
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
    """How many experts are as wide as the shared ones together."""
    width = arguments.get(_SHARED_EXPERT_ARGUMENT)
    expert_width = int(cells.get("moe_ffn_hidden", cells.get("ffn_hidden", 4 * int(cells["hidden"]))))
    return {} if width is None else {"shared_experts": f"{int(width) / expert_width:g}"}
