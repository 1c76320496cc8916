"""Which Megatron-LM arguments does a YAML file of NVIDIA's NeMo 1 define?"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clustersim.common.errors import suggest_nearest
from clustersim.interop.yaml_arguments import YamlArguments, YamlFile

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
    "qkv_bias": "add-qkv-bias",
    "fp8_params": "fp8-param-gather",
    "override_vocab_size": "vocab-size",
    "window_size": "window_size",
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
_TURNED_OFF: Final = {
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "bias_dropout_add_fusion": "no-bias-dropout-fusion",
    "persist_layer_norm": "no-persist-layer-norm",
    "apply_rope_fusion": "no-rope-fusion",
}
"""Keys that a flag turns off."""
_SAID_ELSEWHERE: Final = frozenset({
    "normalization", "activation", "bias", "share_embeddings_and_output_weights", "num_query_groups", "fp8", "fp8_e4m3",
    "fp8_hybrid", "precision", "overlap_p2p_comm", "transformer_block_type", *_TURNED_OFF,
})  # fmt: skip
"""Keys that several flags say, or that are checked here."""
_WITHOUT_EFFECT: Final = re.compile(
    r"(mcore_gpt|megatron_amp_O2|name|target|pre_process|post_process|onnx_safe|native_amp|grad_|gradient_as|apex_|gc_|"
    r"use_cpu|use_scaled|do_layer|fsdp_|get_attention_mask|normalize_attention|transformer_engine|use_te_rng|openai_gelu|"
    r"resume_from|restore_from|sync_batch|batch_p2p|reduce_amax|enable_megatron|nccl_comm|validation_|deterministic|"
    r"attention_type|layernorm_zero|scale_positional|apply_query|bias_activation|ub_tp_comm_overlap_cfg|"
    r"num_micro_batches_with|activations_checkpoint_layers_per|memory_profile|answer_only|log_|report_)"
)
"""Keys that change no step, by their beginnings; FP32 master weights (megatron_amp_O2) are the default here."""
_NEMO_NORMS: Final = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_NEMO_ACTIVATIONS: Final = {
    "gelu": "", "squared-relu": "", "swiglu": "--swiglu", "fast-swiglu": "--swiglu", "geglu": "--quick-geglu",
    "fast-geglu": "--quick-geglu", "reglu": "--swiglu", "fast-reglu": "--swiglu",
}  # fmt: skip
_NEMO_OPTIMIZERS: Final = {
    "distributed_fused_adam": True, "mcore_distributed_optim": True, "fused_adam": False, "adamw": False, "adam": False,
}  # fmt: skip
_REFERENCE: Final = re.compile(r"\$\{(?:model)?\.(\w+)\}")
_PRODUCT: Final = re.compile(r"\$\{multiply:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
"""OmegaConf's resolver that NeMo registers."""
_MAX_REFERENCE: Final = 100
"""Characters that a reference stands for inside a longer text, which names numbers."""
_TOKENIZER_TYPES: Final = {"huggingface": "HuggingFaceTokenizer", "sentencepiece": "SentencePieceTokenizer"}
"""Megatron-LM's names of tokenizers, by NeMo's libraries; `megatron` has them as its types."""


_OF_OTHER_LAYERS: Final = (
    "hybrid_override_pattern", "activations_checkpoint_recurrent", "bert_binary_head", "bert_type", "patch_dim",
)  # fmt: skip
"""Keys that recurrent models, BERT and models of images have."""


def is_nemo(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of a language model."""
    model = content.get("model")
    return isinstance(content.get("trainer"), Mapping) and isinstance(model, Mapping) and "micro_batch_size" in model


def read_nemo(file: YamlFile) -> YamlArguments:
    """The arguments of a configuration."""
    stated, trainer = file.content["model"], file.content["trainer"]
    model = {name: _resolved(value, stated) for name, value in stated.items()}
    if model.get("num_layers") is None:
        raise file.error("model.num_layers", "is missing: it restores a model, or is none of language alone")
    _refuse(file, model)
    shell_words = list(file.flags(dict(_named(model))))
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
        shell_words += ["--overlap-param-gather"] if optimizer.get("overlap_param_sync", False) else []
    if model.get("fsdp"):
        raise file.error("model.fsdp", "NeMo's FSDP is not read; write layout.data in the scenario")
    return YamlArguments(tuple(shell_words), _nemo_processes(trainer), file.unknowns)


def _refuse(file: YamlFile, model: Mapping[str, Any]) -> None:
    """Raise InputError for another step: adapters, encoders of images, other blocks."""
    peft = model.get("peft")
    if isinstance(peft, Mapping) and peft.get("peft_scheme"):
        raise file.error("model.peft", "adapters are not read; write training.lora in the scenario")
    if "mm_cfg" in model:
        raise file.error("model.mm_cfg", "encoders of images are not read; write them as towers in the scenario")
    other = next((key for key in model if key in _OF_OTHER_LAYERS or key.startswith(("mamba_", "retro"))), None)
    if other is not None:
        raise file.error(f"model.{other}", "its layers are not read from NeMo's files; write them as model.stack")
    block = model.get("transformer_block_type", "pre_ln")
    if block != "pre_ln":
        raise file.error("model.transformer_block_type", f"{block!r} is not read; pre_ln is")


def _named(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys with one value each, by Megatron-LM's flags; those without a flag are listed by their names."""
    for name, value in model.items():
        is_other = name not in _SAID_ELSEWHERE and not _WITHOUT_EFFECT.match(name) and not isinstance(value, Mapping)
        if name in _NEMO_NAMES or (is_other and not isinstance(value, list)):
            if name == "ffn_dropout" and not value:
                continue
            is_name = name == "position_embedding_type" and isinstance(value, str)
            yield _NEMO_NAMES.get(name, name), value.casefold() if is_name else value


def _resolved(value: object, model: Mapping[str, Any]) -> object:
    """A value with its references to keys of the model, and products of them, replaced."""
    if not isinstance(value, str) or "${" not in value:
        return value
    reference = _REFERENCE.fullmatch(value)
    if reference:
        return model.get(reference[1])
    filled = _REFERENCE.sub(lambda match: str(model.get(match[1]))[:_MAX_REFERENCE], value)
    return _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), filled)


def _nemo_processes(trainer: Mapping[str, Any]) -> str | None:
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    return str(devices * nodes) if isinstance(devices, int) and isinstance(nodes, int) and devices > 0 else None


def _nemo_model_words(file: YamlFile, model: Mapping[str, Any]) -> Iterator[str]:
    yield "--normalization"
    yield file.choice("model.normalization", str(model.get("normalization", "layernorm")).casefold(), _NEMO_NORMS)
    activation = file.choice("model.activation", model.get("activation", "gelu"), _NEMO_ACTIVATIONS)
    yield from [activation] if activation else []
    yield from (f"--{flag}" for key, flag in _TURNED_OFF.items() if model.get(key) is False)
    if model.get("virtual_pipeline_model_parallel_size") and not model.get("overlap_p2p_comm"):
        yield "--no-overlap-p2p-communication"
    if model.get("bias", True) is False:
        yield "--disable-bias-linear"
    if model.get("share_embeddings_and_output_weights", True) is False:
        yield "--untie-embeddings-and-output-weights"
    if model.get("num_query_groups") is not None:
        yield "--group-query-attention"
    yield from _tokenizer_words(model.get("tokenizer"))


def _tokenizer_words(tokenizer: object) -> Iterator[str]:
    """The tokenizer, whose vocabulary counts: by its type, its name on the hub, or its file."""
    if not isinstance(tokenizer, Mapping):
        return
    library, kind = str(tokenizer.get("library", "megatron")), tokenizer.get("type")
    name = kind if library == "huggingface" else tokenizer.get("model")
    if library in _TOKENIZER_TYPES or kind:
        yield from ("--tokenizer-type", _TOKENIZER_TYPES.get(library, str(kind)))
    if name:
        yield from ("--tokenizer-model", str(name))


def _nemo_precision_words(file: YamlFile, model: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[str]:
    precision = str(trainer.get("precision", 32))
    yield from ["--bf16"] if precision.startswith("bf16") else ["--fp16"] if precision.startswith("16") else []
    if precision not in ("bf16", "bf16-mixed", "16", "16-mixed", "32", "32-true"):
        raise file.error("trainer.precision", f"{precision!r} is not read; bf16, 16 and 32 are")
    if model.get("fp8"):
        yield from ("--fp8-format", "e4m3" if model.get("fp8_e4m3") else "hybrid")
