"""User errors give one sentence on stderr and exit status 2: no traceback, no output, no partial file."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from tests.cli.conftest import BASE_MAPPING, TWO_TIERS, CommandRunner, write_plan
from tests.sentences import parts

MappingChange = Callable[[dict[str, Any]], object]


def error_message(clustersim: CommandRunner, *arguments: str | Path) -> str:
    """The error message of a rejected command; nothing else may have been printed."""
    done = clustersim(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize(
    ("override", "expected_words"),
    [
        ("layout.tpp=4", ["plan.yaml", "layout.tpp", "did you mean tp?"]),
        ("layout.dp=3", ["tp 2 x cp 1 x pp 2 x dp 3 = 12 ranks", "8 GPUs", "dp 2 fits"]),
        ("layout.tp=3", ["tp 3", "8 GPUs", "tp 2 fits"]),
        ("layout.data={ddp: {bucket: 25}}", ["layout.data.ddp.bucket", "25 has no unit"]),
        ("layout.data={ddp: {bucket: 25 lightyears}}", ["layout.data.ddp.bucket", "'lightyears'"]),
        ("schedule=missing.csv", ["plan.yaml", "schedule", "missing.csv", "No such file"]),
        ("schedule={orders: {rows: ['0F0', '1F0,1B0']}}", ["schedule", "row 1 has neither 0B0 nor 0I0 and 0W0"]),
        ("schedule=missing:Mine", ["schedule", "there is no module missing"]),
        ("model=missing/config.json", ["model", "config.json"]),
        ("model=lama-tiny", ["model", "'lama-tiny'", "did you mean llama-tiny?"]),
        ("cluster=dgx-h10", ["cluster", "'dgx-h10'", "did you mean dgx-h100?"]),
        ("training.sequence=0", ["training.sequence", "0 is too small", "1"]),
        ("training.global_batch=-8", ["training.global_batch", "-8 is too small", "1"]),
        ("model.hidden=0", ["model.hidden", "0 is too small", "1"]),
        ("cluster.gpus=1000000000", ["cluster.gpus", "1,000,000,000 is too large", "1,048,576"]),
        ("training.global_batch=7", ["training.global_batch", "7 is not a multiple", "6 or 8 fits"]),
        ("layout", ["--set layout", "--set layout.tp=4"]),
        ("cluster={name: dgx-h100, node: {gpus: {}}}", ["node.gpus is 8, not a mapping"]),
        ("cluster.node=&n {x: *n}", ["an alias stands for something that contains it"]),
        (f"model={'x' * 300}/config.json", ["model", "cannot be read", "too long"]),
        (f"cluster={'x' * 300}", ["cluster", "there is no cluster"]),
        ('model="a\\0.json"', ["model", "cannot be read", "null byte"]),
        ("layout.data={ddp: {bucket: 1e400 B}}", ["layout.data.ddp.bucket", "not finite"]),
        ("training.global_batch=262144", ["131,072 passes a step are the most"]),
    ],
)
def test_wrong_values_have_a_one_line_error(
    clustersim: CommandRunner, plan: Path, override: str, expected_words: list[str]
) -> None:
    sentence = error_message(clustersim, "check", plan, "--set", override)
    assert sentence.count("\n") == 1
    assert all(word in sentence for word in expected_words), sentence


@pytest.mark.parametrize("override", ["layout.tpp=4", "model=lama-tiny", "training.global_batch=262144"])
def test_run_and_check_have_the_same_errors(clustersim: CommandRunner, plan: Path, override: str) -> None:
    run, check = (error_message(clustersim, command, plan, "--set", override) for command in ("run", "check"))
    assert run == check


@pytest.mark.parametrize(
    ("override", "expected_words"),
    [
        ("slow={gpu: 8, speed: 0.9}", ["degradations.slow.0", "there is no GPU 8", "GPUs are 0 to 7"]),
        ("slow=[{node: 1, speed: 0.9}]", ["degradations.slow.0", "there is no node 1", "there is only node 0"]),
        ("slow={gpu: 0, speed: 0}", ["degradations.slow.0.speed", "0 is not between 0.001 and 1"]),
        ("slow={gpu: 0, speed: 90 C}", ["degradations.slow.0.speed", "'90 C' is not a share", "10 %"]),
        ("jitter=11%", ["degradations.jitter", "would make a duration negative", "at most 10%", "lognormal"]),
        ("nics={gpu: 0, bandwidth: -1}", ["degradations.nics.0.bandwidth", "-1 is not between"]),
        ("links={between: [leaf0, spine0.0], dead: true}", ["there is no leaf0", "leaf0.0 to leaf0.7"]),
        ("links={between: [gpu0, gpu1], dead: true}", ["no link leads from gpu0 to gpu1", "nvswitch0"]),
        ("links={between: [gpu0, nvswitch0], bandwidth: 0}", ["links.0.bandwidth", "write dead: true"]),
        (
            "links=[{from: gpu3, to: nvswitch0, dead: true}, {from: gpu3, to: nic0.3, dead: true}]",
            ["degradations.links.1", "from gpu3 to nic0.3", "GPU 3 cannot reach GPUs 0-2, 4-7"],
        ),
        ("background={leaf: 100 %}", ["degradations.background.leaf", "'100 %' is not between 0 % and 99 %"]),
        ("background={spine: 0.1}", ["degradations.background.spine", "no such links; it has nic, leaf"]),
        ("nics={gpu: 0, bandwidth: 50}", ["degradations.nics.0.bandwidth", "50 is more than all of it; write 50 %"]),
        ("nics=[{gpu: 0, dead: true}, {gpu: 0, bandwidth: 0.5}]", ["nics.1", "GPU 0 is in nics.0 already"]),
        ("slow={gpus: 5-3, speed: 0.9}", ["degradations.slow.0.gpus", "'5-3' is backwards; write 3-5"]),
        ("jiter=1%", ["degradations.jiter", "did you mean jitter?"]),
    ],
)
def test_invalid_degradations_have_a_one_line_error(
    clustersim: CommandRunner, plan: Path, override: str, expected_words: list[str]
) -> None:
    sentence = error_message(clustersim, "check", plan, "--set", f"degradations.{override}")
    assert sentence.count("\n") == 1
    assert all(word in sentence for word in expected_words), sentence


def test_partitioning_link_failure_names_both_partitions(clustersim: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(TWO_TIERS))
    plan = write_plan(tmp_path, {**BASE_MAPPING, "cluster": "graph.json"})
    dead = "degradations.links={between: [s0, top], dead: true}"
    sentence = error_message(clustersim, "check", plan, "--set", dead)
    assert parts("link between s0 and top, GPUs 0-3 ... GPUs 4-7").search(sentence)
    assert "there is no s2" in error_message(clustersim, "check", plan, "--set", dead.replace("s0", "s2"))


@pytest.mark.parametrize("text", [None, '{"model_type": "llama", "hidden', '{"model_type": "resnet"}'])
def test_bad_model_file_is_rejected(clustersim: CommandRunner, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    plan = write_plan(tmp_path, {**BASE_MAPPING, "model": "config.json"})
    assert "config.json" in error_message(clustersim, "run", plan)


def test_a_topology_with_an_unreachable_gpu_is_refused(clustersim: CommandRunner, tmp_path: Path) -> None:
    nodes = [{"id": f"gpu{index}", "kind": "gpu", "node": 0} for index in range(3)]
    link = {"kind": "pcie", "bandwidth": "32 GB/s", "latency": "1 us"}
    links = [{"source": a, "target": b, **link} for a, b in (("gpu0", "gpu1"), ("gpu1", "gpu0"))]
    graph = {"accelerator": "h100-sxm-80gb"}
    content = {"directed": True, "multigraph": False, "graph": graph, "nodes": nodes, "links": links}
    (tmp_path / "island.json").write_text(json.dumps(content))
    plan = write_plan(tmp_path, {**BASE_MAPPING, "cluster": "island.json", "layout": {}})
    for command in (["run", plan], ["topology", "island.json"]):
        sentence = error_message(clustersim, *command)
        assert "island.json" in sentence
        assert "gpu2" in sentence


@pytest.mark.usefixtures("unsimulated")
@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_unwritable_output_is_rejected_before_simulation(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, option: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "there is no directory" in error_message(clustersim, "run", plan, option, tmp_path / "no" / "where")
    assert "is a directory" in error_message(clustersim, "run", plan, option, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_failing_output_leaves_no_files(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    error_message(clustersim, "run", plan, "--json", "answer.json", "--html", "no/page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
@pytest.mark.parametrize("name", ["plan.json", "./plan.json", "config.json", "graph.json", "chip.json"])
def test_outputs_never_overwrite_inputs(clustersim: CommandRunner, tmp_path: Path, option: str, name: str) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512, "n_positions": 1024}
    contents = {
        "config.json": config,
        "chip.json": data_files.read_mapping(data_files.find_file("accelerators", "h100-sxm-80gb")),
        "graph.json": {**TWO_TIERS, "graph": {"accelerator": "chip.json"}},
        "plan.json": {**BASE_MAPPING, "model": "config.json", "cluster": "graph.json"},
    }
    for file, content in contents.items():
        (tmp_path / file).write_text(json.dumps(content))
    assert "is one of the files that are read" in error_message(clustersim, "run", "plan.json", option, name)
    if option == "--html" and name in ("graph.json", "chip.json"):
        assert "is one of the files that are read" in error_message(clustersim, "topology", "graph.json", option, name)
    assert {file: json.loads((tmp_path / file).read_text()) for file in contents} == contents


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "-"], "such as page.html"),
        (["--html", ""], "such as page.html"),
        (["--json", ""], "or - for standard output"),
        (["--trace", "-"], ".pftrace, .perfetto-trace or nothing"),
        (["--trace", "step.json"], "--kineto DIR writes JSON"),
        (["--trace", "step.gz"], ".pftrace, .perfetto-trace or nothing"),
    ],
)
def test_invalid_output_names_are_rejected(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in error_message(clustersim, "run", plan, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.usefixtures("unsimulated")
def test_trace_without_perfetto_is_rejected_before_simulation(
    clustersim: CommandRunner, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    assert "pip install 'clustersim[trace]'" in error_message(clustersim, "run", plan, "--trace", "step")


def test_duplicate_key_names_both_lines(clustersim: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("model: llama-tiny\nlayout:\n  tp: 1\n  pp: 1\n  tp: 2\n")
    assert "plan.yaml: layout.tp is given twice, in lines 3 and 5" in error_message(clustersim, "check", "plan.yaml")


def test_outputs_must_be_different_files(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    assert "different files" in error_message(clustersim, "run", plan, "--json", "a", "--html", tmp_path / "a")


@pytest.mark.parametrize("content", ["model: [", "- 1", "", "model: 3\nmodle: 4"])
def test_non_scenario_file_is_rejected(clustersim: CommandRunner, tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.yaml").write_text(content)
    assert "plan.yaml" in error_message(clustersim, "check", "plan.yaml")
    assert "missing.yaml" in error_message(clustersim, "check", "missing.yaml")


def test_all_errors_of_a_file_are_listed(clustersim: CommandRunner, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {**BASE_MAPPING, "layout": {"tp": 0, "ppp": 2}})
    assert error_message(clustersim, "check", plan).count("  - layout.") == 2


@pytest.mark.parametrize("arguments", [["run"], ["fly"], ["run", "plan.yaml", "--fast"], ["topology"]])
def test_invalid_command_line_exits_2(clustersim: CommandRunner, arguments: list[str]) -> None:
    done = clustersim(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


def test_example_scenario_files_are_valid_yaml() -> None:
    for path in (Path(__file__).parents[2] / "examples").glob("*.yaml"):
        assert {"model", "cluster", "training"} <= yaml.safe_load(path.read_text()).keys()
