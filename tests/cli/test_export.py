"""`clustersim export` writes arguments that `import` takes, or says in a sentence why it cannot."""

from pathlib import Path

import pytest
import yaml

from clustersim.scenario import Scenario
from tests.cli.conftest import Run, write_plan
from tests.interop.repository_examples import MEGATRON, TORCHTITAN

PLAN = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "layout": {"tp": 2, "pp": 2, "sequence_parallel": True, "data": "fsdp"},
    "training": {"sequence": 8192, "global_batch": 64},
}


@pytest.mark.parametrize("program", ["megatron", "torchtitan"])
def test_there_and_back_is_the_same_scenario(program: str, tmp_path: Path, clustersim: Run) -> None:
    """By files, of the repository's own example."""
    text, gpus, *_ = MEGATRON["mixtral-8x7b"] if program == "megatron" else TORCHTITAN["llama3_405b"]
    (tmp_path / "job.txt").write_text(text)
    first, out, second = (str(tmp_path / name) for name in ("first.yaml", "out.txt", "first2.yaml"))
    job = str(tmp_path / "job.txt")
    assert clustersim("import", program, job, "--gpus", str(gpus), "--out", first).returncode == 0
    done = clustersim("export", program, first, "--output", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert out in done.stdout
    assert clustersim("import", program, out, "--gpus", str(gpus), "--output", second).returncode == 0
    one, other = (Scenario.load(item) for item in (first, second))
    assert (one.layout, one.training, one.schedule) == (other.layout, other.training, other.schedule)


def test_what_arguments_do_not_say_is_said_beside_them(tmp_path: Path, clustersim: Run) -> None:
    plan = write_plan(tmp_path, PLAN)
    done = clustersim("export", "torchtitan", str(plan), "--set", "training.recompute=full")
    assert done.returncode == 0
    assert "tensor_parallel_degree = 2" in done.stdout
    notes = done.stderr.splitlines()
    assert "note: not said: training.loss: 'vocab_parallel' in the scenario, 'torch' with these arguments" in notes
    assert all(note.replace("note: not said: ", "# not said here: ") in done.stdout for note in notes)


def test_bad_input_is_a_sentence(tmp_path: Path, clustersim: Run) -> None:
    plan = write_plan(tmp_path, PLAN)
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump({"model": "llama3-8b"}))
    for arguments, said in [
        (["torchtitn", str(plan)], "did you mean torchtitan?"),
        (["megatron", str(tmp_path / "none.yaml")], "none.yaml"),
        (["megatron", str(broken)], "broken.yaml"),
        (["megatron", str(plan), "--output", str(plan)], "name another"),
        (["megatron", str(plan), "--output", str(tmp_path / "no" / "run.sh")], "no directory"),
        (["megatron", str(plan), "--set", "training.recompute=selective_op"], "cannot be said to Megatron-LM"),
        (["megatron", str(plan), "--set", "layout.tp=3"], "tp 2 or 4 fits"),
        (["torchtitan", str(plan), "--set", "layout.data=zero1"], "write ddp, fsdp or hsdp"),
        (["torchtitan", str(plan), "--set", "model=llama2-7b"], "torchtitan has no flavor"),
    ]:
        done = clustersim("export", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert said in done.stderr
        assert done.stderr.startswith("error: ")
        assert "plan.yaml: " in done.stderr or not any("=" in argument for argument in arguments)
