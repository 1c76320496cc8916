"""`clustersim export` writes arguments that `import` reads, or explains why it cannot."""

from pathlib import Path

import pytest
import yaml

from clustersim.scenario import Scenario
from tests.cli.conftest import CommandRunner, write_plan
from tests.interop.repository_examples import MEGATRON, TORCHTITAN
from tests.sentences import parts

LLAMA3_MAPPING = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 2, "pp": 2, "sequence_parallel": True, "data": "fsdp"},
    "training": {"sequence": 8192, "global_batch": 64},
}


@pytest.mark.parametrize("program", ["megatron", "torchtitan"])
def test_import_export_import_round_trip(program: str, tmp_path: Path, clustersim: CommandRunner) -> None:
    """Through files, with the example of the framework's repository."""
    text, gpus, *_ = MEGATRON["mixtral-8x7b"] if program == "megatron" else TORCHTITAN["llama3_405b"]
    (tmp_path / "job.txt").write_text(text)
    first, out, second = (str(tmp_path / name) for name in ("first.yaml", "out.txt", "first2.yaml"))
    job = str(tmp_path / "job.txt")
    assert clustersim("import", program, job, "--gpus", str(gpus), "--out", first).returncode == 0
    done = clustersim("export", program, first, "--output", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert out in done.stdout
    assert clustersim("import", program, out, "--gpus", str(gpus), "--output", second).returncode == 0
    imported, reimported = (Scenario.load(path) for path in (first, second))
    assert (imported.layout, imported.training, imported.schedule) == (
        reimported.layout,
        reimported.training,
        reimported.schedule,
    )


def test_unexportable_settings_are_noted(tmp_path: Path, clustersim: CommandRunner) -> None:
    plan = write_plan(tmp_path, LLAMA3_MAPPING)
    done = clustersim("export", "torchtitan", str(plan), "--set", "training.loss=vocab_parallel")
    assert done.returncode == 0
    assert "tensor_parallel_degree = 2" in done.stdout
    notes = done.stderr.splitlines()
    assert any(parts("note: ... training.loss: 'vocab_parallel' ... 'torch'").match(note) for note in notes)
    assert all(note.replace("note: ", "# ") in done.stdout for note in notes)


def test_bad_input_has_a_one_line_error(tmp_path: Path, clustersim: CommandRunner) -> None:
    plan = write_plan(tmp_path, LLAMA3_MAPPING)
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump({"model": "llama3-8b"}))
    for arguments, message in [
        (["torchtitn", str(plan)], "did you mean torchtitan?"),
        (["megatron", str(tmp_path / "none.yaml")], "none.yaml"),
        (["megatron", str(broken)], "broken.yaml"),
        (["megatron", str(plan), "--output", str(plan)], "name another"),
        (["megatron", str(plan), "--output", str(tmp_path / "no" / "run.sh")], "no directory"),
        (["megatron", str(plan), "--set", "training.recompute=selective_op"], "cannot be expressed for Megatron-LM"),
        (["megatron", str(plan), "--set", "layout.tp=3"], "tp 2 or 4 fits"),
        (["torchtitan", str(plan), "--set", "layout.data=zero1"], "write ddp, fsdp or hsdp"),
        (["torchtitan", str(plan), "--set", "model=llama2-7b"], "torchtitan has no flavor"),
    ]:
        done = clustersim("export", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert message in done.stderr
        assert done.stderr.startswith("error: ")
        assert "plan.yaml: " in done.stderr or not any("=" in argument for argument in arguments)
