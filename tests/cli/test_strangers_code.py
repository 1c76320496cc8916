"""A stranger's file runs nothing: not at any command, unless the user types --allow-code, and never in check.

Each module here leaves a mark when it is executed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.common.plugins import code_permission
from clustersim.scenario import Scenario

from .conftest import BASE_MAPPING, CommandRunner, write_plan

SCHEDULE = """
import pathlib
pathlib.Path({mark!r}).touch()
class Mine:
    def placement(self, ranks): return list(range(ranks))
    def order(self, ranks, microbatches):
        return [[f"{{rank}}{{kind}}{{m}}" for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]
"""
ALGORITHM = """
import pathlib
pathlib.Path({mark!r}).touch()
class Mine:
    def phases(self, collective, topology): return ()
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run",),
    "topology": ("topology",),
    "coverage": ("coverage",),
    "export": ("export", "megatron"),
    "explore": ("explore", "--html", "page.html"),
    "goodput": ("goodput", "--tokens", "1B", "--runs", "1", "--workers", "1"),
    "search": ("search", "--workers", "1"),
    "explain": ("explain", "--measured", "1s"),
    "diff": ("diff", "--set", "steps=2"),
    "check": ("check",),
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that appears when code runs; the working directory is where it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mark"


def stranger(folder: Path, mark: Path, kind: str = "schedule", module: str = "evil_module") -> Path:
    """A scenario that names a class of a module beside it."""
    source = SCHEDULE if kind == "schedule" else ALGORITHM
    (folder / f"{module}.py").write_text(source.format(mark=str(mark)))
    section: dict[str, Any] = {
        "schedule": {"schedule": f"{module}:Mine"},
        "forced": {"cost": {"collectives": {"all_reduce": f"{module}:Mine"}}},
        "candidate": {"cost": {"candidates": {"all_gather": f"{module}:Mine"}}},
        "job": {
            "degradations": {
                "jobs": [{"scenario": {**BASE_MAPPING, "schedule": f"{module}:Mine"}, "placement": {"nodes": [1]}}]
            }
        },
    }[kind]
    return write_plan(folder, {**BASE_MAPPING, **section})


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_a_files_code(clustersim: CommandRunner, tmp_path: Path, mark: Path, command: str) -> None:
    result = clustersim(*COMMANDS[command], str(stranger(tmp_path, mark)))
    assert result.returncode == 2
    assert "evil_module:Mine is Python code" in result.stderr
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["forced", "candidate", "job"])
@pytest.mark.parametrize("command", ["check", "run"])
def test_no_key_of_a_file_runs_code(
    clustersim: CommandRunner, tmp_path: Path, mark: Path, kind: str, command: str
) -> None:
    assert clustersim(command, str(stranger(tmp_path, mark, kind))).returncode == 2
    assert not mark.exists()


def test_code_runs_where_the_user_allows_it_and_only_then(
    clustersim: CommandRunner, tmp_path: Path, mark: Path
) -> None:
    plan = stranger(tmp_path, mark)
    assert clustersim("run", str(plan), "--allow-code").returncode == 0
    assert mark.exists()
    mark.unlink()
    assert clustersim("run", str(plan)).returncode == 2  # the permission ends with its command
    assert clustersim("check", str(plan), "--allow-code").returncode == 2  # no such option
    assert not mark.exists()


def test_search_workers_run_allowed_code(clustersim: CommandRunner, tmp_path: Path, mark: Path) -> None:
    plan = stranger(tmp_path, mark)
    fixed = [f"--fix={setting}" for setting in ("layout.tp=2", "layout.pp=2", "training.recompute=none")]
    result = clustersim("search", str(plan), "--allow-code", "--workers", "2", *fixed, "--quiet")
    assert result.returncode == 0, result.stderr


def test_a_result_never_runs_code(clustersim: CommandRunner, tmp_path: Path, mark: Path) -> None:
    plan = stranger(tmp_path, mark)
    result = tmp_path / "result.json"
    assert clustersim("run", str(plan), "--allow-code", "--json", str(result)).returncode == 0
    assert json.loads(result.read_text())["scenario"]["schedule"]
    mark.unlink()
    for options in ((), ("--allow-code",)):
        finished = clustersim("diff", str(result), "--set", "steps=2", *options)
        assert finished.returncode == 2
        assert "no result file may run" in finished.stderr
    assert not mark.exists()


def test_an_import_runs_no_code(clustersim: CommandRunner, tmp_path: Path, mark: Path) -> None:
    stranger(tmp_path, mark)
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 512")
    clustersim("import", "megatron", str(script), "--set", "schedule=evil_module:Mine")
    assert not mark.exists()


@pytest.mark.parametrize("schedule", ["venv.__main__:X", "this:Mine", "antigravity:Mine", "package.inner:Gone"])
def test_a_class_is_found_before_anything_executes(
    clustersim: CommandRunner,
    tmp_path: Path,
    mark: Path,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even a package on the way to the module, and not with --allow-code."""
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "inner"):
        (package / f"{name}.py").write_text(SCHEDULE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = write_plan(tmp_path, {**BASE_MAPPING, "schedule": schedule})
    plan = plan.rename(tmp_path.joinpath("elsewhere").with_suffix(".yaml"))
    result = clustersim("run", str(plan), "--allow-code")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no class" in result.stderr
    assert not mark.exists()


def test_python_may_forbid_what_it_allows(tmp_path: Path, mark: Path) -> None:
    plan = stranger(tmp_path, mark)
    with code_permission("stays here"), pytest.raises(InputError, match="Python code, which stays here"):
        Scenario.load(plan)
    assert not mark.exists()
    assert Scenario.load(plan).schedule.name == "evil_module:Mine"
    assert yaml.safe_load(plan.read_text())["schedule"] == "evil_module:Mine"
