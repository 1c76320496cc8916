"""`clustersim import` writes a scenario that `run` accepts, or explains why it cannot."""

from pathlib import Path

import yaml

from tests.cli.conftest import CommandRunner
from tests.interop.repository_examples import TORCHTITAN
from tests.interop.test_megatron import SCRIPT, SMALL
from tests.interop.test_torchtitan import MODEL, REJECTED


def test_imported_megatron_job_runs(tmp_path: Path, clustersim: CommandRunner) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "plan.yaml"
    script.write_text(SCRIPT + "# --done\n")
    done = clustersim("import", "megatron", str(script), "--set", "cluster.gpus=64", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(out.read_text())["cluster"] == {"name": "dgx-h100", "gpus": 64}
    assert clustersim("run", str(out), "--quiet").returncode == 0


def test_unknown_arguments_are_noted(tmp_path: Path, clustersim: CommandRunner) -> None:
    script = tmp_path / "args.txt"
    script.write_text(SMALL + "--use-something-new 3")
    done = clustersim("import", "megatron", str(script), "--gpus", "4", "--cluster", "dgx-a100")
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["cluster"] == {"name": "dgx-a100", "gpus": 4}
    assert "--use-something-new" in done.stderr
    assert "a step has 4 sequences" in done.stderr


def test_imported_torchtitan_job_runs(tmp_path: Path, clustersim: CommandRunner) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "plan.yaml"
    job.write_text(TORCHTITAN["llama3_405b"][0])
    done = clustersim("import", "torchtitan", str(job), "--gpus", "128", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(out.read_text())["model"] == "llama3-405b"
    assert clustersim("check", str(out)).returncode in (0, 3)


def test_invalid_torchtitan_job_has_a_one_line_error(tmp_path: Path, clustersim: CommandRunner) -> None:
    job = tmp_path / "job.toml"
    for text, message in REJECTED:
        job.write_text(text if "[model" in text or not text.startswith("[") else MODEL + text)
        done = clustersim("import", "torchtitan", str(job), "--gpus", "8")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {job}: ")
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_bad_input_has_a_one_line_error(tmp_path: Path, clustersim: CommandRunner) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SMALL)
    for arguments, message in [
        (["import", "megatrn", str(script)], "megatron"),
        (["import", "megatron", str(tmp_path / "none.sh")], "none.sh"),
        (["import", "torchtitan", str(tmp_path / "none.toml")], "none.toml"),
        (["import", "torchtitan", str(script), "--gpus", "2"], "is not TOML"),
        (["import", "megatron", str(script)], f"{script}: does not say how many GPUs; give --gpus"),
        (["import", "megatron", str(script), "--gpus", "2", "--cluster", "dgx-h10"], "dgx-h100"),
        (["import", "megatron", str(script), "--gpus", "2", "--out", str(script)], "name another"),
        (["import", "megatron", str(script), "--gpus", "2", "--set", "layout.tp=8"], "layout"),
    ]:
        done = clustersim(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
