"""What README and the manual tell a stranger to type must exist."""

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
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
MANUAL = "\n".join([README, *PAGES.values()])
MOST_LINES = 150


def commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def test_there_are_two_commands_of_one_line_each() -> None:
    install_and_run, test = commands()
    assert "\n" not in install_and_run
    assert "\n" not in test
    assert re.search(r"clustersim run (\S+) ", install_and_run)
    assert test.endswith(" && .venv/bin/pytest -n auto --dist loadfile")


def test_the_files_and_extras_that_the_commands_name_exist() -> None:
    install_and_run, test = commands()
    scenario = re.search(r"clustersim run (\S+)", install_and_run)
    assert scenario is not None
    assert (ROOT / scenario[1]).is_file()
    assert (ROOT / "constraints.txt").is_file()
    extras = re.search(r"\.\[(.*?)\]", test)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()


def typed() -> list[list[str]]:
    """Words of every command in a console: each line, or where one begins with $ and answers follow, those with $."""
    found: list[str] = []
    for block in re.findall(r"```console\n(.*?)```", MANUAL, re.DOTALL):
        lines = block.splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += prompted or lines
    return [shlex.split(line, comments=True) for line in found]


def names() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


def test_the_calibrations_in_the_manual_are_commands_with_these_options() -> None:
    """Parsed, not run: what argparse does not know ends the test."""
    lines = typed()
    calibrations = [line[line.index("calibrate") + 1 :] for line in lines if "calibrate" in line]
    assert {"collectives", "import-nccl-tests", "derive"} <= {line[0] for line in calibrations}
    for line in calibrations:
        command, _ = parse_command(line)
        assert callable(command)
    others = [line[:2] for line in lines if "calibrate" not in line]
    assert {name for name, _ in others} == {"clustersim"}
    assert {"coverage", "run", "validate", "explain"} <= {command for _, command in others} <= names()


def test_the_picture_is_there() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_readme_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_links_lead_somewhere() -> None:
    """To files that are there, and to headings of the manual."""
    for name, text in (("README.md", README), *((f"docs/{name}", page) for name, page in PAGES.items())):
        plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)(.+?)\)", plain):
            file, _, heading = target.partition("#")
            path = (ROOT / name).parent / file if file else ROOT / name
            assert path.exists(), f"{name}: {target}"
            if heading:
                heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^a-z0-9_ -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_of_the_manual_is_linked_from_readme_and_from_its_index() -> None:
    index = PAGES["README.md"]
    assert all(f"(docs/{name})" in README for name in PAGES)
    assert all(f"({name})" in index for name in PAGES if name != "README.md")


def test_the_scenario_in_readme_is_one() -> None:
    from clustersim.scenario import Scenario

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert Scenario.from_mapping(yaml.safe_load(block)).layout.world_size == 512


def test_the_commands_in_the_table_are_the_commands() -> None:
    told = set(re.findall(r"^\| `clustersim (\w+)", README, re.MULTILINE))
    assert told == names()


def scenarios() -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGES["scenario.md"], re.DOTALL)]


def test_the_scenario_of_the_manual_is_a_scenario_and_so_are_the_parts_that_replace_its_own() -> None:
    from clustersim.scenario import Scenario
    from clustersim.scenario.config.scenario import ScenarioConfig

    whole, *parts = scenarios()
    beside = [part for part in parts if "jobs" in part.get("disturbances", {})]
    assert (len(parts), len(beside)) == (6, 1)
    assert whole.keys() == ScenarioConfig.key_types().keys()
    for part in ({}, *(part for part in parts if part not in beside)):
        assert Scenario.from_mapping({**whole, **part}, default_name="scenario.md").layout.world_size == 16384


def test_the_jobs_of_the_manual_train_beside_another(tmp_path: Path) -> None:
    """Each on 32 nodes; one of them on nodes 64 to 95, as it says, the other on the first that are free."""
    from clustersim.scenario import Scenario

    (part,) = (part for part in scenarios() if "jobs" in part.get("disturbances", {}) and "model" not in part)
    job = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 256},
        "layout": {"tp": 8, "dp": 32},
        "training": {"sequence": 8192, "global_batch": 64},
    }
    for name, told in (("neighbour", job), ("pretraining", job), ("plan", {**job, **part})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(told))
    neighbour, other = Scenario.load(tmp_path / "plan.yaml").co_scheduled_scenarios
    assert neighbour.cluster.machine_gpu_ids.tolist() == [*range(256, 512)]
    assert other.cluster.machine_gpu_ids.tolist() == [*range(512, 768)]


def test_the_schedules_from_outside_in_the_manual_are_schedules(tmp_path: Path) -> None:
    """Its lines and its class, in a scenario of two pipeline ranks and one microbatch."""
    from clustersim.scenario import Scenario
    from clustersim.scenario.config.schedule import ScheduleConfig

    (rule,) = re.findall(r"```python\n(class MySchedule.*?)```", MANUAL, re.DOTALL)
    lines = re.findall(r"^schedule: \{.*$", MANUAL, re.MULTILINE)
    (tmp_path / "my_module.py").write_text(rule)
    given = {
        "model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 2}, "layout": {"pp": 2},
        "training": {"sequence": 512, "global_batch": 1},
    }  # fmt: skip
    found = []
    for line in reversed(lines):
        written = yaml.safe_load(line)["schedule"]
        scenario = Scenario.from_mapping({**given, "schedule": written}, path=tmp_path / "plan.yaml")
        found.append(scenario.schedule.order(2, 1))
        (tmp_path / "my.csv").write_text(format_order(found[-1]))
    assert len(found) == 3
    assert len(set(found)) == 1
    assert {name for name in ScheduleConfig.key_types() if name not in MANUAL} == set()  # noqa: SIM118


def test_continuous_integration_runs_the_test_command_of_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"sed -n '/(.*?)/p' README.md", script)
    assert pattern is not None
    assert re.findall(pattern[1], README, re.MULTILINE) == [commands()[1]]


def test_continuous_integration_runs_what_the_test_command_leaves_out() -> None:
    """All but tests on a GPU, which its machine has not; and every property with all of its examples."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = set(re.findall(r"not (\w+)", options))
    script = (ROOT / ".ci" / "run").read_text()
    chosen = [re.sub(r"not \w+", "", marks) for marks in re.findall(r"-m ['\"](.+?)['\"]", script)]
    assert left_out - {"gpu"} <= set(re.findall(r"\w+", " ".join(chosen)))
    assert re.search(r"-m '.*hypothesis.*' --hypothesis-profile=full", script)
