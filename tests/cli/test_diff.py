"""`clustersim diff` of two scenarios or results: changed inputs, differences and error messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.cli.diff import show_difference
from clustersim.cli.outputs import Outputs
from tests.cli.conftest import BASE_MAPPING, CommandRunner, write_plan
from tests.sentences import parts


def diff_json(clustersim: CommandRunner, *arguments: str | Path) -> dict[str, Any]:
    done = clustersim("diff", *arguments, "--json", "-")
    assert done.stderr == ""
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def step_time(clustersim: CommandRunner, *arguments: str | Path) -> float:
    seconds: float = json.loads(clustersim("run", *arguments, "--json", "-").stdout)["step_time_s"]
    return seconds


def write_result(clustersim: CommandRunner, plan: Path, **changes: Any) -> Path:
    """The file written by `run --json`, with changed keys."""
    file = plan.parent / "result.json"
    clustersim("run", plan, "--json", file, "--quiet")
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))
    return file


def test_override_makes_the_second_scenario(clustersim: CommandRunner, plan: Path) -> None:
    difference = diff_json(clustersim, plan, "--set", "layout.tp=4", "--set", "layout.dp=1")
    assert difference["inputs"] == [
        {"key": "layout.tp", "first": 2, "second": 4},
        {"key": "layout.dp", "first": 2, "second": 1},
    ]
    first, second = (
        step_time(clustersim, plan),
        step_time(clustersim, plan, "--set", "layout.tp=4", "--set", "layout.dp=1"),
    )
    assert (difference["first"]["step_time_s"], difference["second"]["step_time_s"]) == (first, second)
    assert difference["delta"]["step_time_s"] == second - first
    assert sum(category["delta"] for category in difference["categories_s"]) == pytest.approx(second - first, rel=1e-6)
    assert difference["second"]["title"] == f"{plan} with layout.tp=4, layout.dp=1"


def test_two_files_and_an_override_of_the_second(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other_plan = write_plan(tmp_path / "other", {**BASE_MAPPING, "schedule": "gpipe", "name": "the other"})
    difference = diff_json(clustersim, plan, other_plan, "--set", "training.sequence=512")
    assert [change["key"] for change in difference["inputs"]] == ["name", "schedule", "training.sequence"]
    assert difference["second"]["title"] == f"the other ({other_plan}) with training.sequence=512"
    (note,) = difference["notes"]
    assert parts("B has 0.5 times the tokens ... tokens/s per GPU").search(note)


def test_diff_prints_plain_text_and_writes_the_page(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    done = clustersim("diff", plan, "--set", "schedule.interleaved.chunks=2", "--html", "page.html", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("B's step takes ")
    for text in ("schedule", "1f1b", "interleaved", "tokens/s per GPU", "peak memory", "✓ fits", "B - A"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout
    assert "page.html" in done.stdout.splitlines()[-1]
    assert "timeline-b" in (tmp_path / "page.html").read_text()


def test_result_file_is_used_as_its_scenario(clustersim: CommandRunner, plan: Path) -> None:
    file = write_result(clustersim, plan)
    assert diff_json(clustersim, plan, file)["inputs"] == []
    difference = diff_json(clustersim, file, "--set", "schedule=gpipe")
    assert [change["key"] for change in difference["inputs"]] == ["schedule"]
    assert difference["notes"] == []
    assert difference["first"]["title"] == f"plan ({file})"


def test_outdated_result_notes_the_changed_step_time(clustersim: CommandRunner, plan: Path) -> None:
    current = step_time(clustersim, plan)
    file = write_result(clustersim, plan, step_time_s=current / 1.25)
    (note,) = diff_json(clustersim, file, plan)["notes"]
    assert note.startswith(f"A: {file} recorded a step of ")
    assert "(+25.00%)" in note
    rounded = write_result(clustersim, plan, step_time_s=current * (1 + 1e-9))
    assert diff_json(clustersim, rounded, plan)["notes"] == []
    changed = diff_json(
        clustersim, plan, file, "--set", "schedule=gpipe"
    )  # the result has no step time of the changed scenario
    assert changed["notes"] == []


def test_paths_in_a_result_are_relative_to_its_file(clustersim: CommandRunner, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}
    config = {"model_type": "llama", "intermediate_size": 1024, "max_position_embeddings": 2048, **model}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = write_result(clustersim, write_plan(tmp_path, {**BASE_MAPPING, "model": "config.json"}))
    assert diff_json(clustersim, file, "--set", "schedule=gpipe")["first"]["step_time_s"] > 0
    (tmp_path / "config.json").unlink()
    done = clustersim("diff", file, "--set", "schedule=gpipe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.json" in done.stderr
    assert "looked for next to its file" in done.stderr


def test_return_value_is_whether_the_second_fits(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, BASE_MAPPING)
    oom_plan = write_yaml(tmp_path / "big.yaml", {**BASE_MAPPING, "model": "llama3-70b"})
    no_table = Outputs(table=False)
    assert show_difference(plan, None, ["schedule=gpipe"], no_table)
    assert not show_difference(plan, oom_plan, [], no_table)
    assert show_difference(oom_plan, plan, [], no_table)


def write_yaml(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


INVALID_CASES: dict[str, tuple[list[str], str]] = {
    "one file alone": (["plan.yaml"], "plan.yaml alone differs from nothing"),
    "missing": (["missing.yaml", "plan.yaml"], "missing.yaml: cannot be read"),
    "second missing": (["plan.yaml", "missing.json"], "missing.json: cannot be read"),
    "a list": (["plan.yaml", "list.json"], "list.json: holds a list"),
    "broken": (["broken.json", "plan.yaml"], "broken.json: is not valid JSON"),
    "neither": (["plan.yaml", "neither.json"], "neither.json: is neither a scenario nor a result"),
    "no result": (["half.json", "plan.yaml"], "half.json: has a scenario, but not the name and step_time_s"),
    "old keys": (["old.json", "plan.yaml"], "old.json: lay_out: unknown key; did you mean layout?"),
    "not a scenario": (["plan.yaml", "other.yaml"], "colour: unknown key"),
    "unknown key": (["plan.yaml", "--set", "layout.tpp=4"], "layout.tpp: unknown key"),
    "no value": (["plan.yaml", "--set", "layout.tp"], "write a dotted key and a value"),
    "illegal": (["plan.yaml", "--set", "layout.tp=3"], "tp 3"),
    "no directory": (["plan.yaml", "--set", "schedule=gpipe", "--html", "no/page.html"], "there is no directory no"),
    "a directory": (["plan.yaml", "--set", "schedule=gpipe", "--html", "."], "is a directory"),
    "page over input": (["plan.yaml", "--set", "steps=2", "--html", "plan.yaml"], "is one of the files that are read"),
    "json over the second": (["plan.yaml", "again.yaml", "--json", "again.yaml"], "is one of the files that are read"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_CASES)
def test_invalid_diff_has_a_one_line_error(clustersim: CommandRunner, plan: Path, tmp_path: Path, case: str) -> None:
    arguments, message = INVALID_CASES[case]
    files = {
        "list.json": "[1, 2]",
        "broken.json": "{",
        "neither.json": '{"events": []}',
        "half.json": json.dumps({"scenario": BASE_MAPPING, "step_time_s": "fast"}),
        "old.json": json.dumps({"scenario": {**BASE_MAPPING, "lay_out": {}}, "step_time_s": 1.0, "name": "old"}),
        "other.yaml": "colour: red\n",
        "again.yaml": plan.read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = clustersim("diff", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert plan.read_text() == yaml.safe_dump(BASE_MAPPING)
    assert not (tmp_path / "page.html").exists()
