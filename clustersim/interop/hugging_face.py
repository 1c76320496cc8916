"""What do configurations of programs on Hugging Face's Trainer train, and how?

axolotl's and Llama-Factory's YAML, and `TrainingArguments` with a model's name (TRL, alignment-handbook). Each is
first said in the names of `TrainingArguments` (transformers/training_args.py); DeepSpeed's JSON that it names, and
accelerate's YAML next to it, say how data is parallel. Keys that define another step are refused; keys without effect
on the step are passed over; any other is reported.

References: axolotl, src/axolotl/utils/schemas; LLaMA-Factory, src/llamafactory/hparams; DeepSpeed,
deepspeed/runtime/zero/config.py; accelerate, utils/dataclasses.py.
"""

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import read_first_text
from clustersim.interop.accelerate_parallelism import AccelerateParallelism, accelerate_parallelism
from clustersim.interop.deepspeed_config import STRATEGY_BY_STAGE, data_parallel_of_stage, offload_device, zero_section
from clustersim.interop.hub_models import hub_model
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.yaml_arguments import yaml_mapping

_MAX_FILE: Final = 1_000_000
_MAX_NEIGHBOURS: Final = 64
_ATTENTION: Final = {
    "flash_attention_2": "flash2", "fa2": "flash2", "flash_attention_3": "flash3", "fa3": "flash3",
    "flash_attention_4": "flash4", "fa4": "flash4", "sdpa": "sdpa",
    "eager": "standard", "disabled": "standard", "auto": None, "xformers": "sdpa",
}  # fmt: skip
_FSDP2_ATTENTION: Final = "kernels-community/"
_OPTIMIZERS: Final = {
    "adam": re.compile(r"(paged_)?adamw?(_torch(_fused|_npu_fused|_xla)?|_hf|_apex_fused|_anyprecision|_32bit)?$"),
    "adam8bit": re.compile(r"(paged_)?adamw?(_bnb|_torch)?_8bit$|(ao_)?adamw(_torch)?_fp8$|ao_adamw_8bit$"),
    "lion": re.compile(r"(paged_)?lion(_32bit|_pytorch)?$"),
    "sgd": re.compile(r"sgd$"),
    "adafactor": re.compile(r"adafactor$"),
    "muon": re.compile(r"muon$"),
}
_ADAM_OF_FEW_BITS: Final = re.compile(r"(ao_)?adamw(_torch)?_4bit$|(paged_)?lion_8bit$|ademamix.*_8bit$")
"""Fewer bits than the scenario's optimizers have: read where only adapters are trained, whose states are small."""
_FP8_RECIPES: Final = {"axolotl": "fp8-tensorwise", "llama-factory": "fp8-rowwise"}
"""torchao's, as accelerate gets it: axolotl, core/trainers/base.py; LLaMA-Factory, train/fp8_utils.py."""
_IRRELEVANT: Final = re.compile(
    r"(dataset|val_|eval|test_|wandb|mlflow|comet|swanlab|hub|push_to|save|load_best|logging|report|run_name|project|"
    r"trackio|output|overwrite|resume|seed|warmup|lr_|learning_rate|min_lr|num_(train_)?epochs|max_steps|num_epochs|weight_decay|"
    r"adam_|max_grad|chat_template|template|tokenizer|special_tokens|tokens|added_tokens|trust_remote|strict|model_type$|"
    r"preprocessing|dataloader|shuffle|train_on|roles|image|video|early_stop|ddp_timeout|plot|do_train|do_eval|stage$|"
    r"base_model_config|revision|cache|metric|remove_unused|unfrozen|neftune|tf32|auto_resume|debug$|group_by|"
    r"gradient_checkpointing_kwargs|lora_alpha|lora_dropout|lora_model|lora_fan|lora_bias|loraplus|pad_to|sample_packing|packing|"
    r"eos|excess|batch_flattening|is_|include_|log_|use_wandb|disable_tqdm|skip_|message|conversation|prompt|data_|"
    r"label_|assistant|completion|bf16_full|torch_dtype|dtype$|torch_compile$|max_samples|streaming|unsloth_cache|s2_|"
    r"device_map|local_rank|sdp_|xformers|ray_|flash_attn_(cross|rms|fuse)|mask_history|compute_accuracy|freeze_(vision|multi)|"
    r"liger_|plugins$|use_liger|enable_liger|optim(izer)?_(args|target)|cosine|lora_(mlp|qkv|o)_kernel|peft_(init|use)|"
    r"auto_find|greater|prediction|generation|predict|do_|top_|temperature|num_beams|length_|ignore_|padding|rope|"
    r"multi_dataset|reset|experimental|axolotl|base_|processor|hf_|torch_empty|low_cpu|attention_dropout|print_)"
)
"""Keys that change no step, by their beginnings."""
_REFUSED: Final = {
    **dict.fromkeys(
        ("rl", "beta", "max_prompt_length", "num_generations", "reward_funcs", "reward_weights", "pref_beta"),
        "preference and reinforcement training is not modelled",
    ),
    "reward_model": "reward models are not modelled",
    "process_reward_model": "reward models are not modelled",
    "use_galore": "GaLore is not modelled", "use_apollo": "APOLLO is not modelled",
    "use_badam": "BAdam is not modelled",
    "use_adam_mini": "Adam-mini is not modelled", "use_kt": "KTransformers is not modelled",
    "gptq": "quantized weights are not read", "use_dora": "DoRA is not modelled",
    "quantization_method": "quantized weights are not read", "lora_use_dora": "DoRA is not modelled",
    "peft_use_dora": "DoRA is not modelled", "pissa_init": "PiSSA is not modelled",
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
        "Megatron-LM behind this program is not read; write a scenario",
    ),
    "mixture_of_depths": "mixture of depths is not modelled", "relora": "ReLoRA is not modelled",
    "relora_steps": "ReLoRA is not modelled", "lisa_n_layers": "LISA is not modelled",
    **dict.fromkeys(("export_dir", "infer_backend"), "a file of merging or inference describes no training"),
    "qat": "quantization-aware training is not modelled", "quantization": "quantization-aware training is not modelled",
    "unfrozen_parameters": "partly frozen models are not modelled", "use_unsloth": "Unsloth's kernels are not modelled",
    "freeze_trainable_layers": "partly frozen models are not modelled",
}  # fmt: skip
_EVERY_LAYER: Final = re.compile(
    r"(?:(?:language_|text_)?model\.){1,2}layers\.\[\\d\]\+\.(?:\(_checkpoint_wrapped_module\.\)\?)?"
    r"\(mlp\|(?:cross_attn\|)?self_attn\)\.\(([a-z]{1,8}(?:\|[a-z]{1,8}){0,9})\)_proj"
)
"""PEFT's regular expression for projections of all layers, as for the text part of a model of images."""
_STAGES_READ: Final = ("sft", "pt")


@dataclass
class _Settings:
    """The keys of a file. read: those that were looked up."""

    values: Mapping[str, Any]
    source: str
    context: ImportContext
    read: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    def get(self, *names: str) -> Any:
        """The value of the first of some keys that is stated; None: none is."""
        self.read.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def error(self, name: str, message: str) -> InputError:
        return InputError(f"{self.source}: {name}: {message}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(f"{self.source}: has no {names[0]}, which says how much a step computes")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(names[0], f"{value!r} is not a whole number above 0")
        return value

    def flag(self, *names: str) -> bool:
        """Whether a key is set to true, or to auto."""
        return self.get(*names) in (True, "true", "True", "auto")


def hugging_face_kind(content: object) -> str | None:
    """The program whose configuration a content is; None: none of them."""
    if not isinstance(content, Mapping):
        return None
    keys = {*content}
    if "base_model" in keys and ({"micro_batch_size", "sequence_len", "datasets"} & keys):
        return "axolotl"
    if "model_name_or_path" in keys and ({"finetuning_type", "cutoff_len", "template"} & keys):
        return "llama-factory"
    if "model_name_or_path" in keys and "per_device_train_batch_size" in keys:
        return "transformers"
    return None


def import_hugging_face(
    kind: str, text: str, source: str, cluster: str, gpu_count: int | None, context: ImportContext
) -> ImportResult:
    """The scenario of a configuration. kind: of `hugging_face_kind`; else as `import_megatron`."""
    content = yaml_mapping(text, source)
    found_kind = hugging_face_kind(content)
    if found_kind != kind:
        hint = f"; it is {found_kind}'s" if found_kind else ""
        raise InputError(f"{source}: is no configuration of {kind}{hint}")
    if context.definitions:
        raise InputError(f"{source}: has no variables, so --define has nothing to define")
    settings = _Settings(content, source, context)
    _refuse(settings)
    return _import(settings, cluster, gpu_count)


def _refuse(settings: _Settings) -> None:
    for name, reason in _REFUSED.items():
        if settings.values.get(name):
            raise settings.error(name, reason)
    stage = settings.values.get("stage")
    if stage is not None and stage not in _STAGES_READ:
        raise settings.error("stage", f"{stage!r} is not modelled; {' and '.join(_STAGES_READ)} are")
    tuning = settings.values.get("finetuning_type")
    if tuning not in (None, "full", "lora"):
        raise settings.error("finetuning_type", f"{tuning!r} is not modelled; full and lora are")


def _import(settings: _Settings, cluster: str, gpu_count: int | None) -> ImportResult:
    name = settings.get("base_model", "model_name_or_path")
    accelerate = _accelerate(settings)
    gpus = gpu_count or accelerate.get("num_processes")
    if not isinstance(gpus, int) or gpus < 1:
        raise InputError(f"{settings.source}: does not say how many GPUs; give --gpus")
    model = hub_model(str(name), settings.source, settings.context)
    if model.remark is not None:
        settings.remarks.append(model.remark)
    layout, offload, framework = _layout(settings, accelerate, gpus)
    fsdp_keys = _fsdp_keys(settings, accelerate.get("fsdp_config"))
    replicas = gpus // (layout.get("tp", 1) * layout.get("cp", 1))
    training = _training(settings, replicas, fsdp_keys)
    offload |= _activation_offload(settings, fsdp_keys)
    mapping = {
        **({} if model.section is None else {"model": model.section}),
        "cluster": {"name": cluster, "gpus": gpus},
        "layout": layout,
        "training": training | ({"offload": offload} if offload else {}),
        "framework": {"name": framework, "torch_compile": True} if settings.flag("torch_compile") else framework,
    }
    ignored = [key for key in settings.values if key not in settings.read and not _IRRELEVANT.match(key)]
    return ImportResult(mapping, tuple(ignored), tuple(settings.remarks))


def _training(settings: _Settings, replicas: int, fsdp_keys: Mapping[str, Any]) -> dict[str, Any]:
    microbatch = settings.integer("micro_batch_size", "per_device_train_batch_size", default=8)
    accumulation = settings.integer("gradient_accumulation_steps", default=1)
    names = ("sequence_len", "cutoff_len", "max_seq_length", "max_length", "model_max_length", "block_size")
    sequence = settings.integer(*names, default=_default_sequence(settings))
    if not settings.flag("sample_packing", "packing"):
        settings.remarks.append(
            f"every sequence has {sequence} tokens, as samples are not packed: shorter ones are faster"
        )
    training: dict[str, Any] = {
        "sequence": sequence,
        "global_batch": microbatch * accumulation * replicas,
        "microbatch": microbatch,
        "precision": _precision(settings),
    }
    if _checkpoints(settings) or fsdp_keys.get("fsdp_activation_checkpointing") is True:
        training["recompute"] = "full"
    attention = _attention(settings)
    if attention is not None:
        training["attention"] = attention
    loss = settings.get("loss_type")
    if loss == "chunked_nll":  # TRL, trl/trainer/sft_config.py
        training["loss"] = loss
    elif loss not in (None, "nll"):
        settings.remarks.append(f"loss_type {loss} is taken for cross-entropy")
    if _fuses_linear_loss(settings):
        training["loss"] = "liger"
        settings.remarks.append("Liger's loss is read; its other kernels are those of training.fused")
    if settings.flag("tiled_mlp"):  # axolotl, integrations/liger and monkeypatch/tiled_mlp
        shards = settings.integer("tiled_mlp_num_shards", default=0)
        training["tiled_mlp"] = {"tokens": -(-training["sequence"] // shards)} if shards else True
    lora = _lora(settings)
    if lora is not None:
        training["lora"] = lora
    optimizer = _optimizer(settings, has_adapters=lora is not None)
    return training if optimizer == "adam" else training | {"optimizer": optimizer}


def _default_sequence(settings: _Settings) -> int | None:
    """The sequence that a program has by default; None: it has none."""
    if "base_model" in settings.values:
        return 512
    return 2048 if "finetuning_type" in settings.values else None


def _checkpoints(settings: _Settings) -> bool:
    """Whether activations are computed again: Llama-Factory does unless it is told not to."""
    if "finetuning_type" in settings.values or "cutoff_len" in settings.values:
        return not settings.flag("disable_gradient_checkpointing")
    return bool(settings.get("gradient_checkpointing"))


def _precision(settings: _Settings) -> dict[str, Any]:
    if settings.flag("fp8"):
        return {"compute": _FP8_RECIPES["llama-factory" if "cutoff_len" in settings.values else "axolotl"]}
    if settings.flag("bf16", "bfloat16"):
        return {"compute": "bf16"}
    if settings.flag("fp16", "float16"):
        return {"compute": "fp16"}
    kind = settings.get("torch_dtype", "dtype")
    is_pure = kind in ("bfloat16", "float16")
    return {"compute": "bf16" if kind == "bfloat16" else "fp16", "master": "none"} if is_pure else {"compute": "fp32"}


def _attention(settings: _Settings) -> str | None:
    if settings.flag("flash_attention"):
        return "flash2"
    value = settings.get("attn_implementation", "flash_attn")
    if value is None or str(value).startswith(_FSDP2_ATTENTION):
        return None
    if str(value) not in _ATTENTION:
        raise settings.error("attn_implementation", f"{value!r} is not read; {suggest_nearest(str(value), _ATTENTION)}")
    return _ATTENTION[str(value)]


def _fuses_linear_loss(settings: _Settings) -> bool:
    return settings.flag("liger_fused_linear_cross_entropy", "enable_liger_kernel", "use_liger_kernel", "use_liger")


def _optimizer(settings: _Settings, *, has_adapters: bool) -> str:
    """The scenario's optimizer; raises InputError for another one."""
    name = str(settings.get("optimizer", "optim") or "adamw_torch")
    if settings.flag("use_muon"):
        return "muon"
    optimizer = next((optimizer_name for optimizer_name, form in _OPTIMIZERS.items() if form.match(name)), None)
    if optimizer is None and has_adapters and _ADAM_OF_FEW_BITS.match(name):
        settings.remarks.append(f"states of the adapters are FP32, where {name} keeps fewer bits: they are small")
        return "adam"
    if optimizer is None:
        raise settings.error(
            "optimizer", f"{name!r} is not modelled; adamw_torch_fused, adamw_8bit, lion, adafactor, sgd and muon are"
        )
    if name.startswith("paged_"):
        settings.remarks.append(f"{name}: its states stay on the GPU, as they do where they fit")
    return optimizer


def _lora(settings: _Settings) -> dict[str, Any] | None:
    adapter = settings.get("adapter", "finetuning_type")
    if adapter not in ("lora", "qlora") and not settings.flag("use_peft"):
        if settings.flag("load_in_4bit", "load_in_8bit"):
            raise settings.error("load_in_4bit", "weights of 4 or 8 bits are trained with adapters alone")
        return None
    rank = settings.integer("lora_r", "lora_rank", default=8)
    targets = settings.get("lora_target_modules", "lora_target")
    names = _target_names(targets)
    is_all = settings.flag("lora_target_linear") or names is None or names in (["all"], ["all-linear"])
    lora: dict[str, Any] = {"rank": rank, "targets": "all" if is_all else [str(one).strip() for one in names]}
    bits = settings.get("quantization_bit")
    if settings.flag("load_in_4bit") or bits == 4:
        return lora | {"base": "nf4"}
    if settings.flag("load_in_8bit") or bits == 8:
        settings.remarks.append("frozen weights of 8 bits are dequantized for each matmul, which is in 16 bits")
        return lora | {"base": "int8"}
    return lora


def _target_names(targets: Any) -> Any:
    """The projections that adapters are for: listed, or the alternatives of a regular expression."""
    if not isinstance(targets, str):
        return targets
    every_layer = _EVERY_LAYER.fullmatch(targets.replace("\\.", "."))
    return [f"{name}_proj" for name in every_layer[1].split("|")] if every_layer else targets.split(",")


def _layout(
    settings: _Settings, accelerate: Mapping[str, Any], gpus: int
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """How ranks share the work, what is offloaded, and the framework that does it."""
    stated = accelerate_parallelism(accelerate, "accelerate's configuration")
    tp = settings.integer("tensor_parallel_size", default=stated.tp)
    cp = settings.integer("context_parallel_size", "sequence_parallel_degree", default=stated.cp)
    if gpus % (tp * cp):
        raise InputError(
            f"{settings.source}: {gpus} GPUs are no multiple of tp {tp} x cp {cp}; give --gpus {tp * cp} or so"
        )
    layout: dict[str, Any] = {name: degree for name, degree in (("tp", tp), ("cp", cp)) if degree > 1}
    if stated.cp_kind and cp == stated.cp:
        layout["cp_kind"] = stated.cp_kind
    deepspeed = settings.get("deepspeed") or _deepspeed_of(accelerate)
    if deepspeed:
        strategy, offload = _zero(settings, deepspeed)
        return layout | {"data": strategy}, offload, "deepspeed"
    fsdp = settings.get("fsdp", "fsdp_config", "fsdp_version") or (accelerate.get("distributed_type") == "FSDP")
    if fsdp:
        sections = accelerate.get("fsdp_config"), settings.get("fsdp_config")
        keys = {key: value for section in sections for key, value in _fsdp_keys(settings, section).items()}
        return layout | {"data": _fsdp(settings, keys, stated)}, _fsdp_offload(settings, keys), "transformers"
    return layout | {"data": "ddp"}, {}, "transformers"


def _fsdp_keys(settings: _Settings, section: object) -> Mapping[str, Any]:
    """A section fsdp_config, of the file or of accelerate's configuration; empty if there is none."""
    keys = section or {}
    if not isinstance(keys, Mapping):
        raise settings.error("fsdp_config", f"{keys!r} is no mapping; write what it holds, such as {{fsdp_version: 2}}")
    return keys


def _fsdp(settings: _Settings, keys: Mapping[str, Any], stated: AccelerateParallelism) -> Any:
    strategy = str(keys.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    reshards = keys.get("fsdp_reshard_after_forward", keys.get("reshard_after_forward"))
    replicate = settings.integer("dp_replicate_size", default=stated.dp_replicate)
    shard = settings.get("dp_shard_size") or stated.dp_shard
    if strategy in ("NO_SHARD", "3"):
        return "ddp"
    if strategy in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2") or replicate > 1:
        return {"hsdp": {"shard": shard}} if isinstance(shard, int) and shard > 1 else "hsdp"
    keeps = strategy in ("SHARD_GRAD_OP", "2") or reshards in (False, "SHARD_GRAD_OP")
    return {"fsdp": {"reshard_after_forward": False}} if keeps else "fsdp"


def _fsdp_offload(settings: _Settings, keys: Mapping[str, Any]) -> dict[str, Any]:
    options = settings.get("fsdp")
    is_offloaded = keys.get("fsdp_offload_params", keys.get("offload_params")) is True or "offload" in str(options)
    return {"parameters": True} if is_offloaded else {}


def _activation_offload(settings: _Settings, fsdp_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Checkpointed layers' inputs in host memory (transformers pull request 48444, accelerate's 4175)."""
    options = settings.get("gradient_checkpointing_kwargs")
    is_offloaded = isinstance(options, Mapping) and options.get("offload") is True
    is_offloaded |= fsdp_keys.get("fsdp_activation_checkpointing_offload") is True
    return {"activations": "all"} if is_offloaded else {}


def _zero(settings: _Settings, deepspeed: object) -> tuple[Any, dict[str, Any]]:
    """The ZeRO stage of DeepSpeed's JSON, and what it keeps in the host's memory."""
    config = deepspeed if isinstance(deepspeed, Mapping) else _read_json(settings, str(deepspeed))
    zero = zero_section(config)
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or stage not in STRATEGY_BY_STAGE:
        raise settings.error("deepspeed", f"stage {stage!r} is none; 0 to 3 are")
    devices = {name: offload_device(zero, name) for name in ("offload_optimizer", "offload_param")}
    if "nvme" in devices.values():
        raise settings.error("deepspeed", "offloading to NVMe is not modelled; to the CPU is")
    offload: dict[str, Any] = (
        {"optimizer": True, "update": "sequential"} if devices["offload_optimizer"] == "cpu" else {}
    )
    if devices["offload_param"] == "cpu":
        settings.remarks.append("parameters stay on the GPU, where DeepSpeed's offload_param keeps them in host memory")
    return data_parallel_of_stage(stage, overlap_comm=zero.get("overlap_comm")), offload


def _read_json(settings: _Settings, path: str) -> Mapping[str, Any]:
    directory = settings.context.directory
    parents = [] if directory is None else [directory, *directory.resolve().parents][:6]
    text = read_first_text(
        tuple(parent / one for parent in parents for one in (path, posixpath.basename(path))), _MAX_FILE
    )
    if text is None:
        raise settings.error(
            "deepspeed", f"{path} is not here, so its ZeRO stage is not known; put it next to the file"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise settings.error("deepspeed", f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise settings.error("deepspeed", f"{path} holds no mapping")
    return config


def _accelerate(settings: _Settings) -> Mapping[str, Any]:
    """What accelerate's configuration next to the file says, if there is one."""
    directory = settings.context.directory
    if directory is None or not directory.is_dir():
        return {}
    names = sorted(path for path in directory.glob("*accelerate*.y*ml"))[:_MAX_NEIGHBOURS]
    if len(names) != 1 or names[0].name == posixpath.basename(settings.source):
        return {}
    text = read_first_text((names[0],), _MAX_FILE)
    content = None if text is None else yaml_mapping(text, str(names[0]))
    if content is None or "distributed_type" not in content:
        return {}
    settings.remarks.append(f"{names[0].name} next to the file says how it is launched")
    return content


def _deepspeed_of(accelerate: Mapping[str, Any]) -> object:
    """DeepSpeed's settings in accelerate's configuration, in the words of its JSON; None: there are none."""
    keys = accelerate.get("deepspeed_config")
    if accelerate.get("distributed_type") != "DEEPSPEED" or not isinstance(keys, Mapping):
        return None
    if "deepspeed_config_file" in keys:
        return str(keys["deepspeed_config_file"])
    offloaded = ("offload_optimizer", "offload_param")
    devices = {name: {"device": keys[f"{name}_device"]} for name in offloaded if f"{name}_device" in keys}
    return {"zero_optimization": {"stage": keys.get("zero_stage", 2), **devices}}
