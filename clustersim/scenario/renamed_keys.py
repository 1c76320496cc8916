"""Which keys of the scenario file have been renamed, and what are they called now?

There are no aliases: an old key is refused, and the error message names the new one.
"""

from collections.abc import Iterable
from typing import Final

RENAMED_SINCE: Final = "0.3"
RENAMED_KEYS: Final[dict[str, str]] = {
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
}
"""New key by the old key's path, whose other keys are as now spelled; `*` is a user-defined name."""


def renamed_key_message(location: Iterable[int | str]) -> str | None:
    """What the key at a location is called now; None if it has not been renamed. Indices into lists are skipped."""
    keys = [key for key in location if not isinstance(key, int)]
    for old_path, new_key in RENAMED_KEYS.items():
        old_keys = old_path.split(".")
        if len(old_keys) == len(keys) and all(old in ("*", key) for old, key in zip(old_keys, keys, strict=True)):
            return f"is called {new_key} since {RENAMED_SINCE}"
    return None
