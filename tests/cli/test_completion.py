"""Shell completion, requested as shells do: by environment variables of a `clustersim` process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clustersim.cli import completion
from clustersim.common import data_files
from clustersim.planning.layouts.objective import Objective
from clustersim.scenario.schema import dotted_keys
from tests.cli.conftest import CommandRunner

FISH_VARIABLES = {"_CLUSTERSIM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def bash_completions(process: CommandRunner, *arguments: str) -> list[str]:
    """Bash's completions of the last argument."""
    variables = {"COMP_WORDS": "\n".join(["clustersim", *arguments]), "COMP_CWORD": str(len(arguments))}
    done = process(_CLUSTERSIM_COMPLETE="complete_bash", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1]


def test_bash_completes_commands_files_and_keys(process: CommandRunner, plan: Path) -> None:
    assert plan.name == "plan.yaml"
    assert bash_completions(process, "sea") == ["search"]
    assert bash_completions(process, "run", "p") == ["plan.yaml"]
    typed = ["run", "plan.yaml", "--set", "layout.tp", "=", "4", "--set"]  # bash splits words at =
    overlap_keys = ["layout.overlap_p2p_comm=", "layout.overlap_moe_expert_parallel_comm="]
    assert bash_completions(process, *typed, "layout.o") == ["layout.order=", *overlap_keys]


@pytest.mark.parametrize("command_line", ["search plan.yaml --clusters gb200-nvl72,gb300", "topology gb300"])
def test_zsh_and_fish_complete_clusters(process: CommandRunner, command_line: str) -> None:
    line = f"clustersim {command_line}"
    name = line.split()[-1].replace("gb300", "gb300-nvl72")
    zsh = process(_CLUSTERSIM_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert zsh.stdout == f"_arguments '*: :((\"{name}\"))'\n"
    assert process(_TYPER_COMPLETE_ARGS=line, **FISH_VARIABLES).stdout == f"{name}\n"


def test_unknown_values_use_the_shells_file_completion(process: CommandRunner) -> None:
    line = "clustersim run plan.yaml --html pa"
    assert process(_CLUSTERSIM_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line).stdout == "_files\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_installed_bash_completion(tmp_path: Path, plan: Path) -> None:
    """With an empty home directory and a `clustersim` on the PATH."""
    command = tmp_path / "clustersim"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clustersim.cli "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = """
        clustersim --install-completion
        . ~/.bashrc
        complete -p clustersim
        COMP_WORDS=(clustersim check pl) COMP_CWORD=2
        _clustersim_completion clustersim
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=plan.parent, capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines()[-2:] == ["complete -o default -F _clustersim_completion clustersim", "plan.yaml"]


def test_file_completion_of_data_files_and_single_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "plans" / "large").mkdir(parents=True)
    (tmp_path / ".kept").mkdir()
    for name in ("plan.yaml", "page.html", "two words.yaml", "plans/large/a.json", "plans/large/b.yml", "plans/c.csv"):
        (tmp_path / name).touch()
    assert completion.complete_data_file("") == ["plan.yaml", "plans/"]
    assert completion.complete_data_file("plans") == ["plans/large/a.json", "plans/large/b.yml"]
    assert completion.complete_data_file("plans/large/b") == ["plans/large/b.yml"]
    assert completion.complete_data_file("~/plan.") == ["~/plan.yaml"]
    assert completion.complete_data_file("./plan.") == ["./plan.yaml"]
    assert completion.complete_data_file(f"{tmp_path}/plan.") == [f"{tmp_path}/plan.yaml"]
    assert completion.complete_data_file(".k") == [".kept/"]
    assert [completion.complete_data_file(missing) for missing in ("none/", "~nobody-is-called-so/", "a\0/")] == [
        [],
        [],
        [],
    ]
    assert completion.complete_validation_target("plans/") == ["plans/c.csv", "plans/large/"]
    assert completion.complete_validation_target("me") == ["memory"]


def test_name_completion_by_prefix() -> None:
    assert completion.complete_cluster("") == data_files.list_names("clusters")
    assert completion.complete_cluster("no,dgx-h10") == ["no,dgx-h100"]
    assert completion.complete_override_key("") == [f"{key}=" for key in dotted_keys()]
    assert completion.complete_objective("") == [objective.value for objective in Objective]
    assert completion.complete_cluster_or_file("dgx-h100") == ["dgx-h100"]
