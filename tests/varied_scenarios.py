"""Random scenarios of all that a scenario file can say: a small legal one, with settings changed one after the other.

A setting that the scenario refuses is left out; that it refuses with a sentence (`InputError`) is part of the proof,
as any other error fails the test that drew it.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

from clustersim import Scenario
from clustersim.common.errors import InputError
from tests.strategies import mappings

_LATENT: Final = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_HOST: Final = {
    "host_memory": {
        "capacity": "2 TB", "bandwidth": "600 GB/s", "device_to_host": "50 GB/s", "host_to_device": "50 GB/s",
        "latency": "10 us", "optimizer_fraction": 0.46,
    }
}  # fmt: skip
MODELS: Final[tuple[Mapping[str, Any], ...]] = (
    {"mamba": {"num_heads": 4, "head_dim": 32, "state_dim": 16, "num_groups": 4}, "linear_attention_freq": 2},
    {"mamba1": {"channels": 128, "step_rank": 4}, "linear_attention_freq": 4},
    {
        "gated_delta_net": {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 16, "value_head_dim": 16},
        "linear_attention_freq": 4,
    },
    {"kda": {"num_heads": 4, "key_head_dim": 16, "value_head_dim": 16}, "linear_attention_freq": 3},
    {"lightning": {"num_heads": 4, "head_dim": 16}, "linear_attention_freq": 2},
    {"rwkv7": {"num_heads": 4, "head_dim": 16}, "linear_attention_freq": 4},
    {"moba": {"chunk_size": 16, "topk": 2}, "mixer": "moba"},
    {
        "nsa": {"kernel_size": 8, "kernel_stride": 4, "block_size": 16, "topk": 2, "window_size": 32},
        "mixer": "nsa",
    },
    {"kv_heads": None, "mla": {"q_lora_rank": 32, **_LATENT}},
    {"kv_heads": None, "mla": _LATENT, "dsa": {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 32}},
    {"layers": None, "hybrid_layer_pattern": "M-M*M-M*", "mamba": {"num_heads": 4, "head_dim": 32, "num_groups": 4}},
    {"window": 32, "window_attn_skip_freq": 3},
    {
        "layers": None,
        "experts": None,
        "stack": [
            {"layers": 4, "ffn": 256},
            {"layers": 3, "heads": 8, "kv_heads": 4, "window": 16},
            {"layers": 2, "experts": {"count": 4, "top_k": 2, "ffn": 64}},
        ],
    },
    {"mtp_layers": 1},
    {"block": "parallel"},
    {"block": "sandwich", "qk_norm": True},
    {"block": "post_norm", "norm": "layernorm", "dropout": True},
    {"encoder": {"preset": "clip-vit-l-14-336", "input_size": 56, "layers": 2}},
    {"frozen": True, "encoder": {"preset": "clip-vit-l-14-336", "input_size": 56, "layers": 1}},
)
"""What models of every mixer, block form and mixture of layers say in place of the plain one; None: leave it out."""

LAYOUTS: Final = (
    *({"layout.cp_kind": kind} for kind in ("ring", "all_gather", "ulysses")),
    *({"layout.dispatcher": name} for name in ("allgather", "deepep", "hybridep")),
    *({"layout.layers_per_stage": rule} for rule in ("balanced", {"embedding": True, "head": True})),
    *({"layout.data": data} for data in ("ddp", "zero1", "zero2", "zero3", "fsdp", "deepspeed_zero3")),
    {"layout.data": {"zero": {"stage": 1, "overlap_param_gather": True}}},
    {"layout.data": {"fsdp": {"zero_hpz_partition_size": 2}}},
    {"layout.data": {"fsdp": {"single_parameters": True}}},
    {"layout.cp_balanced": False},
    {"layout.moe_shared_expert_overlap": True},
    {"layout.overlap_moe_expert_parallel_comm": True},
    {"layout.overlap_moe_expert_parallel_comm": True, "layout.delay_wgrad_compute": True},
    {"layout.overlap_p2p_comm": False},
    *({"schedule": name} for name in ("dualpipe", "dualpipev", "zb-v", "bfs", "interleaved", "zb-1p")),
)
TRAININGS: Final = (
    {"training.microbatch": 2},
    *({"training.optimizer": name} for name in ("muon", "soap", "dion", "sgd")),
    {"training.lora": {"rank": 4}},
    {"training.lora": {"rank": 4, "base": "nf4"}},
    {"training.expert_load": 0.5},
    {"training.documents": {"mean": 40}},
    {"training.tiled_mlp": {"tokens": 64}},
    *({"training.loss": name} for name in ("torch", "chunked", "fused_linear")),
    *({"training.recompute": {"modules": [name]}} for name in ("core_attn", "mlp", "layernorm", "moe_act")),
    *(
        {"training.offload": kept, "cluster.node": _HOST}
        for kept in ({"activations": "all"}, {"optimizer": True}, {"parameters": True})
    ),
    {"training.attention": "standard"},
    {"training.fused": False},
)
SOFTWARE: Final = (
    *({"framework": name} for name in ("ideal", "megatron-bridge", "torchtitan", "deepspeed", "transformers")),
    {"framework": {"name": "pytorch", "torch_compile": True}},
    {"framework": {"name": "megatron", "cuda_graphs": True}},
    {"framework": {"name": "megatron", "cuda_graphs": "outside_experts"}},
    {"framework": {"name": "ideal", "launch": "100 us"}},
)
NETWORKS: Final = (
    *({"cost.network": name} for name in ("shared", "uncontended")),
    *({"cost.interference": value} for value in (0.0, 0.3)),
    {"cost.nccl": {"NCCL_ALGO": "Ring"}},
    {"cost.collectives": {"all_reduce": "ring"}},
    {"cluster.fabric": {"ecmp": "hashed"}},
    {"cluster.node": {"nic": {"bandwidth": "1 Gbit/s"}}},
    {"cluster.node": {"nic": {"per_node": 1, "bandwidth": "10 Gbit/s"}}},
    {"cluster.node": {"nvlink": None, "host": {"bridges": 2, "bandwidth": "30 GB/s", "latency": "0.5 us"}}},
    *({"cluster.placement": {"scatter": kind, "seed": 3}} for kind in ("nodes", "gpus")),
)
DEGRADATIONS: Final = (
    *({"degradations.slow": [{"gpu": gpu, "speed": 0.7}]} for gpu in (0, 1, 3)),
    {"degradations.slow": [{"node": 0, "speed": "120 %"}]},
    {"degradations.nics": [{"gpu": 1, "bandwidth": 0.5}]},
    {"degradations.nics": [{"gpu": 2, "dead": True}]},
    {"degradations.background": {"nic": 0.3}},
    {"degradations.links": [{"between": ["nic0.0", "gpu0"], "bandwidth": 0.2, "during": ["0 us", "300 us"]}]},
    {"cluster.mixed": [{"nodes": 0, "accelerator": "a100-sxm-80gb"}]},
)
SETTINGS: Final = (*LAYOUTS, *TRAININGS, *SOFTWARE, *NETWORKS, *DEGRADATIONS, {"steps": 2})


def with_settings(scenario: Scenario, *settings: Mapping[str, Any]) -> Scenario:
    """The scenario with those settings that it accepts, each on top of the ones before."""
    for changes in settings:
        try:
            scenario = scenario.changed(changes)
        except InputError:
            continue
    return scenario


@st.composite
def varied_scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios of 2 to 16 GPUs with any model, layout, software, network and degradation, without jitter."""
    mapping = draw(mappings())
    scenario = Scenario.from_mapping(mapping)
    if draw(st.booleans()):
        model = {**mapping["model"], **draw(st.sampled_from(MODELS))}
        with contextlib.suppress(InputError):
            stated = {key: value for key, value in model.items() if value is not None}
            scenario = Scenario.from_mapping({**mapping, "model": stated})
    return with_settings(scenario, *draw(st.lists(st.sampled_from(SETTINGS), max_size=6)))
