"""Real steps of two processes against their prediction: DDP, FSDP2, DTensor, a pipeline, and MoE, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SMALL_OVERRIDES = ("model.layers=2", "training.microbatch=2")
MOE_OVERRIDES = ("layout={ep: 2, data: ddp}", "model.experts={count: 8, top_k: 2, ffn: 512}")


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize(
    "layout",
    [("layout.data=ddp",), ("layout.data=fsdp",), ("layout.tp=2",), ("layout.pp=2",), MOE_OVERRIDES],
    ids=["ddp", "fsdp", "tp", "pp", "ep"],
)
def test_two_process_step_matches_its_prediction(layout: tuple[str, ...]) -> None:
    """Tolerance: a factor of 2.5, since two processes and gloo's threads share the cores with other load.

    `python -m tests.benchmarks.check` prints the errors; tensor parallelism has the largest, since DTensor's
    overhead on a CPU and its exposed reductions of input gradients are not simulated.
    """
    override_arguments = [
        argument for override in ("cluster.gpus=2", *layout, *SMALL_OVERRIDES) for argument in ("--set", override)
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check_arguments = [
        "-m",
        "calibrate",
        "--check",
        "examples/tiny_cpu.yaml",
        "--steps",
        "2",
        "--json",
        "-",
        *override_arguments,
    ]
    process = subprocess.run(
        [*launcher, *check_arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout[process.stdout.index("{") : process.stdout.rindex("}") + 1])
    assert result["steps"] == 2
    assert result["provenance_share"]["measured"] > 0.99
    assert 1 / 2.5 < result["predicted_s"] / result["measured_s"] < 2.5
    assert result["predicted_peak_bytes"] == pytest.approx(result["measured_peak_bytes"], rel=0.15)
