"""Configurations of EleutherAI's gpt-neox: jobs of several files, and what is no dense pretraining."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext
from clustersim.interop.registry import IMPORTERS
from tests.sentences import parts

MODEL = """
pipe_parallel_size: 0
model_parallel_size: 2
num_layers: 4
hidden_size: 1024
num_attention_heads: 8
seq_length: 128
max_position_embeddings: 128
"""
STEP = """
train_micro_batch_size_per_gpu: 4
zero_optimization: {stage: 1}
fp16: {enabled: true}
"""


def mapping(text: str, folder: Path | None = None, overridden: tuple[str, ...] = (), **definitions: str) -> Any:
    context = ImportContext(folder, definitions, overridden)
    return IMPORTERS["gpt-neox"](text, "a.yml", "dgx-h100", 8, context).mapping


def test_files_of_one_command_line_are_one_job(tmp_path: Path) -> None:
    """gpt-neox is started with several files; the model's alone does not say the step."""
    (tmp_path / "setup.yml").write_text(STEP)
    assert mapping(MODEL, tmp_path, CONFIG="setup.yml") == mapping(MODEL + STEP)
    with pytest.raises(InputError, match=parts("give --define CONFIG=FILE")):
        mapping(MODEL, tmp_path)
    with pytest.raises(InputError, match=r"other\.yml: is not here"):
        mapping(MODEL, tmp_path, CONFIG="other.yml")
    (tmp_path / "wide.yml").write_text("hidden_size: 2048\n")
    with pytest.raises(InputError, match="gpt-neox takes a key once"):
        mapping(MODEL + STEP, tmp_path, CONFIG="wide.yml")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("attention_config: [[[mamba], 4]]", "attention_config: 'mamba' is not read"),
        ("attention_config: [[[flash, rwkv], 2]]", "attention_config: 'rwkv' is not read"),
        ("train_impl: dpo", "train_impl: 'dpo': nothing but pretraining"),
        ("te_mha: true", "Transformer Engine"),
        ("moe_num_experts: 8", "its experts are not read"),
        ("num_unique_layers: 2", "share parameters"),
        ("optimizer: {type: sm3}", "optimizer.type: 'sm3' is not read"),
        ("tokenizer_type: HFTokenizer", "vocab_file: is missing ... HFTokenizer"),
    ],
)
def test_what_is_no_dense_pretraining_is_refused(keys: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        mapping(f"{MODEL}{STEP}{keys}\n")


def test_offloaded_states_are_refused() -> None:
    text = f"{MODEL}{STEP}".replace("{stage: 1}", "{stage: 1, cpu_offload: true}")
    with pytest.raises(InputError, match=r"zero_optimization\.cpu_offload: leave it out"):
        mapping(text)


@pytest.mark.parametrize(
    ("keys", "section", "expected"),
    [
        ("", "model", {"dropout": False, "ffn": 4096, "qk_norm": False}),
        ("hidden_dropout: 0.1", "model", {"dropout": True}),
        ("expansion_factor: 3.5", "model", {"ffn": 3584}),
        ("intermediate_size: 2048", "model", {"ffn": 2048}),
        ("use_qk_layernorm: true", "model", {"qk_norm": True}),
        ("sliding_window_width: 64", "model", {"window": 65}),
        ("attention_config: [[[flash], 4]]", "model", {"positions": "learned"}),
        ("sequence_parallel: true", "layout", {"sequence_parallel": True}),
        ("optimizer: {type: Lion}", "training", {"optimizer": "lion"}),
    ],
)
def test_keys_and_their_defaults(keys: str, section: str, expected: Mapping[str, Any]) -> None:
    """Defaults are gpt-neox's: no dropout, and a width of four times the hidden size."""
    read = mapping(f"{MODEL}{STEP}{keys}\n")[section]
    assert {key: read[key] for key in expected} == expected


def test_a_vocabulary_that_the_user_sets_needs_no_tokenizer() -> None:
    text = f"{MODEL}{STEP}tokenizer_type: HFTokenizer\n"
    assert mapping(text, overridden=("model.vocab",))["model"]["layers"] == 4
