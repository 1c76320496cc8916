"""`clustersim diff` of a measured trace and its predicted step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import BASE_MAPPING, CommandRunner, write_plan
from tests.interop.synthetic_profiles import SyntheticProfile, three_steps
from tests.sentences import parts

SINGLE_GPU_MAPPING = {**BASE_MAPPING, "cluster": {"name": "dgx-h100", "gpus": 1}, "layout": {}}


def diff_json(clustersim: CommandRunner, *arguments: str | Path) -> dict[str, Any]:
    done = clustersim("diff", *arguments, "--json", "-")
    assert done.stderr == ""
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def total_absolute_delta(table_rows: list[dict[str, Any]]) -> float:
    return sum(abs(row["delta"]) for row in table_rows)


def test_exported_trace_equals_its_prediction(clustersim: CommandRunner, plan: Path) -> None:
    clustersim("run", plan, "--kineto", "traces", "--ranks", "all", "--quiet")
    difference = diff_json(clustersim, "traces", plan)
    step = difference["second"]["step_time_s"]
    assert difference["delta"]["step_time_s"] == pytest.approx(0.0, abs=1e-8)
    assert total_absolute_delta(difference["categories_s"]) < 1e-6 * step
    assert total_absolute_delta(difference["communication_s"]) < 1e-6 * step
    assert difference["waiting_s"]["first"] == pytest.approx(0.0, abs=1e-6 * step)
    assert all(total_absolute_delta(row["categories_s"]) < 1e-6 * step for row in difference["ranks"])
    for row in (*difference["kinds"], *difference["collectives"], *difference["matmuls"]):
        assert row["count"]["first"] == row["count"]["second"]
        assert row["seconds"]["delta"] == pytest.approx(0.0, abs=1e-6 * step)
    assert [row["rank"] for row in difference["ranks"]] == list(range(8))
    assert {row["collective"] for row in difference["collectives"]} > {"all_reduce", "send_recv"}
    for first, second in zip(difference["first"]["streams"], difference["second"]["streams"], strict=True):
        assert first == pytest.approx(second, abs=1e-8)


def test_recompute_appears_in_kernel_counts(clustersim: CommandRunner, plan: Path) -> None:
    """Full recompute doubles the forward kernels and changes nothing else."""
    clustersim("run", plan, "--kineto", "traces", "--ranks", "0,4", "--quiet")
    difference = diff_json(clustersim, "traces", plan, "--set", "training.recompute=full")
    kinds = {row["kind"]: row for row in difference["kinds"]}
    assert kinds["norms"]["count"]["second"] > kinds["norms"]["count"]["first"]
    assert kinds["optimizer"]["count"]["second"] == kinds["optimizer"]["count"]["first"]
    plain = json.loads(clustersim("run", plan, "--json", "-").stdout)["step_time_s"]
    assert difference["first"]["step_time_s"] == pytest.approx(plain, rel=1e-6)
    changed = json.loads(clustersim("run", plan, "--set", "training.recompute=full", "--json", "-").stdout)
    assert difference["second"]["step_time_s"] == pytest.approx(changed["step_time_s"], rel=1e-9)
    assert parts("A has no traces of ranks 1, 2, 3, 5 and 2 more ...").fullmatch(difference["notes"][0])


def test_a_step_of_a_cpu_has_its_operators(clustersim: CommandRunner, tmp_path: Path) -> None:
    """Without a GPU the host's own operators are the kernels, where the scenario's accelerator is a CPU."""
    plan = write_plan(tmp_path, {**BASE_MAPPING, "cluster": {"name": "laptop", "gpus": 1}, "layout": {}})
    profile = SyntheticProfile()
    profile.content["deviceProperties"] = []
    for number in range(3):
        begin = 1000.0 + 100.0 * number
        profile.add_step(number, begin, 100.0)
        operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": begin + 10.0, "dur": 60.0}
        profile.events.append({**operator, "args": {"External id": number, "Input Dims": [[64, 32], [32, 16]]}})
    difference = diff_json(clustersim, profile.write(tmp_path / "measured.json"), plan)
    assert difference["first"]["step_time_s"] == pytest.approx(100e-6)
    (matmuls,) = (row for row in difference["kinds"] if row["kind"] == "matmuls")
    assert (matmuls["count"]["first"], matmuls["seconds"]["first"]) == (1, pytest.approx(60e-6))


def test_profile_table_has_measured_and_predicted_times(clustersim: CommandRunner, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, SINGLE_GPU_MAPPING)
    three_steps().write(tmp_path / "measured.json")
    done = clustersim("diff", "measured.json", plan, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    first, second, third, *other_lines = done.stdout.splitlines()
    assert first.startswith("measured 120.0 us, predicted ")
    assert parts("A: measured.json ... median of 3 steps, 1 rank, NVIDIA H100 80GB HBM3)").fullmatch(second)
    assert third == f"B: {plan}"
    for text in (
        "exposed communication",
        "matmuls",
        "longest matmuls",
        "all_reduce",
        "streams",
        "idle",
    ):
        assert any(text in line for line in other_lines), text
    assert "\x1b" not in done.stdout


def test_oom_scenario_is_compared_with_a_note(clustersim: CommandRunner, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, {**SINGLE_GPU_MAPPING, "model": "llama3-70b"})
    three_steps().write(tmp_path / "measured.json")
    done = clustersim("diff", "measured.json", plan)
    assert done.returncode == 3
    assert "note: B does not fit in memory" in done.stdout


def test_result_file_predicts_as_its_scenario(clustersim: CommandRunner, plan: Path) -> None:
    clustersim("run", plan, "--kineto", "traces", "--ranks", "0", "--json", "result.json", "--quiet")
    first, second = (diff_json(clustersim, "traces", prediction) for prediction in (plan, "result.json"))
    assert second["second"]["title"] == "plan (result.json)"
    assert {**second, "second": first["second"]} == first


@pytest.mark.parametrize(("cluster", "is_noted"), [("dgx-h100", False), ("dgx-a100", True)])
def test_different_gpu_model_is_noted(clustersim: CommandRunner, tmp_path: Path, cluster: str, is_noted: bool) -> None:
    plan = write_plan(tmp_path, {**SINGLE_GPU_MAPPING, "cluster": {"name": cluster, "gpus": 1}})
    three_steps().write(tmp_path / "measured.json")
    notes = diff_json(clustersim, "measured.json", plan)["notes"]
    assert any(parts("NVIDIA H100 80GB HBM3 ... a100-sxm-80gb").search(note) for note in notes) is is_noted


INVALID_CASES: dict[str, tuple[list[str], str]] = {
    "not JSON": (["broken.json.gz", "plan.yaml"], "broken.json.gz: is not valid gzip"),
    "truncated": (["truncated.json", "plan.yaml"], "truncated.json: is not valid JSON, or truncated"),
    "another tool": (["chrome.json", "plan.yaml"], "chrome.json: schemaVersion: nothing is not 1"),
    "no steps": (["stepless.json", "plan.yaml"], "stepless.json: marks no steps (ProfilerStep#N)"),
    "nothing there": (["empty", "plan.yaml"], "empty: has no trace; their names end in .json or .json.gz"),
    "missing": (["missing.json.gz", "plan.yaml"], "missing.json.gz: cannot be read"),
    "no scenario": (["one.json"], "one.json is a measured trace; name the scenario that predicts it"),
    "the wrong way round": (["plan.yaml", "one.json"], "one.json is a measured trace; name it first"),
    "other ranks": (["one.json", "plan.yaml"], "one.json: is of 1 rank, and plan.yaml has 8 GPUs"),
    "a page": (["one.json", "plan.yaml", "--html", "page.html"], "--html page.html: a measured trace is compared in"),
    "over the trace": (["one.json", "plan.yaml", "--json", "one.json"], "is one of the files that are read"),
    "an illegal change": (["one.json", "plan.yaml", "--set", "layout.tpp=1"], "layout.tpp: unknown key"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_CASES)
def test_invalid_profile_diff_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, case: str
) -> None:
    arguments, message = INVALID_CASES[case]
    (tmp_path / "broken.json.gz").write_text("{}")
    (tmp_path / "truncated.json").write_text('{"traceEvents": [')
    (tmp_path / "chrome.json").write_text('{"traceEvents": []}')
    (tmp_path / "empty").mkdir()
    three_steps().write(tmp_path / "one.json")
    SyntheticProfile().add_kernel("x", 1.0, 2.0, 3.0).write(tmp_path / "stepless.json")
    done = clustersim("diff", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert plan.exists()


def test_an_interrupted_operator_of_a_cpu_is_still_one_kernel(clustersim: CommandRunner, tmp_path: Path) -> None:
    """Where the operating system ran something else within the allocation of one of three equal products.

    Around each is DTensor's operator of the same name, which dispatches it and takes longer.
    """
    plan = write_plan(tmp_path, {**BASE_MAPPING, "cluster": {"name": "laptop", "gpus": 1}, "layout": {}})
    profile = SyntheticProfile()
    for number, interruption in enumerate((0.0, 50.0, 0.0)):
        begin = 1000.0 + 200.0 * number
        profile.add_step(number, begin, 200.0)
        spans = ("mm", 8.0, 130.0), ("mm", 10.0, 40.0 + interruption), ("zeros", 12.0, 4.0 + interruption)
        for name, start, duration in spans:
            operator = {"ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "pid": 7, "tid": 7}
            times = {"ts": begin + start, "dur": duration, "args": {"External id": number}}
            profile.events.append({**operator, **times})
    profile.content["deviceProperties"] = []
    difference = diff_json(clustersim, profile.write(tmp_path / "measured.json"), plan)
    (products,) = (row for row in difference["kinds"] if row["count"]["first"])
    assert (products["kind"], products["seconds"]["first"]) == ("matmuls", pytest.approx(40e-6))
