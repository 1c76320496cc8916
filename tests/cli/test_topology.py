"""`clustersim topology` of clusters and scenarios, and its error messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import BASE_MAPPING, TWO_TIERS, CommandRunner


def output_tokens(clustersim: CommandRunner, *arguments: str | Path) -> list[list[str]]:
    done = clustersim("topology", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return [line.split() for line in done.stdout.splitlines()]


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_scenario_lists_tiers_per_axis(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    table_lines = output_tokens(clustersim, plan, "--html", "picture.html")
    assert ["tp", "2", "4", "1", "1", "NVLink", "domain", "NVLink"] in table_lines
    assert {line[0] for line in table_lines if line} >= {"dp", "pp", "GPU"}
    text = (tmp_path / "picture.html").read_text()
    assert "between neighbours" in text
    assert "NVLink domain" in text


def test_graph_scenario_lists_switch_tiers(clustersim: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text(json.dumps(TWO_TIERS))
    plan = {**BASE_MAPPING, "cluster": "two.json", "layout": {"tp": 2, "dp": 2, "pp": 2}}
    table_lines = output_tokens(clustersim, write_yaml(tmp_path / "graph.yaml", plan))
    assert ["tp", "2", "4", "1", "2", "switch", "1", "NIC"] in table_lines
    assert ["pp", "2", "4", "4", "2", "switch", "2", "NIC,", "switch", "to", "switch"] in table_lines


def test_topology_applies_overrides(clustersim: CommandRunner, plan: Path) -> None:
    table_lines = output_tokens(clustersim, plan, "--set", "layout.tp=4", "--set", "layout.dp=1")
    assert ["tp", "4", "2", "1", "1", "NVLink", "domain", "NVLink"] in table_lines


def test_a_cluster_has_no_axes(clustersim: CommandRunner) -> None:
    assert not [line for line in output_tokens(clustersim, "dgx-h100") if line[:1] == ["axis"]]


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (["neither.yaml"], ["neither.yaml", "scenario", "model and training", "cluster", "node", "it has a, b"]),
        (["empty.yaml"], ["empty.yaml", "is empty"]),
        (["missing.yaml"], ["missing.yaml", "cannot be read"]),
        (["dgx-h10"], ["no cluster 'dgx-h10'", "scenario", ".yaml", "did you mean dgx-h100?"]),
        (["plan.yaml", "--gpus", "16"], ["--gpus 16", "plan.yaml", "8 GPUs"]),
        (["dgx-h100", "--set", "layout.tp=4"], ["--set layout.tp=4", "dgx-h100 is a cluster", "--gpus"]),
        (["plan.yaml", "--set", "layout.tpp=4"], ["plan.yaml", "layout.tpp", "did you mean tp?"]),
        (["wrong.yaml"], ["wrong.yaml", "layout.tpp", "did you mean tp?"]),
        (["plan.yaml", "--html", "plan.yaml"], ["is one of the files that are read"]),
        (["plan.yaml", "--html", "no/such/page.html"], ["no/such"]),
    ],
)
def test_invalid_topology_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, arguments: list[str], expected_words: list[str]
) -> None:
    write_yaml(tmp_path / "neither.yaml", {"a": 1, "b": 2})
    (tmp_path / "empty.yaml").write_text("")
    write_yaml(tmp_path / "wrong.yaml", {**BASE_MAPPING, "layout": {"tpp": 2}})
    assert plan.exists()
    done = clustersim("topology", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    for word in expected_words:
        assert word in done.stderr
