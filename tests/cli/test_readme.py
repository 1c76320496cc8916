"""What README tells a stranger to type must exist."""

import re
import tomllib
from pathlib import Path

import yaml

from clustersim.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def test_there_are_two_commands_of_one_line_each() -> None:
    install_and_run, test = commands()
    assert "\n" not in install_and_run
    assert "\n" not in test
    assert re.search(r"clustersim run (\S+) ", install_and_run)
    assert test.endswith("pytest")


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


def test_the_picture_is_there() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_commands_in_the_table_are_the_commands() -> None:
    told = set(re.findall(r"^\| `clustersim (\w+)", README, re.MULTILINE))
    assert told == {command.callback.__name__ for command in app.registered_commands if command.callback}


def test_the_scenario_in_readme_is_a_scenario() -> None:
    from clustersim.scenario import Scenario

    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    scenario = Scenario.from_mapping(yaml.safe_load(blocks[0]), source="README.md")
    assert scenario.layout.world == 16384


def test_continuous_integration_runs_the_test_command_of_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"sed -n '/(.*?)/p' README.md", script)
    assert pattern is not None
    assert re.findall(pattern[1], README, re.MULTILINE) == [commands()[1]]
