"""Which steps are measured? Scenarios as mappings, as a file would hold them."""

from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"
GPUS_PER_REPLICA = 128  # GPUs of one replica of the example: tp 8 × pp 16
MICROBATCHES_PER_REPLICA = 16  # of each replica of the example
Mapping = dict[str, Any]


def example_scenario() -> Mapping:
    """Llama 3 405B on 16,384 GPUs, as the example has it."""
    mapping: Mapping = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return mapping


def folded_16k() -> Mapping:
    """The example."""
    return example_scenario()


def folded_131k() -> Mapping:
    """The example with eight times the replicas, sequences and pods."""
    return scaled_example(131_072)


def slow_rank_16k() -> Mapping:
    """The example with one GPU at nine tenths of its speed."""
    return {**example_scenario(), "disturbances": {"slow": [{"gpu": 12345, "speed": 0.9}]}}


def jitter_16k() -> Mapping:
    """The example in which every kernel of every rank varies by 1 %, so no two do the same; no links are shared."""
    return {**example_scenario(), "disturbances": {"jitter": "1%"}, "cost": {"network": "uncontended"}}


def slow_rank_175b() -> Mapping:
    """GPT-3 175B on 1,024 A100, as the example has it, with one GPU at nine tenths of its speed; links are shared."""
    path = EXAMPLE.with_name("gpt3_175b_1k.yaml")
    mapping: Mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {**mapping, "disturbances": {"slow": [{"gpu": 100, "speed": 0.9}]}}


def moe_2k() -> Mapping:
    """DeepSeek-V3 on 2,048 H800, as the example has it: tokens go to their experts over links that others use, too."""
    mapping: Mapping = yaml.safe_load(EXAMPLE.with_name("deepseek_v3.yaml").read_text(encoding="utf-8"))
    return mapping


def moe_expert_load_1k() -> Mapping:
    """The same on half as many, loads of experts drawn, so that no two of 1,024 ranks do the same; no links shared."""
    mapping = moe_2k()
    mapping["cluster"] = {**mapping["cluster"], "gpus": 1024}
    mapping["layout"] |= {"dp": mapping["layout"]["dp"] // 2}
    mapping["training"] |= {"global_batch": mapping["training"]["global_batch"] // 2, "expert_load": 0.3}
    return {**mapping, "cost": {"network": "uncontended"}}


def dualpipe_2k() -> Mapping:
    """DeepSeek-V3 on 2,048 H800 with DualPipeV, 60 microbatches a replica, loads of experts drawn; no links shared."""
    mapping = moe_2k()
    layout = mapping["layout"] | {"pp": 8, "dp": 256}
    del layout["layers_per_stage"]  # DualPipeV has two of its own on each rank
    training = mapping["training"] | {"expert_load": 0.3}
    return {
        **mapping,
        "layout": layout,
        "schedule": "dualpipev",
        "training": training,
        "cost": {"network": "uncontended"},
    }


def fsdp_1k_contended() -> Mapping:
    """Llama 3 70B, fully sharded over 1,024 GPUs in 8 pods of 128 with 1:7 above them; every rank, links shared."""
    return {
        "model": "llama3-70b",
        "cluster": {"name": "llama3-roce", "gpus": 1024, "fabric": {"spine": {"units": 8, "oversubscription": 7}}},
        "layout": {"dp": 1024, "data": {"fsdp": {"prefetch": 1}}},
        "training": {"sequence": 8192, "global_batch": 1024, "microbatch": 1, "precision": "bf16", "recompute": "full"},
        "cost": {"network": "shared", "symmetry": "off"},
    }


def scaled_example(gpus: int) -> Mapping:
    """The example with as many replicas as so many GPUs hold, and as many pods.

    A replica needs 128 GPUs: on fewer, the model and its pipeline are as much shorter, and all layers are recomputed,
    since nothing shards the optimizer.
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

    A bucket of gradients is a little smaller than a layer's (12 · 4096² weights of 4 bytes on 8 ranks: 100.7 MB), so
    that each layer has its all-reduce.
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
    """The same with every rank simulated, as arrays: no links are shared."""
    return {**mapping, "cost": {**mapping.get("cost", {}), "symmetry": "off", "network": "uncontended"}}
