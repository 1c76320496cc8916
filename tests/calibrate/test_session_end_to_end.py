"""End to end on a fake GPU: from the command to a record, and from the record to a simulated step."""

import gc
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calibrate.command import main
from clustersim.build import _rank_devices, distinct_kernels
from clustersim.cost.calibration_record import COPY, CalibrationRecord, family_of, signature_of
from clustersim.cost.record_file import read_record
from clustersim.cost.record_kinds import LaunchMode, MeasurementOutcome
from clustersim.cost.timing import Provenance
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

torch = pytest.importorskip("torch")
pytest.importorskip("calibrate.devices.device")
fake_nvml = pytest.importorskip("tests.calibrate.fake_nvml")
from calibrate.host import measure as host  # noqa: E402
from calibrate.in_situ import measure as chain  # noqa: E402 - after torch is known to be there
from calibrate.kernels import copy_benchmark, measure, session  # noqa: E402
from calibrate.stages.plan import STAGES  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_cupti import FakeCupti  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip  # noqa: E402

pytestmark = pytest.mark.slow

SCENARIO_YAML = """
model: {preset: llama-tiny, layers: 1, hidden: 1024, ffn: 2048, heads: 8, kv_heads: 2, head_dim: 128, vocab: 1024}
cluster: {name: dgx-h100, gpus: 8}
layout: {tp: 2, dp: 4, data: zero1}
training: {sequence: 2048, global_batch: 8, fused: true, loss: vocab_parallel, attention: flash,
  overheads: {accumulation: fused}}
"""
# A matmul of the load generator takes 8 ms here, so that burn-in is some thousand of them.
SLOW_CHIP = FakeChip(flop_per_cycle=4096.0 * 132 / 64, cache=2.0**20, heat=2.0)
STAGE_SECONDS = {"burn_in": 20.0, "kernels": 25.0, "in_situ": 3.0, "host": 0.5, "holdout": 2.0}
SUSTAINED_MHZ = pytest.approx(1e-6 * SLOW_CHIP.sustained, rel=0.03)


@dataclass(frozen=True)
class SessionResult:
    """What a session wrote."""

    record: CalibrationRecord
    path: Path
    scenario: Scenario
    gpu: Any
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def finished_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionResult]:
    """One session for all tests, with fewer runs than a real one."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        cuda = _install_fakes(patch)
        Path("plan.yaml").write_text(SCENARIO_YAML)
        stdout, stderr = _run_calibrate(cuda, patch)
        path = folder / "r.json"
        yield SessionResult(read_record(path), path, Scenario.load("plan.yaml"), cuda.gpu(), stdout, stderr)


def _install_fakes(patch: pytest.MonkeyPatch) -> FakeCuda:
    for module, name, value in (
        (copy_benchmark, "_SIZES", (2**20, 2**24)),
        (copy_benchmark, "_LAUNCHES", 200),
        (measure, "_MAX_QUEUED_LAUNCHES", 8),
        (measure, "_MAX_COPIES", 4),
        (session, "_MAX_SAMPLE_SECONDS", 0.01),
        (chain, "MAX_ROUNDS", 1),
        (host, "_MIN_ROUNDS", 1),
        (host, "_MAX_ROUNDS", 1),
    ):
        patch.setattr(module, name, value)
    for stage in STAGES:
        patch.setattr(type(stage), "minutes", STAGE_SECONDS[stage.name])
    patch.setattr("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"])
    cuda = FakeCuda(SLOW_CHIP).install(patch)
    fake_nvml.install(cuda, patch)
    FakeCupti(cuda, patch)
    return cuda


def _run_calibrate(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> tuple[str, str]:
    from io import StringIO

    out, err = StringIO(), StringIO()
    patch.setattr("sys.stdout", out)
    patch.setattr("sys.stderr", err)
    budget = f"{sum(STAGE_SECONDS.values())}s"
    with fake_tensors.fake_cuda_tensors(cuda):
        status = main(["--for", "plan.yaml", "--device", "cuda", "-o", "r.json", "--budget", budget])
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def test_every_stage_is_measured(finished_session: SessionResult) -> None:
    assert "not measured" not in finished_session.stderr
    assert [line.split(":")[0] for line in finished_session.stderr.splitlines() if line.endswith(" s)")] == list(
        STAGE_SECONDS
    )
    assert "32 kernels" not in finished_session.stdout and "kernels: 32 measured" in finished_session.stdout
    gc.collect()
    assert finished_session.gpu.allocated == 0.0  # all device memory is released


def test_burn_in_ends_at_the_sustained_clock_and_power_limit(finished_session: SessionResult) -> None:
    samples = [candidate for candidate in finished_session.record.telemetry if candidate.stage == "burn_in"]
    assert samples[0].state.sm_clock_mhz > 1.2 * samples[-1].state.sm_clock_mhz
    assert samples[-1].state.sm_clock_mhz == SUSTAINED_MHZ
    assert [sample.state.power_w for sample in samples] == pytest.approx([SLOW_CHIP.limit_w] * len(samples), rel=0.01)
    assert "power 700 W" in finished_session.stderr


def test_telemetry_is_ordered_and_labelled_by_stage(finished_session: SessionResult) -> None:
    samples = finished_session.record.telemetry
    assert [sample.seconds for sample in samples] == sorted(telemetry_sample.seconds for telemetry_sample in samples)
    assert {"burn_in", "kernels"} <= {item.stage for item in samples} <= set(STAGE_SECONDS)


def test_every_kernel_has_a_sample_under_load(finished_session: SessionResult) -> None:
    kernels = finished_session.record.kernels
    assert {signature_of(distinct_kernel) for distinct_kernel in distinct_kernels(finished_session.scenario)} == {
        sample.signature for sample in kernels
    }
    assert {(sample.outcome, sample.source) for sample in kernels} == {(MeasurementOutcome.MEASURED, "")}
    assert all(
        sample.telemetry is not None and sample.telemetry.power_w > 0.5 * SLOW_CHIP.limit_w for sample in kernels
    )
    assert all(sample.telemetry is not None and sample.telemetry.sm_clock_mhz == SUSTAINED_MHZ for sample in kernels)


def test_device_measurements_are_complete(finished_session: SessionResult) -> None:
    record = finished_session.record
    assert (record.device.accelerator, record.device.power_limit_w) == ("h100-sxm-80gb", SLOW_CHIP.limit_w)
    assert {sample.route for sample in record.copies} == {"device", "host_to_device", "device_to_host"}
    assert record.launch_interval == pytest.approx(SLOW_CHIP.launch, rel=0.02)
    (interference,) = record.interference
    assert interference.overlapped_with == COPY and interference.kernel.time is not None
    assert interference.overlapped_time.seconds <= 1.02 * interference.kernel.time.seconds, (
        "the stand-in's streams share nothing"
    )
    (gpu,) = record.gpus
    assert gpu.device == "cuda:0" and gpu.telemetry is not None and gpu.telemetry.sm_clock_mhz == SUSTAINED_MHZ


def test_in_situ_factors_of_large_kernels_are_one(finished_session: SessionResult) -> None:
    """Fake kernels affect each other only through the clock, which has fallen before, and the cache."""
    factors = {sample.family: sample.factor for sample in finished_session.record.in_situ}
    assert {
        family_of(sample.signature) for sample in finished_session.record.kernels if sample.kind.value == "matmul"
    } <= factors.keys()
    assert factors["matmul bf16"] == pytest.approx(1.0, rel=0.02)
    assert factors["attention_forward bf16"] == pytest.approx(1.0, rel=0.02)
    assert factors["attention_backward bf16"] == pytest.approx(1.0, rel=0.02)


def test_host_is_measured_in_every_supported_state(finished_session: SessionResult) -> None:
    samples = {sample.mode: sample for sample in finished_session.record.host_launches}
    assert {LaunchMode.EAGER, LaunchMode.GRAPH} <= samples.keys()
    assert 0.5 * SLOW_CHIP.launch < samples[LaunchMode.EAGER].forward < 5 * SLOW_CHIP.launch
    assert samples[LaunchMode.GRAPH].forward == pytest.approx(SLOW_CHIP.launch), "one launch for the pass"
    for state in set(LaunchMode) - samples.keys():
        assert f"host: {state.value} is left out: " in finished_session.stderr


def test_holdout_steps_match_their_prediction(finished_session: SessionResult) -> None:
    """For kernels with samples.

    The other microbatch is excluded, since its kernels are fitted to an unrealistic chip.
    """
    steps = {sample.description: sample for sample in finished_session.record.holdout_steps}
    assert len(steps) == 2
    assert steps["1 layer, 2 microbatches of 1"].error == pytest.approx(0.0, abs=0.02)


def test_simulated_step_uses_measured_in_situ_times(finished_session: SessionResult) -> None:
    """The slowest of eight GPUs is at most a few percent slower than the measured one."""
    scenario = Scenario.load(finished_session.path.parent / "plan.yaml", [f"cost.record={finished_session.path}"])
    assert simulate(scenario).provenance_shares["measured"] > 0.0
    (machine,) = _rank_devices(scenario).models
    times = {sample.signature: sample.time for sample in finished_session.record.kernels}
    factors = {sample.family: sample.factor for sample in finished_session.record.in_situ}
    for kernel in distinct_kernels(scenario):
        timing, kernel_signature = machine.kernels.time_kernel(kernel), signature_of(kernel)
        expected = times[kernel_signature].seconds * factors.get(family_of(kernel_signature), 1.0)
        assert timing.provenance is Provenance.MEASURED
        assert timing.seconds == pytest.approx(expected, rel=0.05)


def test_report_has_every_section(finished_session: SessionResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(finished_session.path), "--html", str(finished_session.path.with_suffix(".html"))]) == 0
    text = capsys.readouterr().out
    for expected in ("NVIDIA H100 80GB HBM3", "power 700 W", "host to device", "cuda graph", "1 layer, 2 microbatches"):
        assert expected in text
    assert finished_session.path.with_suffix(".html").stat().st_size > 10_000
