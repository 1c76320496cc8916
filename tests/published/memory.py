"""Is it true? Published memory peaks, measured against predicted: `python -m tests.published.memory`.

memory.csv holds the facts of each measurement with its source. One function turns a row into a scenario; no constant
depends on the case. `peak_allocated` is what the framework's allocator had given out, `peak_reserved` what it had
taken from the device: the first excludes fragmentation, both exclude the driver's context and NCCL's buffers.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustersim import Scenario
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Category, Footprint
from clustersim.memory.framework import load_framework
from clustersim.memory.ledger import in_order, ledger
from clustersim.parallel.plan import Plan
from tests.published.steps import Comparison, qualities

MEMORY = Path(__file__).with_name("memory.csv")
CLUSTERS = {"a100-sxm-80gb": "dgx-a100", "h100-sxm-96gb": "dgx-h100", "b200": "hgx-b200"}
Row = Mapping[str, str]


def rows() -> list[Row]:
    with MEMORY.open(newline="") as lines:
        return list(csv.DictReader(lines))


def scenario_of(row: Row) -> Scenario:
    return Scenario.from_mapping(mapping_of(row), source=row["case_id"])


def mapping_of(row: Row) -> dict[str, Any]:
    """What a scenario file of this run would hold."""
    fp16 = row["precision"] == "fp16"
    return {
        "model": _model(row),
        "cluster": {"name": CLUSTERS[row["gpu"]], "gpus": int(row["n_gpus"])},
        "layout": _layout(row),
        "schedule": {"interleaved": {"chunks": int(row["vpp"])}} if int(row["vpp"]) > 1 else "1f1b",
        "training": {
            "sequence": int(row["seq"]),
            "global_batch": int(row["global_batch"]),
            "microbatch": int(row["micro_batch"]),
            # Megatron accumulates bf16 runs' gradients in fp32 and fp16 runs' in fp16; torchtitan reduces in fp32
            "precision": {"compute": "fp16", "gradients": "fp16"} if fp16 else {"compute": "bf16"},
            "recompute": row["recompute"],
            "attention": row["attention"],
            # torchtitan's loss is torch.nn.functional.cross_entropy of fp32 logits
            "loss": "torch" if row["source"] == "torchtitan" else "vocab_parallel",
        },
    }


def predicted(row: Row) -> float:
    """Bytes of the quantity that the row measures."""
    scenario = scenario_of(row)
    plan = Plan(scenario.model, scenario.training, scenario.layout, scenario.schedule.chunks)
    framework = load_framework()
    footprint, activations = Footprint(plan, framework, 0.0), Activations(plan)
    order = scenario.schedule.order(plan.layout.pp, plan.microbatches)
    allocated = []
    for rank, actions in enumerate(order):
        parts = ledger(footprint, activations, rank, in_order(actions)).at_peak()
        parts.pop(Category.COMMUNICATION)
        fragmented = parts.pop(Category.FRAGMENTATION)
        allocated.append(sum(parts.values()) + (fragmented if row["quantity"] == "peak_reserved" else 0.0))
    return max(allocated) if row["pipeline_rank"] == "max" else allocated[int(row["pipeline_rank"])]


def compare(only: str = "") -> Iterator[Comparison]:
    """Predict every case whose name contains `only`."""
    for row in rows():
        if only in row["case_id"]:
            yield Comparison(row["case_id"], row["source"], float(row["bytes"]), predicted(row))


def _model(row: Row) -> dict[str, Any]:
    llama = row["mlp"] == "swiglu"
    return {
        "name": row["model"],
        **{key: int(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")},
        "ffn": int(row["ffn_hidden"]),
        "max_positions": int(row["seq"]),
        "mlp": row["mlp"],
        "norm": "rmsnorm" if llama else "layernorm",
        "positions": "rotary" if llama else "learned",
        "tied_embeddings": row["tied_embeddings"] == "yes",
        "linear_bias": not llama,
        "qkv_bias": not llama,
        "dropout": not llama,  # 0.1 in Megatron's GPT recipes
    }


def _layout(row: Row) -> dict[str, Any]:
    stage = int(row["zero_stage"])
    layout: dict[str, Any] = {
        **{axis: int(row[axis]) for axis in ("tp", "pp", "cp", "dp")},
        "sequence_parallel": row["sequence_parallel"] == "yes",
        "data": {"zero": {"stage": stage}} if stage else "ddp",
    }
    if "take a layer slot" in row["notes"]:
        stages = int(row["pp"]) * int(row["vpp"])
        slots = (int(row["layers"]) + 2) // stages
        layout["layers_per_stage"] = [slots - 1, *[slots] * (stages - 2), slots - 1]
    return layout


def main() -> None:
    """Print measured against predicted, and mean errors."""
    comparisons = list(compare(*sys.argv[1:2]))
    for row, each in zip((row for row in rows() if "".join(sys.argv[1:2]) in row["case_id"]), comparisons, strict=True):
        place = f"{row['quantity'].removeprefix('peak_')}, rank {row['pipeline_rank']}"
        figures = f"{each.measured / 2**30:8.2f} GiB {each.predicted / 2**30:8.2f} GiB {each.error:+7.1%}"
        print(f"{each.case:62s} {place:20s} {figures}")
    for source, quality in qualities(comparisons).items():
        print(f"{source:20s} mean absolute error {quality.mean:.1%}")


if __name__ == "__main__":
    main()
