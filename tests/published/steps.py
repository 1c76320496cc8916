"""Is it true? Published training steps, measured against predicted: `python -m tests.published.steps`.

steps.csv holds the facts of each run with its source. One function turns a row into a scenario; no constant depends on
the case. What a source leaves open is filled in by its software's defaults, said beside the line that does so.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustersim import Scenario, simulate

STEPS = Path(__file__).with_name("steps.csv")
CLUSTERS = {"a100-sxm-80gb": "dgx-a100", "h100-sxm-80gb": "dgx-h100", "gb200": "gb200-nvl72"}
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run. error: predicted over measured, less one."""

    case: str
    source: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows() -> list[Row]:
    with STEPS.open(newline="") as lines:
        return list(csv.DictReader(lines))


def scenario_of(row: Row) -> Scenario:
    return Scenario.from_mapping(mapping_of(row), source=row["case_id"])


def mapping_of(row: Row) -> dict[str, Any]:
    """What a scenario file of this run would hold."""
    return {
        "model": _model(row),
        "cluster": {"name": CLUSTERS[row["gpu"]], "gpus": int(row["n_gpus"])},
        "layout": _layout(row),
        "schedule": _schedule(row),
        "training": {
            "sequence": int(row["seq"]),
            "global_batch": int(row["global_batch"]),
            "microbatch": int(row["micro_batch"]),
            "precision": _precision(row),
            "recompute": row["recompute"],
            "attention": row["attention"],
        },
    }


def compare(only: str = "") -> Iterator[Comparison]:
    """Predict every case whose name contains `only`."""
    for row in rows():
        if only in row["case_id"]:
            predicted = simulate(scenario_of(row)).step_time
            yield Comparison(row["case_id"], row["source"], float(row["step_time_s"]), predicted)


@dataclass(frozen=True, slots=True)
class Quality:
    """How far predictions of several runs are off."""

    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def bias(self) -> float:
        """Mean error: below zero where predictions are too fast."""
        return sum(self.errors) / len(self.errors)


def qualities(comparisons: list[Comparison]) -> dict[str, Quality]:
    """Each source, and all cases together."""
    by_source: dict[str, list[float]] = {}
    for each in comparisons:
        by_source.setdefault(each.source, []).append(each.error)
        by_source.setdefault("all", []).append(each.error)
    return {source: Quality(tuple(errors)) for source, errors in by_source.items()}


def _model(row: Row) -> dict[str, Any]:
    llama = row["mlp"] == "swiglu"
    megatron = row["source"] in {"megatron-2021", "korthikanti-2022"}
    return {
        "name": row["model"],
        **{key: int(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")},
        "ffn": int(row["ffn_hidden"]),
        "max_positions": int(row["seq"]),
        "mlp": row["mlp"],
        "norm": "rmsnorm" if llama else "layernorm",
        "positions": "learned" if megatron or "GPT3" in row["case_id"] else "rotary",
        "tied_embeddings": row["tied_embeddings"] == "yes",
        "linear_bias": megatron or "GPT3" in row["case_id"],
        "qkv_bias": megatron or "GPT3" in row["case_id"],
        "dropout": megatron or "GPT3" in row["case_id"],  # 0.1 in Megatron's and NeMo's GPT recipes
    }


def _layout(row: Row) -> dict[str, Any]:
    overlaps = row["overlap_grad_reduce"] == "yes"
    stage = int(row["zero_stage"])
    bucket = {} if stage else {"bucket": "160 MB"}  # Megatron's 40 M parameters in fp32
    strategy = {"zero": {"stage": stage, "overlap": overlaps}} if stage else {"ddp": {"overlap": overlaps, **bucket}}
    return {
        **{axis: int(row[axis]) for axis in ("tp", "pp", "cp", "dp")},
        "sequence_parallel": row["sequence_parallel"] == "yes" and row["tp"] != "1",
        "tensor_overlap": "tensor-parallel communication overlap on" in row["notes"],
        "pipeline_overlap": row["source"] == "dgxc",  # Megatron-LM overlaps sends since 2023 (overlap_p2p_comm)
        "data": strategy,
    }


def _schedule(row: Row) -> Any:
    if int(row["pp"]) == 1:
        return "1f1b"
    return {"interleaved": {"chunks": int(row["vpp"])}} if row["schedule"] == "interleaved" else "1f1b"


def _precision(row: Row) -> dict[str, str]:
    """Megatron accumulates and reduces bf16 runs' gradients in fp32; its fp16 runs of 2021 and 2022 keep fp16."""
    compute = row["precision"]
    return {"compute": compute, "gradients": "fp32" if compute == "bf16" else "fp16"}


def main() -> None:
    """Print measured against predicted, and mean errors."""
    comparisons = list(compare(*sys.argv[1:2]))
    for each in comparisons:
        print(f"{each.case:55s} {each.measured:9.3f} s {each.predicted:9.3f} s {each.error:+7.1%}")
    for source, quality in qualities(comparisons).items():
        runs = len(quality.errors)
        print(f"{source:20s} {runs:3d} runs, mean absolute error {quality.mean:.1%}, bias {quality.bias:+.1%}")


if __name__ == "__main__":
    main()
