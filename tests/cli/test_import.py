"""`clustersim import` writes a scenario that `run` accepts, or explains why it cannot."""

from pathlib import Path

import yaml

from tests.cli.conftest import CommandRunner
from tests.interop.repository_examples import TORCHTITAN
from tests.interop.test_megatron import SCRIPT, SMALL
from tests.interop.test_torchtitan import MODEL, REJECTED
from tests.sentences import parts


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
        assert parts(message).search(done.stderr)
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


def test_auto_finds_the_program_and_says_it(tmp_path: Path, clustersim: CommandRunner) -> None:
    script, job = tmp_path / "train.sh", tmp_path / "job.toml"
    script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL}")
    job.write_text(TORCHTITAN["llama3_405b"][0])
    for file, arguments, program in ((script, [], "megatron"), (job, ["--gpus", "128"], "torchtitan")):
        found = clustersim("import", "auto", str(file), *arguments)
        named = clustersim("import", program, str(file), *arguments)
        assert (found.returncode, found.stdout) == (0, named.stdout)
        assert found.stderr.startswith(f"note: is read as {program}'s")


def test_definitions_are_the_environment_and_the_parameters(tmp_path: Path, clustersim: CommandRunner) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "if [ $KIND = big ]; then L=8; else L=4; fi\n"
        f"torchrun --nproc_per_node $2 pretrain_gpt.py {SMALL} --num-layers $L"
    )
    done = clustersim("import", "megatron", str(script), "--define", "KIND=big", "--define", "2=4")
    assert done.returncode == 0
    assert parts("note: assumed: ... 4 sequences: ... microbatch for each replica\n").fullmatch(done.stderr)
    assert yaml.safe_load(done.stdout)["model"]["layers"] == 8
    assert yaml.safe_load(done.stdout)["cluster"]["gpus"] == 4
    for arguments, message in [
        (["--define", "2=4"], "whether [ $KIND = big ] is not known"),
        (["--define", "KIND"], "--define KIND: is not NAME=VALUE"),
        (["--define", "A-B=1"], "is not NAME=VALUE"),
        (["--define", "KIND=big"], "($2 is not known; give --define 2=VALUE); give --gpus"),
    ]:
        refused = clustersim("import", "megatron", str(script), *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_an_unknown_vocabulary_can_be_set(tmp_path: Path, clustersim: CommandRunner) -> None:
    script = tmp_path / "train.sh"
    arguments = SMALL.replace("--vocab-size 1000", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model mine")
    script.write_text(f"torchrun pretrain_gpt.py {arguments}")
    assert "--set model.vocab=" in clustersim("import", "megatron", str(script)).stderr
    done = clustersim("import", "megatron", str(script), "--set", "model.vocab=50176")
    assert yaml.safe_load(done.stdout)["model"]["vocab"] == 50176


def test_files_that_are_no_arguments_get_one_sentence(tmp_path: Path, clustersim: CommandRunner) -> None:
    """Also a log of more than any program prints, and nesting that no parser follows."""
    file = tmp_path / "file"
    for content, message in [
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not UTF-8"),
        (b"line\n" * 8_000_000, "40 MB; arguments are at the beginning of a log"),
        (b"[iteration] loss 1.0 | elapsed 2.0 ms (x)\n" * 200_000, "characters; a launch script has at most"),
        (b"(" * 190_000, "is nested more than"),
        (b'"' * 190_001, "is not bash"),
        (b"a|" * 90_000, "pipes"),
    ]:
        file.write_bytes(content)
        done = clustersim("import", "auto", str(file))
        assert (done.returncode, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
        assert message in done.stderr
