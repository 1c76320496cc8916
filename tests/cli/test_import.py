"""`clustersim import` writes a scenario that `run` takes, or says in a sentence why it cannot."""

from pathlib import Path

import yaml

from tests.cli.conftest import Run
from tests.interop.repository_examples import TORCHTITAN
from tests.interop.test_megatron import SCRIPT, SMALL
from tests.interop.test_torchtitan import MODEL, REFUSED


def test_what_is_written_runs(tmp_path: Path, clustersim: Run) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "plan.yaml"
    script.write_text(SCRIPT + "# --done\n")
    made = clustersim("import", "megatron", str(script), "--set", "cluster.gpus=64", "--out", str(out))
    assert (made.returncode, made.stderr) == (0, "")
    assert yaml.safe_load(out.read_text())["cluster"] == {"name": "dgx-h100", "gpus": 64}
    assert clustersim("run", str(out), "--quiet").returncode == 0


def test_what_is_left_open_is_said_beside_the_scenario(tmp_path: Path, clustersim: Run) -> None:
    script = tmp_path / "args.txt"
    script.write_text(SMALL + "--use-something-new 3")
    made = clustersim("import", "megatron", str(script), "--gpus", "4", "--cluster", "dgx-a100")
    assert made.returncode == 0
    assert yaml.safe_load(made.stdout)["cluster"] == {"name": "dgx-a100", "gpus": 4}
    assert "--use-something-new" in made.stderr
    assert "a step has 4 sequences" in made.stderr


def test_a_job_of_torchtitan_runs(tmp_path: Path, clustersim: Run) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "plan.yaml"
    job.write_text(TORCHTITAN["llama3_405b"][0])
    made = clustersim("import", "torchtitan", str(job), "--gpus", "128", "--out", str(out))
    assert (made.returncode, made.stderr) == (0, "")
    assert yaml.safe_load(out.read_text())["model"] == "llama3-405b"
    assert clustersim("check", str(out)).returncode in (0, 3)


def test_what_is_wrong_with_a_job_is_a_sentence(tmp_path: Path, clustersim: Run) -> None:
    job = tmp_path / "job.toml"
    for text, said in REFUSED:
        job.write_text(text if "[model" in text or not text.startswith("[") else MODEL + text)
        made = clustersim("import", "torchtitan", str(job), "--gpus", "8")
        assert (made.returncode, made.stdout) == (2, "")
        assert made.stderr.startswith(f"error: {job}: ")
        assert said in made.stderr
        assert len(made.stderr.strip().splitlines()) == 1


def test_bad_input_is_a_sentence(tmp_path: Path, clustersim: Run) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SMALL)
    for arguments, said in [
        (["import", "megatrn", str(script)], "megatron"),
        (["import", "megatron", str(tmp_path / "none.sh")], "none.sh"),
        (["import", "torchtitan", str(tmp_path / "none.toml")], "none.toml"),
        (["import", "torchtitan", str(script), "--gpus", "2"], "is not TOML"),
        (["import", "megatron", str(script)], f"{script}: does not say how many GPUs; give --gpus"),
        (["import", "megatron", str(script), "--gpus", "2", "--cluster", "dgx-h10"], "dgx-h100"),
        (["import", "megatron", str(script), "--gpus", "2", "--out", str(script)], "name another"),
        (["import", "megatron", str(script), "--gpus", "2", "--set", "layout.tp=8"], "layout"),
    ]:
        made = clustersim(*arguments)
        assert (made.returncode, made.stdout) == (2, "")
        assert said in made.stderr
        assert len(made.stderr.strip().splitlines()) == 1
