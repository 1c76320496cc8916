"""Two data centres 1,000 km apart: one job over both in step, and DiLoCo, on links of several bandwidths."""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from clustersim import Scenario, simulate
from clustersim.reliability.local_training import simulate_local_training

PLAN: dict[str, Any] = {
    "model": "llama3-70b",
    "layout": {
        "tp": 8,
        "pp": 4,
        "dp": 16,
        "order": ["tp", "cp", "pp", "dp"],
        "data": {"zero": {"stage": 1, "shard": 8}},  # optimizer states sharded in each site, gradients summed between
    },
    "training": {"sequence": 8192, "global_batch": 512, "precision": "bf16", "recompute": "selective"},
    "framework": {"name": "megatron"},
}
DILOCO = {"inner_steps": 100, "fragments": 4, "overlap": 1, "outer_gradients": "int8"}


def write_sites(folder: Path, gbit: float) -> str:
    """A cluster file of two sites with 256 GPUs each."""
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 256} for name in ("west", "east")],
        "links": [{"source": "west", "target": "east", "bandwidth": f"{gbit} Gbit/s", "round_trip": "21 ms"}],
    }
    path = folder / f"sites_{gbit:g}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def main() -> None:
    one_site = simulate(Scenario.from_mapping(PLAN | {"cluster": {"name": "dgx-h100", "gpus": 512}})).step_time
    print(f"one site: {one_site:.2f} s a step")
    with tempfile.TemporaryDirectory() as folder:
        for gbit in (1.0, 10.0, 100.0, 1000.0):
            plan = PLAN | {"cluster": {"path": write_sites(Path(folder), gbit)}}
            in_step = one_site / simulate(Scenario.from_mapping(plan)).step_time
            rounds = simulate_local_training(Scenario.from_mapping(plan | {"diloco": DILOCO}))
            print(f"{gbit:5,.0f} Gbit/s: in step {in_step:6.1%} of one site's speed, DiLoCo {rounds.utilization:6.1%}")


if __name__ == "__main__":
    main()
