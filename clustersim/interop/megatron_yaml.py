"""Which arguments do YAML files of programs on Megatron-LM define?

Each kind of file becomes the command line that sets the same: `MODEL_ARGS` of Megatron-LM's own tests, Primus'
experiments, gpt-neox's and NeMo's configurations. Keys that none of them reads are listed; keys that define another
step are refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import parse_yaml, read_text
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.import_result import ImportContext
from clustersim.interop.megatron_table import value_words
from clustersim.interop.shell.unknowns import Unknowns

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-?([^{}]*))?\}")
_MAX_EXTENDS: Final = 8
_MAX_PARENTS: Final = 6
_MAX_DIGITS: Final = 12
_LIST: Final = re.compile(r"\[\s*[\w.-]+(?:\s*,\s*[\w.-]+)*\s*\]")
"""A list without quotes, as a text."""


@dataclass(frozen=True, slots=True)
class YamlArguments:
    """The arguments of a file.

    words: as of a command line; processes: as `Launch`; model_keys: keys of the `model` section that no flag says.
    """

    shell_words: tuple[str, ...]
    processes: str | None
    unknowns: Unknowns
    model_keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _YamlFile:
    """A file's content, its name, and what surrounds it."""

    content: Mapping[str, Any]
    source: str
    context: ImportContext
    unknowns: Unknowns

    def error(self, key: str, message: str) -> InputError:
        return InputError(f"{self.source}: {key}: {message}")

    def expanded(self, value: object) -> object:
        """A text with its `${NAME}` and `${NAME:default}` replaced; what nothing defines is a hole."""
        if not isinstance(value, str):
            return value

        def defined(match: re.Match[str]) -> str:
            given = self.context.definitions.get(match[1], match[2])
            return given if given is not None else self.unknowns.unknown(f"${match[1]}", 0, (match[1],), is_unset=True)

        return _VARIABLE.sub(defined, value)


def yaml_kind(content: object) -> str | None:
    """The kind of a YAML file's content; None: none that is read here."""
    if not isinstance(content, Mapping):
        return None
    return next((name for name, (is_kind, _read) in _KINDS.items() if is_kind(content)), None)


def read_yaml_arguments(text: str, source: str, context: ImportContext, kind: str) -> YamlArguments:
    """The arguments of a file of a kind; raises InputError for another one."""
    content = _mapping(text, source)
    is_kind, read = _KINDS[kind]
    if not is_kind(content):
        other = yaml_kind(content)
        hint = f"; it is {other}'s" if other else ""
        raise InputError(f"{source}: is no file of {kind}{hint}")
    return read(_YamlFile(content, source, context, Unknowns()))


def _mapping(text: str, source: str) -> Mapping[str, Any]:
    try:
        content = parse_yaml(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{source}: is no mapping of keys to values")
    return content


def _flags(file: _YamlFile, values: Mapping[str, object]) -> Iterator[str]:
    """The flags that set arguments which have their names in Python."""
    for name, value in values.items():
        text = str(file.expanded(value))
        if value is None or text in ("False", "false", "None", "null", "[]", ""):
            continue
        yield f"--{name.lstrip('-').replace('_', '-')}"
        if text not in ("True", "true"):
            is_list = _LIST.fullmatch(text) and not re.search(r"\d", text)
            yield from re.findall(r"[\w.-]+", text) if is_list else value_words(text, name)


# MODEL_ARGS


def _is_model_args(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("MODEL_ARGS"), Mapping)


def _read_model_args(file: _YamlFile) -> YamlArguments:
    return YamlArguments(tuple(_flags(file, file.content["MODEL_ARGS"])), None, file.unknowns)


# Primus


def _is_primus(content: Mapping[str, Any]) -> bool:
    modules = content.get("modules")
    return isinstance(modules, Mapping) and isinstance(modules.get("pre_trainer"), Mapping)


def _read_primus(file: _YamlFile) -> YamlArguments:
    trainer = file.content["modules"]["pre_trainer"]
    framework = trainer.get("framework", "megatron")
    if framework != "megatron":
        raise file.error("modules.pre_trainer.framework", f"{framework!r} is not read; megatron and torchtitan are")
    if trainer.get("trainer_class"):
        raise file.error("modules.pre_trainer.trainer_class", f"{trainer['trainer_class']}: its step is not known")
    values: dict[str, Any] = {**_primus_base(file, trainer, "megatron"), **_primus_overrides(file, trainer)}
    if values.pop("add_bias_linear", True) is False:
        values["disable_bias_linear"] = True
    return YamlArguments(tuple(_flags(file, values)), None, file.unknowns)


def primus_job(text: str, source: str, context: ImportContext) -> Mapping[str, Any] | None:
    """The sections of torchtitan's job that a file of Primus has; None: it is of another framework."""
    content = _mapping(text, source)
    file = _YamlFile(content, source, context, Unknowns())
    trainer = content["modules"]["pre_trainer"] if _is_primus(content) else {}
    if trainer.get("framework") != "torchtitan":
        return None
    sections = {
        name: value for name, value in _primus_base(file, trainer, "torchtitan").items() if isinstance(value, Mapping)
    }
    for name, value in _primus_overrides(file, trainer).items():
        if isinstance(value, Mapping):
            sections[name] = {**sections.get(name, {}), **value}
    return {
        name: {key: _number(file.expanded(value)) for key, value in section.items() if value is not None}
        for name, section in sections.items()
    }


def _number(value: Any) -> Any:
    """A value of a file, a text of digits as a number: so are variables that a shell sets."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < _MAX_DIGITS else value


def _primus_base(file: _YamlFile, trainer: Mapping[str, Any], framework: str) -> dict[str, Any]:
    model = trainer.get("model")
    return {} if model is None else _primus_model(file, str(file.expanded(model)), framework)


def _primus_overrides(file: _YamlFile, trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise file.error("modules.pre_trainer.overrides", "is no mapping of arguments to values")
    return overrides


def _primus_model(file: _YamlFile, name: str, framework: str) -> dict[str, Any]:
    """The model's arguments, in a file of Primus' checkout above this one."""
    directory = file.context.directory
    parents = [] if directory is None else [directory.resolve(), *directory.resolve().parents][:_MAX_PARENTS]
    folders = (f"primus/configs/models/{framework}", f"models/{framework}", "")
    path = next((one for parent in parents for folder in folders if (one := parent / folder / name).is_file()), None)
    if path is None:
        raise file.error(
            "modules.pre_trainer.model",
            f"{name} is not here; give the file inside Primus' checkout, or write the model's arguments as overrides",
        )
    return _extended(path, _MAX_EXTENDS)


def _extended(path: Path, depth: int) -> dict[str, Any]:
    """A model file's values over those of the files that it extends."""
    if not depth:
        raise InputError(f"{path}: extends files more than {_MAX_EXTENDS} deep")
    content = dict(_mapping(read_text(path), str(path)))
    values: dict[str, Any] = {}
    for base in content.pop("extends", content.pop("bases", None)) or ():
        values |= _extended(path.parent / str(base), depth - 1)
    return {**values, **content}


# gpt-neox

_NEOX_NAMES: Final = {
    "model_parallel_size": "tensor-model-parallel-size",
    "pipe_parallel_size": "pipeline-model-parallel-size",
    "intermediate_size": "ffn-hidden-size",
    "num_kv_heads": "num-query-groups",
    "rotary_pct": "rotary-percent",
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
            "padded_vocab_size",
        )
    },
}  # fmt: skip
_NEOX_POSITIONS: Final = {"rotary": "rope", "learned": "learned_absolute", "alibi": "alibi"}
_NEOX_NORMS: Final = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NEOX_GATED: Final = ("swiglu", "geglu", "reglu", "bilinear")
_NEOX_REFUSED: Final = {
    "gmlp_attn_dim": "gMLP is not modelled",
    "moe_num_experts": "its experts are not read",
    "sequence_parallel_degree": "it is not read",
}


def _is_neox(content: Mapping[str, Any]) -> bool:
    names = {str(name).replace("-", "_") for name in content}
    return "num_layers" in names and bool({"pipe_parallel_size", "model_parallel_size", "pos_emb"} & names)


def _read_neox(file: _YamlFile) -> YamlArguments:
    values = {str(name).replace("-", "_"): value for name, value in file.content.items()}
    for name, reason in _NEOX_REFUSED.items():
        if values.get(name) not in (None, False, 0, 1):
            raise file.error(name, reason)
    zeroed = {name: 1 for name in ("model_parallel_size", "pipe_parallel_size") if values.get(name) == 0}
    values |= zeroed
    shell_words = list(
        _flags(file, {_NEOX_NAMES[name]: value for name, value in values.items() if name in _NEOX_NAMES})
    )
    shell_words += _neox_model_words(file, values)
    shell_words += ["--fp16"] if _is_enabled(values.get("fp16")) else []
    is_bf16 = (
        values.get("precision") == "bfloat16" or _is_enabled(values.get("bf16")) or _is_enabled(values.get("bfloat16"))
    )
    shell_words += ["--bf16"] if is_bf16 else []
    zero = values.get("zero_optimization") or {}
    shell_words += ["--deepspeed", "--zero-stage", str(zero.get("stage", 0) if isinstance(zero, Mapping) else 0)]
    gpus = values.get("global_num_gpus")
    block = (
        {"block": "parallel" if values.get("gpt_j_tied") else "parallel_norms"} if values.get("gpt_j_residual") else {}
    )
    return YamlArguments(tuple(shell_words), None if gpus is None else str(gpus), file.unknowns, block)


def _neox_model_words(file: _YamlFile, values: Mapping[str, Any]) -> Iterator[str]:
    yield "--position-embedding-type"
    yield _choice(file, "pos_emb", values.get("pos_emb", "learned"), _NEOX_POSITIONS)
    yield "--normalization"
    yield _choice(file, "norm", values.get("norm", "layernorm"), _NEOX_NORMS)
    if values.get("activation") in _NEOX_GATED:
        yield "--swiglu"
        yield from ("--ffn-hidden-size", str(_gated_width(file, values)))
    yield from ("--tokenizer-type", str(values.get("tokenizer_type", "GPT2BPETokenizer")))
    if values.get("vocab_file"):
        yield from ("--tokenizer-model", str(values["vocab_file"]))
    if "num_kv_heads" in values:
        yield "--group-query-attention"
    if values.get("use_bias_in_attn_linear") is False:
        yield "--disable-bias-linear"


def _gated_width(file: _YamlFile, values: Mapping[str, Any]) -> int:
    """The width of each of a gated MLP's two inputs: a third of the stated one, rounded up."""
    hidden, multiple = values.get("hidden_size"), values.get("mlp_multiple_of") or 1
    stated = values.get("intermediate_size") or (4 * hidden if isinstance(hidden, int) else None)
    if not isinstance(stated, int) or not isinstance(multiple, int) or multiple < 1:
        raise file.error("intermediate_size", "is no whole number")
    width = int(stated * 2 / 3) // 2
    return -(-width // multiple) * multiple


def _is_enabled(section: object) -> bool:
    return bool(section.get("enabled", section.get("fp16"))) if isinstance(section, Mapping) else section is True


# NeMo

_NEMO_NAMES: Final = {
    "encoder_seq_length": "seq-length",
    "rotary_percentage": "rotary-percent",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_moe_experts": "num-experts",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "ub_tp_comm_overlap": "tp-comm-overlap",
    "qk_layernorm": "qk-layernorm",
    "moe_router_topk": "moe-router-topk",
    "moe_token_dispatcher_type": "moe-token-dispatcher-type",
    "cpu_offloading": "cpu-offloading",
    **{
        name: name.replace("_", "-")
        for name in (
            "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "context_parallel_size", "expert_model_parallel_size", "max_position_embeddings", "num_layers",
            "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "hidden_dropout",
            "attention_dropout", "kv_channels", "make_vocab_size_divisible_by", "position_embedding_type",
            "sequence_parallel", "moe_grouped_gemm", "moe_ffn_hidden_size", "vocab_size",
        )
    },
}  # fmt: skip
_NEMO_NORMS: Final = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_NEMO_ACTIVATIONS: Final = {
    "gelu": "", "squared-relu": "", "swiglu": "--swiglu", "fast-swiglu": "--swiglu", "geglu": "--quick-geglu",
    "fast-geglu": "--quick-geglu", "reglu": "--swiglu", "fast-reglu": "--swiglu",
}  # fmt: skip
_NEMO_OPTIMIZERS: Final = {
    "distributed_fused_adam": True, "mcore_distributed_optim": True, "fused_adam": False, "adamw": False, "adam": False,
}  # fmt: skip
_REFERENCE: Final = re.compile(r"\$\{(?:model)?\.(\w+)\}")


def _is_nemo(content: Mapping[str, Any]) -> bool:
    model = content.get("model")
    return isinstance(content.get("trainer"), Mapping) and isinstance(model, Mapping) and "micro_batch_size" in model


def _read_nemo(file: _YamlFile) -> YamlArguments:
    model, trainer = dict(file.content["model"]), file.content["trainer"]
    for name, value in model.items():
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        model[name] = model.get(reference[1]) if reference else value
    shell_words = list(_flags(file, {_NEMO_NAMES[name]: value for name, value in model.items() if name in _NEMO_NAMES}))
    shell_words += _nemo_model_words(file, model)
    shell_words += _nemo_precision_words(file, model, trainer)
    shell_words += ["--clip-grad", str(trainer.get("gradient_clip_val") or 0.0)]
    given = model.get("optim")
    optimizer = given if isinstance(given, Mapping) else {}
    name = str(optimizer.get("name", "fused_adam"))
    if name not in _NEMO_OPTIMIZERS:
        raise file.error("model.optim.name", f"{name!r} is not modelled; {suggest_nearest(name, _NEMO_OPTIMIZERS)}")
    if _NEMO_OPTIMIZERS[name]:
        shell_words += ["--use-distributed-optimizer"]
        shell_words += ["--overlap-grad-reduce"] if optimizer.get("overlap_grad_sync", True) else []
    if model.get("fsdp"):
        raise file.error("model.fsdp", "NeMo's FSDP is not read; write layout.data in the scenario")
    return YamlArguments(tuple(shell_words), _nemo_processes(trainer), file.unknowns)


def _nemo_processes(trainer: Mapping[str, Any]) -> str | None:
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    return str(devices * nodes) if isinstance(devices, int) and isinstance(nodes, int) and devices > 0 else None


def _nemo_model_words(file: _YamlFile, model: Mapping[str, Any]) -> Iterator[str]:
    yield "--normalization"
    yield _choice(file, "model.normalization", model.get("normalization", "layernorm"), _NEMO_NORMS)
    activation = _choice(file, "model.activation", model.get("activation", "gelu"), _NEMO_ACTIVATIONS)
    yield from [activation] if activation else []
    if model.get("bias", True) is False:
        yield "--disable-bias-linear"
    if model.get("share_embeddings_and_output_weights", True) is False:
        yield "--untie-embeddings-and-output-weights"
    if model.get("num_query_groups") is not None:
        yield "--group-query-attention"
    tokenizer = model.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("type"):
        yield from ("--tokenizer-type", str(tokenizer["type"]), "--tokenizer-model", str(tokenizer["type"]))


def _nemo_precision_words(file: _YamlFile, model: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[str]:
    precision = str(trainer.get("precision", 32))
    yield from ["--bf16"] if precision.startswith("bf16") else ["--fp16"] if precision.startswith("16") else []
    if precision not in ("bf16", "bf16-mixed", "16", "16-mixed", "32", "32-true"):
        raise file.error("trainer.precision", f"{precision!r} is not read; bf16, 16 and 32 are")
    if model.get("fp8"):
        yield from ("--fp8-format", "e4m3" if model.get("fp8_e4m3") else "hybrid")


def _choice(file: _YamlFile, key: str, value: object, choices: Mapping[str, str]) -> str:
    text = str(value)
    if text not in choices:
        raise file.error(key, f"{text!r} is not read; {suggest_nearest(text, choices)}")
    return choices[text]


_KINDS: Final[Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[_YamlFile], YamlArguments]]]] = {
    "megatron": (_is_model_args, _read_model_args),
    "primus": (_is_primus, _read_primus),
    "nemo": (_is_nemo, _read_nemo),
    "gpt-neox": (_is_neox, _read_neox),
}
"""Whether a content is of a kind, and its reader."""
