"""A failure of one process does not leave the others waiting."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.calibrate.check_scenarios import LLAMA, TRAINING

torch = pytest.importorskip("torch")

from calibrate.check.failure_propagation import run_on_all_ranks  # noqa: E402 - torch first
from calibrate.collectives.process_groups import World  # noqa: E402

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 120.0  # seconds; a collective gives up after 600


@pytest.mark.parametrize("where", [pytest.param("building", marks=pytest.mark.slow), "step"])
def test_all_ranks_exit_when_one_is_out_of_memory(where: str, tmp_path: Path) -> None:
    """Both print the failing rank and advice, although the first waits for it in a collective."""
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({"model": LLAMA, "cluster": {"name": "laptop", "gpus": 1}, "training": TRAINING}))
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.calibrate.failing_rank", where, str(file)],
            cwd=ROOT, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        error_outputs = [process.communicate(timeout=HANG_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2]
    for text in error_outputs:
        assert "error: rank 1: 2 layers do not fit into the free memory" in text
        assert "use fewer --layers" in text and "Traceback" not in text


def test_single_process_raises_errors_and_returns_results() -> None:
    with pytest.raises(IndexError):
        run_on_all_ranks(World(0, 1, 1), lambda: [][0])
    assert run_on_all_ranks(World(0, 1, 1), lambda: 3) == 3
