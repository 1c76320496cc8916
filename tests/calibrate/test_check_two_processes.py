"""Real steps of two processes, beside their prediction: DDP, FSDP2, DTensor, a pipeline, and experts, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SMALL = ("model.layers=2", "training.microbatch=2")
EXPERTS = ("layout={ep: 2, data: ddp}", "model.experts={count: 8, top_k: 2, ffn: 512}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [("layout.data=ddp",), ("layout.data=fsdp",), ("layout.tp=2",), ("layout.pp=2",), EXPERTS],
    ids=["ddp", "fsdp", "tp", "pp", "ep"],
)
def test_two_processes_take_what_is_predicted(layout: tuple[str, ...]) -> None:
    """Wide, a factor of 2.5: two processes and gloo's threads share what cores the machine has with other work.

    `python -m tests.benchmarks.check` prints the errors; tensor parallelism's is the largest, since DTensor's own work
    on a CPU and its exposed reductions of input gradients are not simulated.
    """
    changes = [word for change in ("cluster.gpus=2", *layout, *SMALL) for word in ("--set", change)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "calibrate", "--check", "examples/tiny_cpu.yaml", "--steps", "2", "--json", "-", *changes]
    done = subprocess.run(
        [*launcher, *asked], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=240,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert answer["steps"] == 2
    assert answer["provenance_share"]["measured"] > 0.99
    assert 1 / 2.5 < answer["predicted_s"] / answer["measured_s"] < 2.5
    assert answer["predicted_peak_bytes"] == pytest.approx(answer["measured_peak_bytes"], rel=0.15)
