"""Which Megatron-LM arguments does a YAML file of EleutherAI's gpt-neox define?"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.files import read_first_text
from clustersim.interop.yaml_arguments import YamlArguments, YamlFile, yaml_mapping

_MAX_FILE: Final = 1_000_000

_NEOX_NAMES: Final = {
    "model_parallel_size": "tensor-model-parallel-size",
    "pipe_parallel_size": "pipeline-model-parallel-size",
    "intermediate_size": "ffn-hidden-size",
    "num_kv_heads": "num-query-groups",
    "rotary_pct": "rotary-percent",
    "use_qk_layernorm": "qk-layernorm",
    "batch_size": "micro-batch-size",
    "no_weight_tying": "untie-embeddings-and-output-weights",
    "train_micro_batch_size_per_gpu": "micro-batch-size",
    "train_batch_size": "global-batch-size",
    "gradient_clipping": "clip-grad",
    "gradient_accumulation_steps": "gas",
    **{
        name: name.replace("_", "-")
        for name in (
            "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
            "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by", "checkpoint_activations",
            "padded_vocab_size", "sequence_parallel",
        )
    },
}  # fmt: skip
_NEOX_POSITIONS: Final = {"rotary": "rope", "learned": "learned_absolute", "alibi": "alibi"}
_NEOX_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NEOX_GATED: Final = ("swiglu", "geglu", "reglu", "bilinear")
_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "moe_num_experts": ((None, False, 0, 1), "its experts are not read"),
    "sequence_parallel_degree": ((None, False, 0, 1), "it is not read"),
    "train_impl": ((None, "normal"), "nothing but pretraining and finetuning is read"),
    "num_unique_layers": ((None,), "layers that share parameters are not modelled"),
    "soft_prompt_tuning": ((None,), "training of a prompt alone is not modelled"),
    "checkpoint_in_cpu": ((None, False), "leave it out, and write it as training.offload in the scenario"),
    "contiguous_checkpointing": ((None, False), "it is not modelled"),
    "use_bnb_optimizer": ((None, False), "leave it out, and write training.optimizer: adam8bit in the scenario"),
    **dict.fromkeys(
        ("te_columnparallel", "te_rowparallel", "te_layernorm_mlp", "te_mha", "te_fp8_mha"),
        ((None, False), "Transformer Engine's layers and formats are not read"),
    ),
}
"""Keys that define another step, with the values that do not, and why others are refused."""
_OPTIMIZERS: Final = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "lion": "lion"}
_GPT2: Final = "GPT2BPETokenizer"
_FULL_ATTENTION: Final = ("global", "flash")
_OTHER_FILES: Final = "CONFIG"
"""Defines another file, whose keys are added."""


def is_neox(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration with a model."""
    names = set(map(_argument_name, content))
    return "num_layers" in names and bool({"pipe_parallel_size", "model_parallel_size", "pos_emb"} & names)


def _argument_name(key: object) -> str:
    """The name of a key, which YAML may have read as another value than a text, `no:` as false."""
    return str(key).replace("-", "_")


def read_neox(file: YamlFile) -> YamlArguments:
    """The arguments of a configuration."""
    values = _joined(file)
    _require_a_decoder_s_step(file, values)
    zeroed = {name: 1 for name in ("model_parallel_size", "pipe_parallel_size") if values.get(name) == 0}
    values |= zeroed
    shell_words = list(file.flags({_NEOX_NAMES[name]: value for name, value in values.items() if name in _NEOX_NAMES}))
    shell_words += _neox_model_words(file, values)
    shell_words += ["--fp16"] if _is_enabled(values.get("fp16")) else []
    is_bf16 = (
        values.get("precision") == "bfloat16" or _is_enabled(values.get("bf16")) or _is_enabled(values.get("bfloat16"))
    )
    shell_words += ["--bf16"] if is_bf16 else []
    shell_words += ["--deepspeed", "--zero-stage", _zero_stage(file, values)]
    gpus = values.get("global_num_gpus")
    block = (
        {"block": "parallel" if values.get("gpt_j_tied") else "parallel_norms"} if values.get("gpt_j_residual") else {}
    )
    return YamlArguments(tuple(shell_words), None if gpus is None else str(gpus), file.unknowns, block)


def _joined(file: YamlFile) -> dict[str, Any]:
    """The keys of the file and of another that the user names: gpt-neox reads all files of its command line as one."""
    values = {_argument_name(name): value for name, value in file.content.items()}
    other = file.context.definitions.get(_OTHER_FILES)
    if other is None:
        if not {"train_micro_batch_size_per_gpu", "train_batch_size"} & {*values}:
            raise file.error(
                "train_micro_batch_size_per_gpu",
                "is missing; it is in another file of the command line, so give --define CONFIG=FILE",
            )
        return values
    text = read_first_text((Path(other), (file.context.directory or Path()) / other), _MAX_FILE)
    if text is None:
        raise InputError(f"{file.source}: --define {_OTHER_FILES}={other}: is not here, nor next to it")
    for name, value in yaml_mapping(text, other).items():
        if values.setdefault(_argument_name(name), value) != value:
            raise file.error(name, f"has another value in {other}; gpt-neox takes a key once")
    return values


def _require_a_decoder_s_step(file: YamlFile, values: Mapping[str, Any]) -> None:
    """Raise InputError where keys define another model or step."""
    for name, (neutral_values, reason) in _REFUSED.items():
        if values.get(name) not in neutral_values:
            raise file.error(name, f"{values[name]!r}: {reason}")
    for run in values.get("attention_config") or ():
        kinds = run[0] if isinstance(run, list) and run and isinstance(run[0], list) else [run]
        other = next((kind for kind in kinds if kind not in _FULL_ATTENTION), None)
        if other is not None:
            raise file.error("attention_config", f"{other!r} is not read; {' and '.join(_FULL_ATTENTION)} are")


def _zero_stage(file: YamlFile, values: Mapping[str, Any]) -> str:
    zero = values.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise file.error("zero_optimization", "is no mapping")
    for name in ("cpu_offload", "offload_optimizer", "offload_param"):
        section = zero.get(name)
        is_used = section.get("device", "none") != "none" if isinstance(section, Mapping) else bool(section)
        if is_used:
            raise file.error(
                f"zero_optimization.{name}", "leave it out, and write it as training.offload in the scenario"
            )
    return str(zero.get("stage", 0))


def _neox_model_words(file: YamlFile, values: Mapping[str, Any]) -> Iterator[str]:
    yield "--position-embedding-type"
    yield file.choice("pos_emb", values.get("pos_emb", "learned"), _NEOX_POSITIONS)
    yield "--normalization"
    yield file.choice("norm", values.get("norm", "layernorm"), _NEOX_NORMS)
    if values.get("activation") in _NEOX_GATED:
        yield "--swiglu"
        yield from ("--ffn-hidden-size", str(_gated_width(file, values)))
    elif "intermediate_size" not in values and isinstance(values.get("expansion_factor"), int | float):
        yield from ("--ffn-hidden-size", str(int(values["expansion_factor"] * _hidden(file, values))))
    tokenizer = str(values.get("tokenizer_type", _GPT2))
    is_sized = "padded_vocab_size" in values or "model.vocab" in file.context.overridden
    if tokenizer != _GPT2 and not values.get("vocab_file") and not is_sized:
        raise file.error(
            "vocab_file",
            f"is missing, so {tokenizer}'s entries are not known; give --define {_OTHER_FILES}=FILE for the file that "
            "has it, or --set model.vocab=50432",
        )
    yield from ("--tokenizer-type", tokenizer)
    if values.get("vocab_file"):
        yield from ("--tokenizer-model", str(values["vocab_file"]))
    if values.get("num_kv_heads") is not None:
        yield "--group-query-attention"
    if values.get("sliding_window_width") is not None:
        yield from ("--window-size", f"{values['sliding_window_width']},0")
    for name in ("hidden_dropout", "attention_dropout"):
        if name not in values:
            yield from (f"--{name.replace('_', '-')}", "0.0")
    optimizer = values.get("optimizer") or {}
    kind = str(optimizer.get("type", "adam") if isinstance(optimizer, Mapping) else optimizer).lower()
    yield from ("--optimizer", file.choice("optimizer.type", kind, _OPTIMIZERS))
    if values.get("use_bias_in_attn_linear") is False:
        yield "--disable-bias-linear"


def _gated_width(file: YamlFile, values: Mapping[str, Any]) -> int:
    """The width of each of a gated MLP's two inputs: a third of the stated one, rounded up."""
    hidden, multiple = _hidden(file, values), values.get("mlp_multiple_of") or 1
    factor = values.get("expansion_factor") or 4
    stated = values.get("intermediate_size") or (int(factor * hidden) if isinstance(factor, int | float) else None)
    if not isinstance(stated, int) or not isinstance(multiple, int) or multiple < 1:
        raise file.error("intermediate_size", "is no whole number")
    width = int(stated * 2 / 3) // 2
    return -(-width // multiple) * multiple


def _hidden(file: YamlFile, values: Mapping[str, Any]) -> int:
    hidden = values.get("hidden_size")
    if not isinstance(hidden, int):
        raise file.error("hidden_size", "is no whole number")
    return hidden


def _is_enabled(section: object) -> bool:
    return bool(section.get("enabled", section.get("fp16"))) if isinstance(section, Mapping) else section is True
