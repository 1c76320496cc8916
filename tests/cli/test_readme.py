"""Commands, files and scenarios that README and the manual name exist and are valid."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from calibrate.command import parse_command
from clustersim.cli.app import app
from clustersim.schedules.csv_format import format_order

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MANUAL_PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
MANUAL = "\n".join([README, *MANUAL_PAGES.values()])
MAX_README_LINES = 150


def shell_blocks() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def test_readme_has_two_one_line_commands() -> None:
    install_and_run, test = shell_blocks()
    assert "\n" not in install_and_run
    assert "\n" not in test
    assert re.search(r"clustersim run (\S+) ", install_and_run)
    assert test.endswith(" && .venv/bin/pytest -n auto --dist loadfile")


def test_files_and_extras_of_readme_commands_exist() -> None:
    install_and_run, test = shell_blocks()
    scenario = re.search(r"clustersim run (\S+)", install_and_run)
    assert scenario is not None
    assert (ROOT / scenario[1]).is_file()
    assert (ROOT / "constraints.txt").is_file()
    extras = re.search(r"\.\[(.*?)\]", test)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()


def console_commands() -> list[list[str]]:
    """Arguments of the commands in console blocks: every line, or only the lines with a $ prompt if there is one."""
    command_lines: list[str] = []
    for block in re.findall(r"```console\n(.*?)```", MANUAL, re.DOTALL):
        lines = block.splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        command_lines += prompted or lines
    return [shlex.split(line, comments=True) for line in command_lines]


def command_names() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


def test_manual_calibrate_commands_parse() -> None:
    """Parsed, not run: argparse fails on unknown options."""
    lines = console_commands()
    calibrations = [line[line.index("calibrate") + 1 :] for line in lines if "calibrate" in line]
    assert {"collectives", "import-nccl-tests", "derive"} <= {line[0] for line in calibrations}
    for line in calibrations:
        command, _ = parse_command(line)
        assert callable(command)
    others = [line[:2] for line in lines if "calibrate" not in line]
    assert {name for name, _ in others} == {"clustersim"}
    assert {"coverage", "run", "validate", "explain"} <= {command for _, command in others} <= command_names()


def test_readme_pictures_exist() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_links_resolve() -> None:
    """To existing files and to headings of the manual."""
    for name, text in (("README.md", README), *((f"docs/{name}", page) for name, page in MANUAL_PAGES.items())):
        plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)(.+?)\)", plain):
            file, _, heading = target.partition("#")
            path = (ROOT / name).parent / file if file else ROOT / name
            assert path.exists(), f"{name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_manual_pages_are_linked_from_readme_and_index() -> None:
    index = MANUAL_PAGES["README.md"]
    assert all(f"(docs/{name})" in README for name in MANUAL_PAGES)
    assert all(f"({name})" in index for name in MANUAL_PAGES if name != "README.md")


def test_readme_scenario_is_valid() -> None:
    from clustersim.scenario import Scenario

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert Scenario.from_mapping(yaml.safe_load(block)).layout.world_size == 512


def test_readme_command_table_is_complete() -> None:
    listed = set(re.findall(r"^\| `clustersim (\w+)", README, re.MULTILINE))
    assert listed == command_names()


def manual_scenarios() -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", MANUAL_PAGES["scenario.md"], re.DOTALL)]


def test_manual_scenario_and_snippets_are_valid() -> None:
    from clustersim.scenario import Scenario
    from clustersim.scenario.config.scenario import ScenarioConfig

    full_scenario, *snippets = manual_scenarios()
    job_snippets = [snippet for snippet in snippets if "jobs" in snippet.get("degradations", {})]
    assert (len(snippets), len(job_snippets)) == (9, 1)
    assert full_scenario.keys() == ScenarioConfig.key_types().keys()
    for snippet in ({}, *(snippet for snippet in snippets if snippet not in job_snippets)):
        base = {} if {"model", "cluster", "training"} <= snippet.keys() else full_scenario  # a scenario of its own
        scenario = Scenario.from_mapping({**base, **snippet}, default_name="scenario.md")
        assert scenario.layout.world_size == scenario.cluster.gpu_count


def test_manual_co_scheduled_jobs(tmp_path: Path) -> None:
    """Two jobs of 32 nodes: one with a placement on nodes 64 to 95, the other on the first free nodes."""
    from clustersim.scenario import Scenario

    (snippet,) = (
        snippet
        for snippet in manual_scenarios()
        if "jobs" in snippet.get("degradations", {}) and "model" not in snippet
    )
    job = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 256},
        "layout": {"tp": 8, "dp": 32},
        "training": {"sequence": 8192, "global_batch": 64},
    }
    for name, content in (("neighbour", job), ("pretraining", job), ("plan", {**job, **snippet})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    neighbour, pretraining = Scenario.load(tmp_path / "plan.yaml").co_scheduled_scenarios
    assert neighbour.cluster.machine_gpu_ids.tolist() == [*range(256, 512)]
    assert pretraining.cluster.machine_gpu_ids.tolist() == [*range(512, 768)]


def test_manual_custom_schedules_load(tmp_path: Path) -> None:
    """The manual's `schedule:` lines and class, in a scenario of two pipeline ranks and one microbatch."""
    from clustersim.scenario import Scenario
    from clustersim.scenario.config.schedule import ScheduleConfig

    (class_source,) = re.findall(r"```python\n(class MySchedule.*?)```", MANUAL, re.DOTALL)
    lines = re.findall(r"^schedule: \{.*$", MANUAL, re.MULTILINE)
    (tmp_path / "my_module.py").write_text(class_source)
    mapping = {
        "model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 2}, "layout": {"pp": 2},
        "training": {"sequence": 512, "global_batch": 1},
    }  # fmt: skip
    orders = []
    for line in reversed(lines):
        schedule = yaml.safe_load(line)["schedule"]
        scenario = Scenario.from_mapping({**mapping, "schedule": schedule}, path=tmp_path / "plan.yaml")
        orders.append(scenario.schedule.order(2, 1))
        (tmp_path / "my.csv").write_text(format_order(orders[-1]))
    assert len(orders) == 3
    assert len(set(orders)) == 1
    assert {name for name in ScheduleConfig.key_types() if name not in MANUAL} == set()


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"sed -n '/(.*?)/p' README.md", script)
    assert pattern is not None
    assert re.findall(pattern[1], README, re.MULTILINE) == [shell_blocks()[1]]


def test_ci_runs_the_deselected_tests() -> None:
    """All except GPU tests, as its machine has none, and fuzzing, which is run by hand; property tests in full."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = set(re.findall(r"not (\w+)", options))
    script = (ROOT / ".ci" / "run").read_text()
    chosen = [re.sub(r"not \w+", "", marks) for marks in re.findall(r"-m ['\"](.+?)['\"]", script)]
    assert left_out - {"gpu", "fuzz"} <= set(re.findall(r"\w+", " ".join(chosen)))
    assert re.search(r"-m '.*hypothesis.*' --hypothesis-profile=full", script)
