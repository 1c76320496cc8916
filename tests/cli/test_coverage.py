"""`clustersim coverage`: which kernels of a scenario have no measurement, with a record of its matmuls only."""

import json
import math
from pathlib import Path
from statistics import NormalDist

import pytest

from clustersim import Scenario, simulate
from clustersim.build import distinct_kernels
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.record_file import write_record
from clustersim.model.kernels import KernelKind
from clustersim.uncertainty.model_file import load_uncertainty_model
from clustersim.uncertainty.prediction_interval import INTERVAL_COVERAGE
from clustersim.uncertainty.step_features import extract_step_features
from tests.cli.conftest import CommandRunner
from tests.sentences import parts

MATMUL_SECONDS = 1e-3


def write_matmul_record(plan: Path, path: Path, accelerator: str = "h100-sxm-80gb") -> None:
    """A record in which each matmul of a plan took a millisecond, give or take 2 %."""
    samples = [
        KernelSample(
            kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches,
            TimeStatistics(MATMUL_SECONDS, 0.98 * MATMUL_SECONDS, 1.02 * MATMUL_SECONDS, 20),
        )
        for kernel in distinct_kernels(Scenario.load(plan))
        if kernel.kind is KernelKind.MATMUL and kernel.shape is not None
    ]  # fmt: skip
    device = DeviceInfo(accelerator, "a test's GPU")
    write_record(
        CalibrationRecord(device, MeasurementConditions("2026-11-20", "none", "made up"), tuple(samples)), path
    )


def test_uncovered_kernels_are_listed_with_their_share(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    write_matmul_record(plan, tmp_path / "gpu.json")
    done = clustersim("coverage", plan, "--set", "cost.record=gpu.json", "--json", "-")
    coverage = json.loads(done.stdout)
    assert sum(line["share"] for line in coverage["entries"]) == pytest.approx(1.0)
    kinds = {line["kind"]: line["covered"] for line in coverage["entries"]}
    assert kinds["matmul"]
    assert not any(covered for kind, covered in kinds.items() if kind != "matmul")
    covered = [line for line in coverage["entries"] if line["covered"]]
    measured = sum(line["share"] for line in covered)
    assert coverage["provenance_share"]["measured"] == pytest.approx(measured)
    for line in covered:  # measurement spread plus in-situ slowdown
        assert line["error"] == pytest.approx(0.02 + line["in_situ_slowdown"] - 1.0)
    table = clustersim("coverage", plan, "--set", "cost.record=gpu.json").stdout
    assert "a test's GPU" in table
    assert "matmul" not in table
    assert "clustersim calibrate --for" in table


def test_measured_kernels_narrow_the_prediction_interval(plan: Path, tmp_path: Path) -> None:
    """Measured kernels err by 2 % and their in-situ slowdown; the others by the deviations of published runs."""
    write_matmul_record(plan, tmp_path / "gpu.json")
    result = simulate(Scenario.load(plan, [f"cost.record={tmp_path / 'gpu.json'}"]))
    measured, total_seconds = result.provenance_shares["measured"], sum(item.seconds for item in result.busy_time_items)
    in_situ_error = (
        sum(item.seconds * (item.in_situ_slowdown - 1.0) for item in result.busy_time_items if item.error is not None)
        / total_seconds
    )
    error = 0.02 * measured + in_situ_error
    plain = simulate(Scenario.load(plan))
    experience, features = (
        load_uncertainty_model(),
        extract_step_features(result.scenario, result.breakdown.launch_share),
    )
    deviation = math.sqrt(experience.error_variance(features, 1.0 - measured))
    low, high = result.step_time_interval
    normal = measured * NormalDist().inv_cdf(0.95)
    quantiles = (experience.quantiles, experience.unstated_quantiles)  # the plan names no framework
    ends = [end for choice in quantiles for end in choice.ends(INTERVAL_COVERAGE)]
    fast, slow = min(*ends, -normal), max(*ends, normal)
    assert high == pytest.approx(result.step_time * (1 + error) * math.exp(slow * deviation))
    assert low == pytest.approx(result.step_time / (1 + error) * math.exp(fast * deviation))
    assert deviation < math.sqrt(experience.error_variance(features))
    assert in_situ_error > 0.01
    assert "narrowed" in result.interval_description
    assert "narrowed" not in plain.interval_description


def test_record_of_another_accelerator_must_be_scaled(clustersim: CommandRunner, plan: Path, tmp_path: Path) -> None:
    write_matmul_record(plan, tmp_path / "gpu.json", accelerator="h200-sxm-141gb")
    rejected = clustersim("run", plan, "--set", "cost.record=gpu.json")
    assert rejected.returncode == 2
    assert parts("measured on h200-sxm-141gb ... cluster has h100-sxm-80gb").search(rejected.stderr)
    scaled = ["cost.record.file=gpu.json", "cost.record.scale.bandwidth=0.7"]
    done = clustersim("run", plan, "--set", scaled[0], "--set", scaled[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"version": 1, "device"', "is not valid JSON"),
        ('{"version": 7}', "version: is 7, and this clustersim reads 3"),
        ('{"version": 3}', "is no calibration record: device is missing"),
    ],
)
def test_broken_record_has_a_one_line_error(
    clustersim: CommandRunner, plan: Path, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "broken.json").write_text(content)
    done = clustersim("check", plan, "--set", "cost.record=broken.json")
    assert done.returncode == 2
    assert "broken.json" in done.stderr
    assert message in done.stderr


def test_unknown_record_name_is_rejected(clustersim: CommandRunner, plan: Path) -> None:
    done = clustersim("check", plan, "--set", "cost.record=h100")
    assert done.returncode == 2
    assert "there is no record 'h100'" in done.stderr
