"""`--what-if` of `diff`, `explain` and `search`: the list that `run --what-if` has for the same scenario."""

import json
import re
import shlex
from pathlib import Path

import pytest

from clustersim.cli.limit import TimeLimitReached
from clustersim.planning import what_if
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.scenario_change import ChangeUse, ScenarioChange
from tests.cli.conftest import CommandRunner
from tests.interop.synthetic_profiles import three_steps

SPACE = ("--vary", "layout.tp=1,2", "--fix", "layout.pp=1", "--fix", "schedule=1f1b", "--fix", "training.microbatch=1",
         "--fix", "training.recompute=none", "--fix", "layout.data=ddp")  # fmt: skip
SMALL = ("--set", "layout.dp=1", "--set", "layout.pp=1", "--set", "layout.tp=1", "--set", "cluster.gpus=1")
HINT = "run it with --what-if"


@pytest.fixture(autouse=True)
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of two changes: tests are about who asks for them."""

    def changes(use: ChangeUse) -> list[ScenarioChange]:
        return [change for change in changes_for(use) if change.name in ("cuda_graphs", "network_twice")]

    monkeypatch.setattr(what_if, "changes_for", changes)


def what_helps(output: str) -> list[str]:
    """The printed improvements and their arguments."""
    return [line for line in output.splitlines() if line.startswith(("helps: ", "  --set "))]


def printed_arguments(output: str) -> list[str]:
    return [line.strip() for line in what_helps(output) if line.startswith("  --set ")]


def page_arguments(page: Path, title: str) -> list[str]:
    """The arguments of the changes that a card of a page lists."""
    _, found, behind = page.read_text().partition(f"<h2>{title}</h2>")
    assert found
    card = behind.partition("</section>")[0]
    return [re.sub("<.*?>", "", code) for code in re.findall("<code>(.*?)</code>", card)]


def test_diff_lists_what_helps_the_second(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    change = ("--set", "layout.pp=1", "--set", "layout.dp=4")
    alone = clustersim("run", plan, *change, "--what-if", "--json", "run.json")
    done = clustersim("diff", plan, *change, "--what-if", "--json", "diff.json", "--html", "page.html")
    expected, difference = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "diff.json"))
    assert difference["what_ifs"] == expected["what_ifs"]
    assert what_helps(done.stdout) == what_helps(alone.stdout) != []
    assert "\nwhat helps B\n" in done.stdout
    assert HINT not in done.stdout
    assert page_arguments(tmp_path / "page.html", "What helps B") == printed_arguments(done.stdout)


def test_diff_of_a_trace_lists_what_helps_its_scenario(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    three_steps().write(tmp_path / "measured.json")
    alone = clustersim("run", plan, *SMALL, "--what-if", "--json", "-")
    done = clustersim("diff", "measured.json", plan, *SMALL, "--what-if", "--json", "diff.json")
    assert json.loads((tmp_path / "diff.json").read_text())["what_ifs"] == json.loads(alone.stdout)["what_ifs"]
    assert "\nwhat helps B\n" in done.stdout
    assert what_helps(done.stdout)


def test_explain_lists_what_helps_its_scenario(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    alone = clustersim("run", plan, "--what-if", "--json", "run.json")
    done = clustersim("explain", plan, "--measured", "9s", "--what-if", "--json", "explain.json")
    expected, explanation = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "explain.json"))
    assert explanation["what_ifs"] == expected["what_ifs"]
    assert what_helps(done.stdout) == what_helps(alone.stdout) != []
    assert HINT not in done.stdout


def test_search_lists_what_helps_the_best_layout(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("search", plan, *SPACE, "--what-if", "--json", "search.json", "--html", "page.html")
    (command,) = (line.removeprefix("to run it: clustersim ") for line in done.stdout.splitlines() if "to run" in line)
    alone = clustersim(*shlex.split(command), "--what-if", "--json", "run.json")
    expected, search = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "search.json"))
    assert search["what_ifs"] == expected["what_ifs"]
    assert what_helps(done.stdout) == what_helps(alone.stdout) != []
    assert "\nwhat helps the best layout\n" in done.stdout
    assert page_arguments(tmp_path / "page.html", "What helps the best layout") == printed_arguments(done.stdout)


@pytest.mark.parametrize(
    ("command", "changed"), [(("diff", "--set", "layout.dp=2"), "B"), (("search", *SPACE), "the best layout")]
)
def test_without_the_option_one_line_says_how(
    clustersim: CommandRunner, plan: Path, command: tuple[str, ...], changed: str
) -> None:
    name, *arguments = command
    done = clustersim(name, plan, *arguments, "--json", "answer.json")
    assert f"what helps {changed}: {HINT}" in done.stdout.splitlines()
    assert "what_ifs" not in json.loads((plan.parent / "answer.json").read_text())


@pytest.mark.parametrize(
    ("interrupt", "arguments", "status"), [(KeyboardInterrupt(), (), 130), (TimeLimitReached(), ("--limit", "600"), 0)]
)
def test_interrupted_search_for_what_helps_reports_the_layouts(
    clustersim: CommandRunner, plan: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException, *,
    arguments: tuple[str, ...], status: int,
) -> None:  # fmt: skip
    def stop(*_: object) -> None:
        raise interrupt

    monkeypatch.setattr(what_if, "run_what_ifs", stop)
    done = clustersim("search", plan, *SPACE, "--what-if", *arguments)
    assert done.returncode == status
    assert "best layout: " in done.stdout
    assert HINT in done.stdout
    assert ("simulating what helps; the rest was cut" in done.stderr) is bool(arguments)
