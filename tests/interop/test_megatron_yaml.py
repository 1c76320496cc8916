"""YAML files of programs on Megatron-LM are read as the command line that sets the same."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.detect import detect_program
from clustersim.interop.import_result import ImportContext
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.registry import IMPORTERS
from clustersim.interop.yaml_arguments import yaml_mapping
from clustersim.model.transformer import parameter_count
from clustersim.scenario import Scenario

LINE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 "
LINE += "--global-batch-size 64 --bf16 --swiglu --ffn-hidden-size 1536 --normalization RMSNorm --disable-bias-linear "
LINE += "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0.0 "
LINE += "--attention-dropout 0.0 --tensor-model-parallel-size 2 --vocab-size 32000 "
MODEL_ARGS = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 256
  --micro-batch-size: 2
  --global-batch-size: ${GBS}
  --bf16: true
  --swiglu: true
  --ffn-hidden-size: 1536
  --normalization: RMSNorm
  --disable-bias-linear: true
  --position-embedding-type: rope
  --untie-embeddings-and-output-weights: true
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --tensor-model-parallel-size: ${TP:-2}
  --vocab-size: 32000
  --qk-layernorm: false
  --data-path: ${DATA}
"""
PRIMUS = """
work_group: amd
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: small.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 64
      seq_length: 256
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      use_distributed_optimizer: false
      train_iters: 50
"""
PRIMUS_MODEL = """
extends: [base.yaml]
num_layers: 8
hidden_size: 512
num_attention_heads: 8
ffn_hidden_size: 1536
"""
PRIMUS_BASE = """
num_layers: 2
swiglu: true
normalization: RMSNorm
add_bias_linear: false
position_embedding_type: rope
untie_embeddings_and_output_weights: true
hidden_dropout: 0.0
attention_dropout: 0.0
vocab_size: 32000
"""
NEMO = """
trainer: {devices: 8, num_nodes: 1, precision: bf16, gradient_clip_val: 1.0}
model:
  micro_batch_size: 2
  global_batch_size: 64
  tensor_model_parallel_size: 2
  encoder_seq_length: 256
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 8
  hidden_size: 512
  ffn_hidden_size: ${multiply:3, ${.hidden_size}}
  num_attention_heads: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: RMSNorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  vocab_size: 32000
  optim: {name: fused_adam}
"""
NEOX_20B = """
{
  "pipe-parallel-size": 4, "model-parallel-size": 2,
  "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "seq_length": 2048, "max_position_embeddings": 2048,
  "norm": "layernorm", "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": true, "gpt_j_residual": true,
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32, "hidden_dropout": 0, "attention_dropout": 0,
  "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}, "checkpoint_activations": true,
  "tokenizer_type": "HFTokenizer", "vocab_file": "20B_tokenizer.json", "global_num_gpus": 96,
}
"""


def read(text: str, source: str, folder: Path | None = None, **definitions: str) -> Mapping[str, Any]:
    program = detect_program(text, source)
    return IMPORTERS[program](text, source, "dgx-h100", 8, ImportContext(folder, definitions)).mapping


def sections(mapping: Mapping[str, Any]) -> tuple[object, ...]:
    scenario = Scenario.from_mapping({**mapping, "model": {**mapping["model"], "name": "same"}})
    return scenario.model, scenario.layout, scenario.training


def test_all_kinds_are_the_same_command_line(tmp_path: Path) -> None:
    models = tmp_path / "primus" / "configs" / "models" / "megatron"
    models.mkdir(parents=True)
    (models / "small.yaml").write_text(PRIMUS_MODEL)
    (models / "base.yaml").write_text(PRIMUS_BASE)
    folder = tmp_path / "examples" / "megatron"
    folder.mkdir(parents=True)
    expected = sections(import_megatron(LINE, "run", gpu_count=8).mapping)
    assert sections(read(MODEL_ARGS, "model_config.yaml", GBS="64")) == expected
    assert sections(read(PRIMUS, "pretrain.yaml", folder)) == expected
    assert sections(read(NEMO, "gpt.yaml")) == expected


@pytest.mark.parametrize(
    ("tokenizer", "entries"),
    [
        ("{library: megatron, type: GPT2BPETokenizer, model: null}", 50_257),
        ("{library: huggingface, type: Qwen/Qwen1.5-7B}", 151_646),
        ("{library: sentencepiece, type: null, model: '${data_dir}/llama/llama_tokenizer.model'}", 32_000),
    ],
)
def test_nemo_s_tokenizer_says_how_many_entries_there_are(tokenizer: str, entries: int) -> None:
    """Rounded up to the next multiple of 128 x tp 2."""
    text = NEMO.replace("vocab_size: 32000", f"tokenizer: {tokenizer}")
    assert read(text, "gpt.yaml")["model"]["vocab"] == -(-entries // 256) * 256


def test_nemo_s_keys_without_a_flag_are_listed_or_read() -> None:
    keys = "  qkv_bias: true\n  window_size: [64, 0]\n  virtual_pipeline_model_parallel_size: 2\n  a_key: 3\n"
    text = f"{NEMO}  pipeline_model_parallel_size: 2\n  sharp: false\n{keys}"
    result = IMPORTERS["nemo"](text, "gpt.yaml", "dgx-h100", 8, ImportContext())
    assert (result.mapping["model"]["qkv_bias"], result.mapping["layout"]["overlap_p2p_comm"]) == (True, False)
    assert result.mapping["model"]["window"] == 65
    assert result.ignored_arguments == ("--a-key",)


def test_gpt_neox_20b_has_its_parameters() -> None:
    """20,554,567,680 (EleutherAI/gpt-neox-20b), 50,432 entries of padded vocabulary included."""
    result = IMPORTERS["gpt-neox"](NEOX_20B, "20B.yml", "dgx-h100", None, ImportContext())
    scenario = Scenario.from_mapping(result.mapping)
    assert parameter_count(scenario.model) == 20_554_567_680
    layout = scenario.layout
    assert (layout.tp, layout.pp, layout.dp, layout.data.zero_stage) == (2, 4, 12, 1)
    assert scenario.training.global_batch == 12 * 4 * 32


@pytest.mark.parametrize(
    ("activation", "intermediate", "width"), [("swiglu", 32768, 11008), ("swiglu", None, 5632), ("gelu", 8192, 8192)]
)
def test_gated_widths_of_gpt_neox(activation: str, intermediate: int | None, width: int) -> None:
    """Llama 2 7B is 32,768 in its configuration and 11,008 in its model; 4 x 4,096 x 2 / 3 / 2 is 5,461, up to 256s."""
    stated = "" if intermediate is None else f"intermediate_size: {intermediate}\n"
    text = f"num_layers: 4\nhidden_size: 4096\nnum_attention_heads: 32\nseq_length: 128\nmlp_multiple_of: 256\n{stated}"
    text += f"activation: {activation}\npos_emb: rotary\nmodel_parallel_size: 1\ntrain_micro_batch_size_per_gpu: 1\n"
    assert read(text, "a.yml")["model"]["ffn"] == width


@pytest.mark.parametrize(
    ("text", "source", "program"),
    [
        ("torchrun pretrain_gpt.py", "a.sh", "megatron"),
        (LINE, "args.txt", "megatron"),
        (MODEL_ARGS, "a.yaml", "megatron"),
        (PRIMUS, "a.yaml", "primus"),
        (NEMO, "a.yaml", "nemo"),
        (NEOX_20B, "a.yml", "gpt-neox"),
        ('[model]\nname = "llama3"\nflavor = "8B"\n', "a.toml", "torchtitan"),
        ("x\n------------------------ arguments ------------------------\n", "log.txt", "megatron"),
    ],
)
def test_a_file_s_program_is_found(text: str, source: str, program: str) -> None:
    assert detect_program(text, source) == program


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        (
            '{"zero_optimization": {"stage": 3}}',
            "ds.json",
            "is DeepSpeed's JSON, which has no model of its own; give the file",
        ),
        ("per_device_train_batch_size: 4\n", "a.yaml", "Hugging Face's TrainingArguments"),
        ("distributed_type: FSDP\nfsdp_config: {}\n", "a.yaml", "accelerate's configuration"),
        ('{"model_type": "llama"}', "config.json", "is a model's configuration, which has no training"),
        ("import torch\n", "train.py", "is Python, of which torchtitan's files of jobs alone are read"),
        ("a: 1\n", "a.yaml", "its keys are those of no program that is read: a"),
        ("a: [1\n", "a.yaml", "is not valid YAML"),
        ("a\0b", "a.sh", "holds a NUL"),
    ],
)
def test_other_files_are_told_apart(text: str, source: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        detect_program(text, source)
    assert str(refused.value).startswith(f"{source}: ")


@pytest.mark.parametrize(
    ("text", "program", "message"),
    [
        (MODEL_ARGS, "megatron", "--global-batch-size: its value is not in the script: $GBS"),
        (
            MODEL_ARGS.replace("MODEL_ARGS:", "MODEL_ARGS:\n  --bert-no-binary-head: true"),
            "megatron",
            "encoders are not",
        ),
        (NEMO, "gpt-neox", "is no file of gpt-neox; it is nemo's"),
        (NEMO.replace("RMSNorm", "rmsnrm"), "nemo", "did you mean rmsnorm?"),
        (NEMO.replace("num_layers:", "layers:"), "nemo", "model.num_layers: is missing: it restores a model"),
        (f"{NEMO}  peft: {{peft_scheme: lora}}\n", "nemo", "model.peft: adapters are not read"),
        (f"{NEMO}  hybrid_override_pattern: M*\n", "nemo", "model.hybrid_override_pattern: its layers are not read"),
        (f"{NEMO}  mm_cfg: {{}}\n", "nemo", "model.mm_cfg: encoders of images are not read"),
        (NEMO.replace("precision: bf16", "precision: 64"), "nemo", "trainer.precision: '64' is not read"),
        (NEOX_20B.replace('"rotary"', '"rpe"'), "gpt-neox", "pos_emb: 'rpe' is not read"),
        (NEOX_20B.replace('"num_layers": 44', '"num_layers": "x"'), "gpt-neox", "--num-layers: 'x' is not a whole"),
    ],
)
def test_what_is_not_read_is_refused(text: str, program: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        IMPORTERS[program](text, "run.yaml", "dgx-h100", 8, ImportContext(tmp_path))


def test_bert_s_vocabulary_is_no_gpt_2_s() -> None:
    """BERT's vocabulary is one file, without merges."""
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    bert = f"{base}--micro-batch-size 1 --vocab-file vocab.txt"
    with pytest.raises(InputError, match="vocabulary's size"):
        IMPORTERS["megatron"](bert, "x", "dgx-h100", 8, ImportContext())
    gpt = IMPORTERS["megatron"](f"{bert} --merge-file merges.txt", "x", "dgx-h100", 8, ImportContext())
    assert gpt.mapping["model"]["vocab"] == 50304


def test_a_list_without_quotes_is_several_words() -> None:
    text = MODEL_ARGS.replace("${GBS}", "64")
    text += "  --recompute-granularity: selective\n  --recompute-modules: '[mlp, core_attn]'\n"
    read = IMPORTERS["megatron"](text, "x", "dgx-h100", 8, ImportContext()).mapping
    assert sorted(read["training"]["recompute"]["modules"]) == ["core_attn", "mlp"]


def test_keys_are_texts_at_every_level() -> None:
    """Numbers and switches may be keys of YAML; what an alias repeats is converted, too."""
    content = yaml_mapping("1: &shared {on: [{2: a}]}\nother: *shared", "a.yaml")
    assert content == {"1": {"True": [{"2": "a"}]}, "other": {"True": [{"2": "a"}]}}


def test_aliases_that_multiply_are_refused_before_their_keys_are_converted() -> None:
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
    with pytest.raises(InputError, match="aliases stand for more than"):
        yaml_mapping("\n".join(["a0: &a0 [1, 2]", *levels]), "a.yaml")
