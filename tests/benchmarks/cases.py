"""Which steps are measured? Scenarios as mappings, as a file would hold them."""

from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"
GPUS_PER_REPLICA = 128  # the example: tp 8 × pp 16
MICROBATCHES_PER_REPLICA = 16  # of the example
Mapping = dict[str, Any]


def example_scenario() -> Mapping:
    """Llama 3 405B on 16,384 GPUs, unchanged."""
    mapping: Mapping = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return mapping


def folded_16k() -> Mapping:
    """The unchanged example; symmetric ranks are simulated once."""
    return example_scenario()


def folded_131k() -> Mapping:
    """The example with eight times the replicas, sequences and pods."""
    return scaled_example(131_072)


def folded_1m() -> Mapping:
    """The example with 64 times the replicas and sequences, on as many pods as that takes."""
    return scaled_example(1_048_576)


def slow_rank_16k() -> Mapping:
    """The example with one GPU at 90 % of its speed."""
    return {**example_scenario(), "degradations": {"slow": [{"gpu": 12345, "speed": 0.9}]}}


def jitter_16k() -> Mapping:
    """The example with 1 % jitter of every kernel on every rank, so no two ranks are equal; no link contention."""
    return {**example_scenario(), "degradations": {"jitter": "1%"}, "cost": {"network": "uncontended"}}


def slow_rank_175b() -> Mapping:
    """The GPT-3 175B example on 1,024 A100 with one GPU at 90 % of its speed; links are shared."""
    path = EXAMPLE.with_name("gpt3_175b_1k.yaml")
    mapping: Mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {**mapping, "degradations": {"slow": [{"gpu": 100, "speed": 0.9}]}}


def moe_2k() -> Mapping:
    """The DeepSeek-V3 example on 2,048 H800: expert dispatch shares links with other traffic."""
    mapping: Mapping = yaml.safe_load(EXAMPLE.with_name("deepseek_v3.yaml").read_text(encoding="utf-8"))
    return mapping


def moe_expert_load_1k() -> Mapping:
    """DeepSeek-V3 on half as many GPUs with random expert load, so all 1,024 ranks differ; no link contention."""
    mapping = moe_2k()
    mapping["cluster"] = {**mapping["cluster"], "gpus": 1024}
    mapping["layout"] |= {"dp": mapping["layout"]["dp"] // 2}
    mapping["training"] |= {"global_batch": mapping["training"]["global_batch"] // 2, "expert_load": 0.3}
    return {**mapping, "cost": {"network": "uncontended"}}


def dualpipe_2k() -> Mapping:
    """DeepSeek-V3 on 2,048 H800 with DualPipeV, 60 microbatches per replica, random expert load, no contention."""
    mapping = moe_2k()
    layout = mapping["layout"] | {"pp": 8, "dp": 256}
    del layout["layers_per_stage"]  # DualPipeV places two stages on every rank
    training = mapping["training"] | {"expert_load": 0.3}
    return {
        **mapping,
        "layout": layout,
        "schedule": "dualpipev",
        "training": training,
        "cost": {"network": "uncontended"},
    }


def fsdp_1k_contended() -> Mapping:
    """Llama 3 70B, FSDP over 1,024 GPUs in 8 pods of 128, oversubscribed 1:7 above; every rank, links shared."""
    return {
        "model": "llama3-70b",
        "cluster": {"name": "llama3-roce", "gpus": 1024, "fabric": {"spine": {"units": 8, "oversubscription": 7}}},
        "layout": {"dp": 1024, "data": {"fsdp": {"prefetch": 1}}},
        "training": {"sequence": 8192, "global_batch": 1024, "microbatch": 1, "precision": "bf16", "recompute": "full"},
        "cost": {"network": "shared", "symmetry": "off"},
    }


def scaled_example(gpus: int) -> Mapping:
    """The example with as many replicas as the GPUs hold, and as many pods.

    A replica needs 128 GPUs; with fewer, the model and its pipeline are shortened in proportion, and all layers
    are recomputed, since nothing shards the optimizer states.
    """
    mapping, replicas = example_scenario(), max(gpus // GPUS_PER_REPLICA, 1)
    pods = max(8, -(-gpus // 3072))
    mapping["cluster"] = {**mapping["cluster"], "gpus": gpus, "fabric": {"core": {"pods": pods}}}
    mapping["layout"] |= {"dp": replicas}
    mapping["training"] |= {"global_batch": replicas * MICROBATCHES_PER_REPLICA}
    if gpus < GPUS_PER_REPLICA:
        stages = gpus // 8
        mapping["model"] = {"preset": mapping["model"], "layers": 8 * stages - 2}
        mapping["layout"] |= {"pp": stages}
        mapping["training"] |= {"recompute": "full"}
    return mapping


def gpt3_7b(gpus: int) -> Mapping:
    """The step that ASTRA-sim was measured on: 32 layers of width 4,096, tp 8 × pp 4, 8 microbatches, 1F1B.

    A gradient bucket is a little smaller than a layer's gradients (12 · 4096² weights of 4 bytes on 8 ranks:
    100.7 MB), so that every layer has its own all-reduce.
    """
    replicas = gpus // 32
    return {
        "model": "gpt3-6.7b",
        "cluster": {"name": "llama3-roce", "gpus": gpus},
        "layout": {"tp": 8, "pp": 4, "dp": replicas, "data": {"ddp": {"bucket": "100 MB"}}},
        "schedule": "1f1b",
        "training": {"sequence": 2048, "global_batch": 8 * replicas, "microbatch": 1, "precision": "bf16"},
    }


def unfolded(mapping: Mapping) -> Mapping:
    """The same with every rank simulated (vectorized engine): no link contention."""
    return {**mapping, "cost": {**mapping.get("cost", {}), "symmetry": "off", "network": "uncontended"}}


def goodput_16k() -> Mapping:
    """The example with the failure rates of its cluster, a checkpoint every ten minutes and 40 spare nodes."""
    return {
        **example_scenario(),
        "reliability": {"preset": "llama3-2024", "checkpoint": {"interval": "10 min"}, "spares": 40},
    }


def uneven_experts_200_layers() -> Mapping:
    """A mixture of 200 layers with 64 experts in each, every layer and rank with an expert load of its own."""
    return {
        "model": {"preset": "mixtral-8x7b", "layers": 200, "experts": 64},
        "cluster": {"name": "dgx-h100", "gpus": 512},
        "layout": {"tp": 1, "pp": 8, "dp": 64, "ep": 64, "data": "zero1"},
        "training": {"sequence": 4096, "global_batch": 1024, "recompute": "full", "expert_load": 0.3},
    }
