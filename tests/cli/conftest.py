"""The command line as a user types it: exit status, standard output and standard error.

`clustersim` calls the entry point `clustersim.cli.main` in this process, which takes milliseconds; a
traceback or a warning fails the test. `process` starts a subprocess, for exit signals, the interpreter's
output, missing packages and redirected streams.
"""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import simulation
from clustersim.cli import main


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a finished command."""

    returncode: int
    stdout: str
    stderr: str


CommandRunner = Callable[..., CommandResult]

BASE_MAPPING = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 8},
}

NIC_LINK = {"kind": "nic", "bandwidth": "50 GB/s", "latency": "1 us"}
TWO_TIERS: dict[str, Any] = {  # 8 GPUs with 50 GB/s under two switches, each with 100 GB/s to a third
    "graph": {"accelerator": "h100-sxm-80gb"},
    "nodes": [
        *({"id": f"g{gpu}", "kind": "gpu", "node": gpu} for gpu in range(8)),
        *({"id": name, "kind": "switch"} for name in ("s0", "s1", "top")),
    ],
    "edges": [
        *({"source": f"g{gpu}", "target": f"s{gpu // 4}", **NIC_LINK} for gpu in range(8)),
        *({"source": name, "target": "top", **NIC_LINK, "bandwidth": "100 GB/s"} for name in ("s0", "s1")),
    ],
}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A small valid scenario that fits in memory."""
    return write_plan(tmp_path, BASE_MAPPING)


def write_plan(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def unsimulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if anything is simulated."""

    def simulate(*_: object) -> None:
        raise AssertionError("it was simulated")

    monkeypatch.setattr(simulation, "simulate", simulate)


@pytest.fixture
def clustersim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandRunner:
    """Runs `clustersim` in-process in an empty directory; keyword arguments are environment variables."""

    def run(*arguments: str | Path, **variables: str) -> CommandResult:
        printed, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with monkeypatch.context() as patch, redirect_stdout(printed), redirect_stderr(errors):
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["clustersim", *map(str, arguments)])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as exit_info:
                main()
        status = exit_info.value.code or 0
        assert isinstance(status, int)
        return CommandResult(status, _stream_text(printed), _stream_text(errors))

    return run


def _stream_text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@pytest.fixture
def process(tmp_path: Path) -> CommandRunner:
    """Runs `clustersim` in a subprocess."""

    def run(*arguments: str | Path, **variables: str) -> CommandResult:
        command = [sys.executable, "-m", "clustersim.cli", *map(str, arguments)]
        environment = {**os.environ, **variables}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    return run
