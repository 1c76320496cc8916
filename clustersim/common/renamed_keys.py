"""Which keys of scenario and data files have been renamed, and what are they called now?

There are no aliases: an old key is refused, and the error message names the new one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from clustersim.common.errors import InputError

RENAMED_SINCE: Final = "0.3"
SCENARIO: Final = "scenario"
COLLECTIVE_ALGORITHM: Final = "collective algorithm"
_ATTENTION: Final = {
    "share": "peak_fraction",
    "causal": "causal_ratio",
    "block": "query_block",
    "formats": "speedup_by_format",
}
_HOST_MEMORY: Final = {
    "to_host": "device_to_host",
    "from_host": "host_to_device",
    "update": "optimizer_fraction",
}
_PIPELINE: Final = {"inside": "intra_domain_fraction", "between": "inter_domain_fraction", "chunk": "max_chunk"}


def _nested(section: str, renamed: Mapping[str, str]) -> dict[str, str]:
    """The renamed keys of a section, by path."""
    return {f"{section}.{old_key}": new_key for old_key, new_key in renamed.items()}


_LIBRARY_KEYS: Final = {
    "nccl": "follows_nccl_env",
    "sms": "num_sms",
    "kernels": "kernel_time_fraction",
    "offers": "variants",
    "channels": "p2p_channels",
    "links.*.included": "included_latency",
    **_nested("p2p_channels", {"all": "max_channels", "least": "bytes_per_channel", "most": "max_bytes_per_channel"}),
    **_nested("pipeline", _PIPELINE),
    "networks.*.without": "unsupported",
    "generations.*.in_network": "nvls",
    "generations.*.low_latency": "ll_max_bandwidth",
    "generations.*.between": "max_bus_bandwidth",
    "generations.*.ramp": "channel_ramp",
    "generations.*.channel": "channel_bandwidth",
    **_nested("generations.*.nvls", {"share": "bandwidth_fraction", "handling": "chunk_overhead"}),
    **_nested("generations.*.max_bus_bandwidth", {"in_network": "nvls"}),
    **_nested("generations.*.channel_ramp", {"all": "max_channels", "least": "bytes_per_channel"}),
    "variants.rounds": "step_latency",
    "variants.step_latency.alone": "network_only",
    "variants.capped": "ll_limited",
    "variants.ramped": "uses_channel_ramp",
    "variants.channelled": "uses_p2p_channels",
    "variants.launched": "adds_launch",
    "variants.most": "max_payload",
    "variants.pace": "correction_factors",
    "variants.steps": "chunk_steps",
    "variants.handling": "sm_copy_cost",
    **_nested("variants.pipeline", _PIPELINE),
    **_nested("variants.chunk_steps", {"one": "one_domain", "few": "up_to_three_domains", "many": "more_domains"}),
    **_nested(
        "variants.sm_copy_cost",
        {"row": "token_time", "rate": "bandwidth", "chunk": "chunk_time", "chunks": "chunk_tokens"},
    ),
}
RENAMED_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    SCENARIO: {
        "disturbances": "degradations",
        "model.latent": "mla",
        "model.logit_softcap": "final_logit_softcapping",
        "model.softcap": "attn_logit_softcapping",
        "model.sinks": "attention_sinks",
        "model.rotary": "rotary_percent",
        "model.global_every": "window_attn_skip_freq",
        "model.nope_every": "no_rope_freq",
        "model.stack.softcap": "attn_logit_softcapping",
        "model.stack.sinks": "attention_sinks",
        "model.stack.rotary": "rotary_percent",
        "model.experts.groups": "num_groups",
        "model.experts.limit": "group_topk",
        "model.experts.capacity": "capacity_factor",
        "model.experts.every": "interleave_moe_layer_step",
        "model.stack.experts.groups": "num_groups",
        "model.stack.experts.limit": "group_topk",
        "model.stack.experts.capacity": "capacity_factor",
        "model.mla.query_rank": "q_lora_rank",
        "model.mla.kv_rank": "kv_lora_rank",
        "model.mla.nope": "qk_nope_head_dim",
        "model.mla.rope": "qk_rope_head_dim",
        "model.mla.value_dim": "v_head_dim",
        "layout.tensor_overlap": "tp_comm_overlap",
        "layout.backward_overlap": "async_tensor_model_parallel_allreduce",
        "layout.pipeline_overlap": "overlap_p2p_comm",
        "layout.overlap_expert_communication": "overlap_moe_expert_parallel_comm",
        "layout.delay_wgrad": "delay_wgrad_compute",
        "layout.overlap_shared_experts": "moe_shared_expert_overlap",
        "layout.release_outputs": "deallocate_pipeline_outputs",
        "layout.dispatcher_sms": "dispatcher_num_sms",
        "layout.data.zero3_by_parameter": "deepspeed_zero3",
        "layout.data.fsdp.secondary": "zero_hpz_partition_size",
        "layout.data.hsdp.secondary": "zero_hpz_partition_size",
        "layout.data.zero.secondary": "zero_hpz_partition_size",
        "schedule.python.rule": "class_path",
        "training.precision.first_layers": "num_layers_at_start_in_bf16",
        "training.precision.last_layers": "num_layers_at_end_in_bf16",
        "training.expert_load.variation": "coefficient_of_variation",
        "training.expert_load.rows": "tokens_per_expert",
        "training.overheads.zeroing": "zero_grad",
        "training.overheads.averaging": "prescale_gradients",
        "training.overheads.checking": "check_for_nan_in_grad",
        "training.overheads.unscaling": "unscale_gradients",
        "training.overheads.widening": "upcast_gradients",
        "training.overheads.norm_sums": "allreduce_layernorm_grads",
        "training.overheads.norm_twice": "norm_weight_grad_kernel",
        "training.overheads.loss": "loss_averaging",
        "training.overheads.batches": "batch_transfer",
        "framework.compiled": "torch_compile",
        "economics.carbon": "carbon_intensity",
        "economics.power.products": "matmul",
        "economics.power.streaming": "memory_bound",
        "economics.power.communicating": "exposed_communication",
        "reliability.failures.*.takes": "failure_domain",
        "reliability.failures.*.found": "latent_detection",
        "reliability.rack": "nodes_per_rack",
        "reliability.crews": "repair_slots",
    },
    "clusters": {**_nested("node.host_memory", _HOST_MEMORY), **_nested("host_memory", _HOST_MEMORY)},
    "accelerators": {
        "host_pace": "host_launch_ratio",
        "in_training": "training_derating",
        "training_derating.narrow": "low_precision_ratio",
        "training_derating.sustained": "sustained_ratio",
        "training_derating.spread": "gpu_spread",
        "efficiency.memory": "memory_bandwidth_fraction",
        "efficiency.casts": "quantization_bandwidth_ratio",
        "efficiency.grouped": "grouped_gemm",
        "efficiency.matmul.share": "peak_fraction",
        "efficiency.matmul.shares": "peak_fraction_by_format",
        "efficiency.matmul.by_rows": "tn_only",
        "efficiency.matmul.prologues": "prologue_by_format",
        "efficiency.matmul.starts": "kernel_latency_by_format",
        "efficiency.grouped_gemm.share": "multi_stream_peak_fraction",
        "efficiency.grouped_gemm.kernel_share": "kernel_peak_fraction",
        "efficiency.grouped_gemm.kernel_shares": "kernel_peak_fraction_by_format",
        "efficiency.grouped_gemm.call": "host_launch",
        **_nested("efficiency.attention_forward", _ATTENTION),
        **_nested("efficiency.attention_backward", _ATTENTION),
    },
    "frameworks": {
        "runs": "supported_layouts",
        "supported_layouts.data_beside_pipeline": "data_with_pipeline",
        "host.experts_launch": "moe_launch",
        "host.message": "p2p",
        "host.call": "eager_call",
        "host.graph": "graph_launch",
        "host.recorded": "measured_host_use",
    },
    "recipes": {
        "products": "matmuls",
        "casts": "quantization",
        "quantization.behind_norm": "after_norm",
        "quantization.input_again": "input_backward",
        "quantization.weight_again": "weight_backward",
        "quantization.weights": "weight_timing",
        "quantization.gathered": "quantized_all_gather",
        "quantization.transposed": "uses_transpose",
    },
    "libraries": _LIBRARY_KEYS,
    COLLECTIVE_ALGORITHM: {
        "star": "linear",
        "forwarded": "hierarchical_dispatch",
        "aggregated_trees": "pat",
        "in_network": "nvls",
    },
}
"""New key by the old key's path, by kind of file: a category of `data_files`, or one of the constants above.

The other keys of a path are as now spelled; `*` is any name; entries of a list have the path of the list.
"""


def renamed_key_message(kind: str, location: Iterable[int | str]) -> str | None:
    """What the key at a location is called now; None if it has not been renamed. Indices into lists are skipped."""
    keys = [key for key in location if not isinstance(key, int)]
    for old_keys, new_key in _renamed_by_last_key(kind).get(keys[-1], ()) if keys else ():
        if len(old_keys) == len(keys) and all(old in ("*", key) for old, key in zip(old_keys, keys, strict=True)):
            return f"is called {new_key} since {RENAMED_SINCE}"
    return None


@cache
def _renamed_by_last_key(kind: str) -> Mapping[str, Sequence[tuple[Sequence[str], str]]]:
    """Old paths and new keys by the old key itself, which is never `*`: nearly all keys of files have none."""
    renamed: dict[str, list[tuple[Sequence[str], str]]] = {}
    for old_path, new_key in RENAMED_KEYS[kind].items():
        old_keys = old_path.split(".")
        renamed.setdefault(old_keys[-1], []).append((old_keys, new_key))
    return renamed


def find_renamed_key(kind: str, content: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first renamed key of a file, dotted, and what it is called now; None without one."""
    for location in _key_locations(content):
        if message := renamed_key_message(kind, location):
            return ".".join(map(str, location)), message
    return None


def reject_renamed_algorithm(name: str) -> None:
    """Raise InputError that says what a renamed collective algorithm is called now."""
    if message := renamed_key_message(COLLECTIVE_ALGORITHM, [name]):
        raise InputError(f"{name} {message}")


def _key_locations(value: object) -> Iterator[tuple[int | str, ...]]:
    """The paths of all keys of a file, a mapping's own before those of its values."""
    if not isinstance(value, (Mapping, list)):
        return
    entries: list[tuple[int | str, object]] = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    if isinstance(value, Mapping):
        yield from ((str(key),) for key, _ in entries)
    for key, nested in entries:
        yield from ((key, *location) for location in _key_locations(nested))
