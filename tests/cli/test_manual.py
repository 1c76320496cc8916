"""The code blocks of README and the manual: console commands with their output, YAML, JSON and Python.

Printed lines are compared word by word, numbers included; `...` matches anything, on a line of its own any
number of lines. Commands run in a directory with `plan.yaml` and the other files that the manual names.
"""

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.cost.record_file import read_record, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.hardware.cluster import load_cluster
from clustersim.scenario import Scenario
from clustersim.scenario.schema import scenario_schema
from clustersim.simulation import simulate
from tests.cli.conftest import CommandRunner
from tests.interop.repository_examples import TORCHTITAN
from tests.interop.synthetic_profiles import three_steps
from tests.interop.test_hugging_face import AXOLOTL
from tests.interop.test_machines import TREE as SLURM_TREE
from tests.interop.test_machines import gpu, matrix, system
from tests.interop.test_megatron import SCRIPT
from tests.interop.test_megatron_table import table
from tests.interop.test_torchtitan_sources import PYTHON as PYTHON_JOBS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MANUAL_PLAN: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 512},
    "layout": {"tp": 8, "pp": 2, "dp": 32, "sequence_parallel": True},
    "training": {"sequence": 4096, "global_batch": 2048},
}
BENCHMARK_COMMANDS = ("calibrate --for plan.yaml -o", "calibrate --check", "torchrun")
"""Benchmarks that take minutes; `test_readme` parses their options, `tests/calibrate` runs them."""
FROM_PROFILE = "tests/calibrate/test_from_profile.py"
TESTED_ELSEWHERE = {
    "clustersim validate steps": "tests/published/test_steps.py",  # its table, per source
    "clustersim calibrate from-profile trace.json.gz --for plan.yaml -o record.json": FROM_PROFILE,
    "clustersim calibrate from-profile measured --for plan.yaml --snapshot memory.pickle --step-time 61.2ms "
    "-o record.json": FROM_PROFILE,
    "clustersim diff measured plan.yaml --set cost.record=record.json": FROM_PROFILE,
    "clustersim search plan.yaml --set cost.record=record.json --set cluster.gpus=512": FROM_PROFILE,
    "python3 -m venv": "tests/cli/test_readme.py",  # installing needs a network
}
EXTRA_ARGUMENTS = {
    "clustersim validate steps --set": ["--only", "korth-T5-22B"],  # all steps would take minutes
    "clustersim search plan.yaml": ["--fix", "schedule=1f1b", "--fix", "training.recompute=none", "--workers", "1"],
    "clustersim goodput plan.yaml": ["--runs", "20"],
}
"""Arguments added to commands that would take minutes."""
SLOW_COMMANDS = (
    "search examples/llama3_405b",
    "goodput examples/llama3_405b",
    "--runs 10000",
    "goodput plan",
    "search plan",
)


def code_blocks(*languages: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for language, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            if language in languages:
                yield page.name, text


def manual_commands() -> Iterator[tuple[str, str, list[str] | None]]:
    """Page, command, and its shown output lines, or None."""
    for page, text in code_blocks("sh", "console"):
        if not text.startswith("$ "):
            yield from ((page, line, None) for line in text.splitlines())
            continue
        for session in text.removeprefix("$ ").split("\n$ "):
            command, *printed = session.splitlines()
            yield page, command, printed or None


def is_tested_here(command: str) -> bool:
    installs = command.startswith("python3 -m venv")
    return (
        not installs
        and command not in TESTED_ELSEWHERE
        and not any(benchmark in command for benchmark in BENCHMARK_COMMANDS)
    )


COMMAND_CASES = [
    pytest.param(
        command,
        printed,
        id=f"{page}: {command.partition('  #')[0].strip()}",
        marks=[pytest.mark.slow] if any(item in command for item in SLOW_COMMANDS) else [],
    )
    for page, command, printed in manual_commands()
    if is_tested_here(command)
]


@pytest.fixture
def manual_dir(tmp_path: Path) -> Path:
    """A directory with all files that the manual's commands name."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(MANUAL_PLAN))
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "train.log").write_text(table({}))
    (tmp_path / "measured").mkdir()
    three_steps(0, MANUAL_PLAN["cluster"]["gpus"]).write(tmp_path / "measured" / "rank-0.json")
    (tmp_path / "job.toml").write_text(TORCHTITAN["llama3_405b"][0])
    (tmp_path / "config_registry.py").write_text(PYTHON_JOBS.replace("small()", "llama3_8b()"))
    (tmp_path / "qlora.yml").write_text(yaml.safe_dump(AXOLOTL))
    (tmp_path / "topology.conf").write_text(SLURM_TREE)
    (tmp_path / "system.xml").write_text(system([gpu(index) for index in range(8)]))
    (tmp_path / "topo.txt").write_text(matrix("NV12", 8, nics=8))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    record = read_record(ROOT / "calibrate" / "records" / "published" / "h100-sxm-80gb.json")
    write_record(replace(record, origin=RecordOrigin.MEASURED, derivation=""), tmp_path / "my-gpu.json")
    shutil.copy(ROOT / "calibrate" / "records" / "published" / "h200-sxm-141gb.json", tmp_path / "h200.json")
    shutil.copy(
        ROOT / "tests" / "calibrate" / "nccl" / "all_reduce_v2.13_h100_2_nodes.txt", tmp_path / "all_reduce.txt"
    )
    steps = (ROOT / "clustersim" / "validation" / "published" / "steps.csv").read_text(encoding="utf-8").splitlines()
    korth_lines = [line for line in steps[1:] if line.startswith("korth-")]
    (tmp_path / "mine.csv").write_text("\n".join([steps[0], *korth_lines[:2]]) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("command", "printed"), COMMAND_CASES)
def test_manual_commands(
    command: str,
    printed: list[str] | None,
    manual_dir: Path,
    clustersim: CommandRunner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *arguments = shlex.split(command.rpartition("&& ")[2], comments=True)
    if program == "python":
        (script,) = arguments
        runpy.run_path(str(ROOT / script), run_name="__main__")
        assert capsys.readouterr().out
        return
    assert program in {"clustersim", ".venv/bin/clustersim"}
    for start, extra in EXTRA_ARGUMENTS.items():
        arguments += extra if command.startswith(start) and "schedule=" not in command else []
    if {"import-nccl-tests", "import-kineto"} & {*arguments}:
        (manual_dir / "my-gpu.json").unlink()  # its device is not that of the table and the trace
    done = clustersim(*arguments)
    assert done.returncode == 0, done.stderr
    if printed is not None:
        assert re.fullmatch(output_pattern(printed), normalize_whitespace(done.stdout)), done.stdout
    for option, file in pairwise(arguments):
        if option in {"--html", "--json", "-o"} and file != "-":
            assert (manual_dir / file).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.usefixtures("manual_dir")
def test_the_main_job_prints_what_readme_shows(clustersim: CommandRunner) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"clustersim (run examples/\S+)", readme)
    (shown,) = re.findall(r"```\n(step time .*?)```", readme, re.DOTALL)
    done = clustersim(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(output_pattern([*shown.splitlines(), "..."]), normalize_whitespace(done.stdout)), done.stdout


def normalize_whitespace(text: str) -> str:
    """Non-empty lines with single spaces."""
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines() if line.strip())


def output_pattern(shown_lines: list[str]) -> str:
    lines = ("(.*\n)*?" if line.strip() == "..." else _line_pattern(line) for line in shown_lines if line.strip())
    return "".join(lines)


def _line_pattern(text: str) -> str:
    return ".*".join(re.escape(fragment) for fragment in " ".join(text.split()).split("...")) + "\n"


def test_output_pattern_distinguishes_outputs() -> None:
    text = normalize_whitespace("one  2\n\nthree 4.5 s\nfive\n")
    assert re.fullmatch(output_pattern(["one 2", "three 4.5 s", "five"]), text)
    assert re.fullmatch(output_pattern(["one 2", "..."]), text)
    assert re.fullmatch(output_pattern(["...", "three ... s", "..."]), text)
    assert not re.fullmatch(output_pattern(["one 2", "three 4.5 s"]), text)
    assert not re.fullmatch(output_pattern(["one 3", "..."]), text)


def test_commands_tested_elsewhere_exist() -> None:
    shown = [command for _, command, _ in manual_commands()]
    assert all(any(command.startswith(prefix) for command in shown) for prefix in TESTED_ELSEWHERE)
    assert all((ROOT / test).is_file() for test in TESTED_ELSEWHERE.values())
    assert all(any(prefix in command for command in shown) for prefix in BENCHMARK_COMMANDS)


@pytest.mark.parametrize("page", sorted({page for page, _ in code_blocks("python")}))
def test_python_blocks_run_from_the_repository_root(page: str) -> None:
    """A block may use names of those before it on its page. Schedule classes are tested in `test_readme`."""
    texts = [text for block_page, text in code_blocks("python") if block_page == page]
    names: dict[str, object] = {}
    with chdir(ROOT):
        for text in texts:
            if not text.startswith("class "):
                exec(compile(text, page, "exec"), names)


@pytest.mark.parametrize("text", [text for page, text in code_blocks("yaml", "json") if page == "clusters.md"])
def test_manual_cluster_files_load(text: str, tmp_path: Path) -> None:
    content = yaml.safe_load(text)
    if "diloco" in content:
        assert scenario_schema()["properties"].keys() >= content.keys()
        return
    if "cluster" in content:  # a section of a scenario file
        accelerator = Scenario.from_mapping(MANUAL_PLAN | content).cluster.accelerator
        assert accelerator.name == content["cluster"]["accelerator"]["name"]
        return
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    gpus = sum(site["gpus"] for site in content["sites"]) if "sites" in content else content.get("gpus", 2)
    assert load_cluster(str(path)).gpu_count == gpus


def test_steps_of_a_real_gpu_are_predicted_as_the_manual_says(tmp_path: Path) -> None:
    (text,) = (text for page, text in code_blocks("yaml") if page == "calibration.md")
    (tmp_path / "plan.yaml").write_text(text)
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    eager = re.findall(r"--set (training\S+=\w+)", page)
    printed = [float(item) for item in re.findall(r"\| `run`: .*? \| ([\d.]+) ms", page)]
    simulated = [simulate(Scenario.load(tmp_path / "plan.yaml", changes)).step_time for changes in ((), eager)]
    assert [1e3 * element for element in simulated] == pytest.approx(printed, rel=0.01)


def test_all_yaml_blocks_are_tested() -> None:
    """Clusters here, the others in `test_readme`."""
    pages = {"README.md", "calibration.md", "clusters.md", "scenario.md"}
    assert {page for page, _ in code_blocks("yaml", "json")} == pages


def test_manual_lists_all_collective_algorithms() -> None:
    from clustersim.collectives.library import ALGORITHMS

    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in table for name in ALGORITHMS)


def test_manual_lists_all_packaged_clusters() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    for name in data_files.list_names("clusters"):
        assert re.search(rf"\b{name}\b", page), name


def test_extension_points_have_examples() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    example_names = set(re.findall(r"`(examples/extend_\w+\.py)`", page))
    assert example_names == {f"examples/{example.name}" for example in (ROOT / "examples").glob("extend_*.py")}
    assert all(f"python {example}" in page for example in example_names)
