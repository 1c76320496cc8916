"""`clustersim explore`: the written page, and errors that are raised before simulation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.planning.explorer_scenarios import few_choices

ExploreRunner = Callable[..., Any]


@pytest.fixture(autouse=True)
def _few_choices() -> Iterator[None]:
    with few_choices():
        yield


def test_explore_writes_and_names_the_page(clustersim: ExploreRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("explore", plan, "--workers", "1", "--html", "page.html")
    assert (done.returncode, done.stdout) == (0, "wrote page.html\n")
    assert all(line.startswith("simulating variants, ") for line in done.stderr.splitlines())  # progress, if it is slow
    text = (tmp_path / "page.html").read_text()
    assert "what goes where?" in text
    assert "Step time, simulated" in text


def test_explore_applies_overrides(clustersim: ExploreRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim(
        "explore", plan, "--workers", "1", "--html", "page.html", "--set", "cluster.gpus=1", "--set", "layout={}"
    )
    assert done.returncode == 0
    assert 'data-key="gpus" data-values="[1, 2, 4' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml", "--html", "page.html"], "nowhere.yaml: cannot be read"),
        (["plan.yaml", "--html", "nowhere/page.html"], "there is no directory nowhere"),
        (["plan.yaml", "--html", "plan.yaml"], "is one of the files that are read"),
        (["plan.yaml", "--html", "-"], "--html needs the name of a file"),
        (["plan.yaml", "--html", ""], "--html needs the name of a file"),
        (["plan.yaml", "--html", "."], "is a directory"),
        (["plan.yaml", "--html", "page.html", "--set", "layout.tp=3"], "tp 3"),
    ],
)
def test_invalid_explore_has_a_one_line_error(
    clustersim: ExploreRunner, plan: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert plan.name == "plan.yaml"
    done = clustersim("explore", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()
