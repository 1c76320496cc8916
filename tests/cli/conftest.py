"""The command line as a user starts it: a process of its own, its exit status and what it printed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PLAN = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 8},
}

LINK = {"kind": "nic", "bandwidth": "50 GB/s", "latency": "1 us"}
TWO_TIERS: dict[str, Any] = {  # 8 GPUs of 50 GB/s under two switches, which have 100 GB/s each to a third
    "graph": {"accelerator": "h100-sxm-80gb"},
    "nodes": [
        *({"id": f"g{gpu}", "kind": "gpu", "node": gpu} for gpu in range(8)),
        *({"id": name, "kind": "switch"} for name in ("s0", "s1", "top")),
    ],
    "edges": [
        *({"source": f"g{gpu}", "target": f"s{gpu // 4}", **LINK} for gpu in range(8)),
        *({"source": name, "target": "top", **LINK, "bandwidth": "100 GB/s"} for name in ("s0", "s1")),
    ],
}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A small scenario that is legal and fits."""
    return write_plan(tmp_path, PLAN)


def write_plan(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def clustersim(tmp_path: Path) -> Run:
    """Run `clustersim` with some arguments in an empty directory."""

    def run(*arguments: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "clustersim.cli", *map(str, arguments)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment
        )

    return run
