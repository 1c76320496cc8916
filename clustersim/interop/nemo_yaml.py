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


def is_nemo(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of a language model."""
    model = content.get("model")
    return isinstance(content.get("trainer"), Mapping) and isinstance(model, Mapping) and "micro_batch_size" in model


def read_nemo(file: YamlFile) -> YamlArguments:
    """The arguments of a configuration."""
    model, trainer = dict(file.content["model"]), file.content["trainer"]
    for name, value in model.items():
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        model[name] = model.get(reference[1]) if reference else value
    shell_words = list(file.flags({_NEMO_NAMES[name]: value for name, value in model.items() if name in _NEMO_NAMES}))
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


def _nemo_model_words(file: YamlFile, model: Mapping[str, Any]) -> Iterator[str]:
    yield "--normalization"
    yield file.choice("model.normalization", model.get("normalization", "layernorm"), _NEMO_NORMS)
    activation = file.choice("model.activation", model.get("activation", "gelu"), _NEMO_ACTIVATIONS)
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


def _nemo_precision_words(file: YamlFile, model: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[str]:
    precision = str(trainer.get("precision", 32))
    yield from ["--bf16"] if precision.startswith("bf16") else ["--fp16"] if precision.startswith("16") else []
    if precision not in ("bf16", "bf16-mixed", "16", "16-mixed", "32", "32-true"):
        raise file.error("trainer.precision", f"{precision!r} is not read; bf16, 16 and 32 are")
    if model.get("fp8"):
        yield from ("--fp8-format", "e4m3" if model.get("fp8_e4m3") else "hybrid")
