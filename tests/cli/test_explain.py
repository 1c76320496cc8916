"""`clustersim explain`: comparison of a measured step time with the prediction."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import BASE_MAPPING, CommandRunner, write_plan


def predicted_seconds(clustersim: CommandRunner, plan: Path) -> float:
    seconds: float = json.loads(clustersim("run", plan, "--json", "-").stdout)["step_time_s"]
    return seconds


def test_explain_prints_verdict_breakdown_and_causes(clustersim: CommandRunner, plan: Path) -> None:
    seconds = 1.1 * predicted_seconds(clustersim, plan)
    done = clustersim("explain", plan, "--measured", f"{1e3 * seconds:.6f}ms", COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("expected ")
    for text in (
        "10.0% longer",
        "50% prediction interval",
        "90% prediction interval",
        "critical path",
        "bubble",
        "slower",
        "not a diagnosis",
    ):
        assert text in done.stdout


def test_explain_json(clustersim: CommandRunner, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, BASE_MAPPING | {"framework": "ideal"})  # without one the host is what is slow
    plain = predicted_seconds(clustersim, plan)
    done = clustersim("explain", plan, "--measured", f"{1.2 * plain} s", "--json", "-")
    explanation = json.loads(done.stdout)
    assert explanation["expected_s"] == pytest.approx(plain)
    assert explanation["difference"] == pytest.approx(0.2)
    low, high = explanation["interval_s"]
    assert explanation["inside_interval"] is (low <= explanation["measured_s"] <= high)
    assert sum(explanation["breakdown_s"].values()) == pytest.approx(plain)
    slower = next(cause for cause in explanation["causes"] if cause["name"] == "matmuls")
    assert slower["explains"]
    assert slower["share_of_gap"] == pytest.approx(1.0, abs=0.01)
    assert slower["step_time_s"] == pytest.approx(explanation["measured_s"], rel=1e-3)
    to_file = clustersim("explain", plan, "--measured", f"{1.2 * plain} s", "--json", "answer.json")
    assert json.loads((tmp_path / "answer.json").read_text()) == explanation
    assert to_file.stdout.startswith("expected ")


def test_overrides_change_the_prediction(clustersim: CommandRunner, plan: Path) -> None:
    doubled = json.loads(
        clustersim("explain", plan, "--set", "training.global_batch=16", "--measured", "1 s", "--json", "-").stdout
    )
    assert doubled["expected_s"] > 1.5 * predicted_seconds(clustersim, plan)


def test_measured_mfu_is_converted_and_its_convention_said(clustersim: CommandRunner, plan: Path) -> None:
    expected = json.loads(clustersim("run", plan, "--json", "-").stdout)
    mfu = 0.9 * expected["leading_mfu"]
    done = clustersim("explain", plan, "--measured", f"{mfu:.9f} MFU", "--json", "-")
    explanation = json.loads(done.stdout)
    assert explanation["measured_s"] == pytest.approx(expected["step_time_s"] / 0.9, rel=1e-5)
    assert explanation["mfu_attention"] == expected["leading_mfu_attention"]
    assert expected["leading_mfu_attention"] in explanation["conversion"]
    printed = clustersim("explain", plan, "--measured", f"{mfu:.2%}").stdout
    assert f"is read as MFU with {expected['leading_mfu_attention']}" in " ".join(printed.split())


@pytest.mark.parametrize(
    "measured", ["0%", "120% MFU", "4.2", "0 s", "-1 s", "4 parsecs", "", "nan", "1e400 s", "3 ns", "9000 h"]
)
def test_invalid_measured_times_have_a_one_line_error(clustersim: CommandRunner, plan: Path, measured: str) -> None:
    done = clustersim("explain", plan, "--measured", measured)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_measured_option_is_required(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("explain", plan)
    assert done.returncode == 2
    assert "--measured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml", "--measured", "4 s"), "nowhere.yaml"),
        (("plan.yaml", "--measured", "4 s", "--set", "layout.tp=3"), "tp"),
        (("plan.yaml", "--measured", "4 s", "--json", "plan.yaml"), "is one of the files that are read"),
        (("plan.yaml", "--measured", "4 s", "--json", ""), "--json needs"),
    ],
)
def test_bad_input_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert plan.name == "plan.yaml"
    done = clustersim("explain", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
