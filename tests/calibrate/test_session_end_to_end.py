"""From the command to the record, and from the record to a step: all parts of a session on a GPU, as a stand-in."""

import gc
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calibrate.command import main
from clustersim.build import _rank_devices, distinct_kernels
from clustersim.cost.calibration_record import (
    COPY,
    CalibrationRecord,
    HostState,
    MeasurementOutcome,
    family_of,
    signature_of,
)
from clustersim.cost.record_file import read_record
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
from tests.calibrate.fake_gpu import Chip  # noqa: E402

PLAN = """
model: {preset: llama-tiny, layers: 1, hidden: 1024, ffn: 2048, heads: 8, kv_heads: 2, head_dim: 128, vocab: 1024}
cluster: {name: dgx-h100, gpus: 8}
layout: {tp: 2, dp: 4, data: zero1}
training: {sequence: 2048, global_batch: 8}
"""
# A product of the filler takes 8 ms here, so that a soak is some thousand of them.
SLOW = Chip(flop_per_cycle=4096.0 * 132 / 64, cache=2.0**20, heat=2.0)
SECONDS = {"soak": 20.0, "kernels": 25.0, "chain": 3.0, "host": 0.5, "residual": 2.0}
SUSTAINED = pytest.approx(1e-6 * SLOW.sustained, rel=0.03)


@dataclass(frozen=True)
class Session:
    """What a session left behind. said: on stderr."""

    record: CalibrationRecord
    path: Path
    scenario: Scenario
    gpu: Any
    printed: str
    said: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One session for all tests, of fewer runs than a real one has, each of them whole."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched, chdir(folder):
        cuda = _installed(patched)
        Path("plan.yaml").write_text(PLAN)
        printed, said = _run(cuda, patched)
        path = folder / "r.json"
        yield Session(read_record(path), path, Scenario.load("plan.yaml"), cuda.gpu(), printed, said)


def _installed(patched: pytest.MonkeyPatch) -> FakeCuda:
    for module, name, value in (
        (copy_benchmark, "_SIZES", (2**20, 2**24)),
        (copy_benchmark, "_LAUNCHES", 200),
        (measure, "_QUEUED", 8),
        (measure, "_COPIES", 4),
        (session, "_LONGEST", 0.01),
        (chain, "TURNS", 1),
        (host, "_FEWEST", 1),
        (host, "_MOST", 1),
    ):
        patched.setattr(module, name, value)
    for part in STAGES:
        patched.setattr(type(part), "minutes", SECONDS[part.name])
    patched.setattr("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"])
    cuda = FakeCuda(SLOW).install(patched)
    fake_nvml.install(cuda, patched)
    FakeCupti(cuda, patched)
    return cuda


def _run(cuda: FakeCuda, patched: pytest.MonkeyPatch) -> tuple[str, str]:
    from io import StringIO

    out, err = StringIO(), StringIO()
    patched.setattr("sys.stdout", out)
    patched.setattr("sys.stderr", err)
    budget = f"{sum(SECONDS.values())}s"
    with fake_tensors.on(cuda):
        status = main(["--for", "plan.yaml", "--device", "cuda", "-o", "r.json", "--budget", budget])
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def test_every_part_is_measured(whole: Session) -> None:
    assert "not measured" not in whole.said
    assert [line.split(":")[0] for line in whole.said.splitlines() if line.endswith(" s)")] == list(SECONDS)
    assert "31 kernels" not in whole.printed and "kernels: 31 measured" in whole.printed
    gc.collect()
    assert whole.gpu.allocated == 0.0  # and all memory is given back


def test_the_soak_ends_at_the_sustained_clock_and_the_power_limit(whole: Session) -> None:
    soak = [moment for moment in whole.record.moments if moment.part == "soak"]
    assert soak[0].state.sm_clock_mhz > 1.2 * soak[-1].state.sm_clock_mhz
    assert soak[-1].state.sm_clock_mhz == SUSTAINED
    assert [telemetry_sample.state.power_w for telemetry_sample in soak] == pytest.approx(
        [SLOW.limit_w] * len(soak), rel=0.01
    )
    assert "power 700 W" in whole.said


def test_moments_are_in_order_and_of_parts_that_last(whole: Session) -> None:
    moments = whole.record.moments
    assert [moment.seconds for moment in moments] == sorted(telemetry_sample.seconds for telemetry_sample in moments)
    assert {"soak", "kernels"} <= {item.part for item in moments} <= set(SECONDS)


def test_every_kernel_has_a_row_under_load(whole: Session) -> None:
    kernels = whole.record.kernels
    assert {signature_of(distinct_kernel) for distinct_kernel in distinct_kernels(whole.scenario)} == {
        row.signature for row in kernels
    }
    assert {(row.outcome, row.source) for row in kernels} == {(MeasurementOutcome.MEASURED, "")}
    assert all(row.under is not None and row.under.power_w > 0.5 * SLOW.limit_w for row in kernels)
    assert all(row.under is not None and row.under.sm_clock_mhz == SUSTAINED for row in kernels)


def test_the_machine_is_measured(whole: Session) -> None:
    record = whole.record
    assert (record.device.accelerator, record.device.power_limit_w) == ("h100-sxm-80gb", SLOW.limit_w)
    assert {row.route for row in record.copies} == {"device", "host_to_device", "device_to_host"}
    assert record.launch_interval == pytest.approx(SLOW.launch, rel=0.02)
    (beside,) = record.beside
    assert beside.beside == COPY and beside.kernel.time is not None
    assert beside.together.seconds <= 1.02 * beside.kernel.time.seconds, "the stand-in's streams share nothing"
    (gpu,) = record.gpus
    assert gpu.place == "cuda:0" and gpu.under is not None and gpu.under.sm_clock_mhz == SUSTAINED


def test_large_kernels_take_in_a_step_what_they_take_alone(whole: Session) -> None:
    """A stand-in's kernels know nothing of each other but through the clock, which has fallen before, and its cache."""
    factors = {row.family: row.factor for row in whole.record.chain}
    assert {family_of(row.signature) for row in whole.record.kernels if row.kind.value == "matmul"} <= factors.keys()
    assert factors["matmul bf16"] == pytest.approx(1.0, rel=0.02)
    assert factors["attention_forward bf16"] == pytest.approx(1.0, rel=0.02)
    assert factors["attention_backward bf16"] == pytest.approx(1.0, rel=0.02)


def test_the_host_is_measured_in_every_state_that_can_be_had(whole: Session) -> None:
    found = {row.state: row for row in whole.record.host}
    assert {HostState.EAGER, HostState.GRAPH} <= found.keys()
    assert 0.5 * SLOW.launch < found[HostState.EAGER].forward < 5 * SLOW.launch
    assert found[HostState.GRAPH].forward == pytest.approx(SLOW.launch), "one launch for the pass"
    for state in set(HostState) - found.keys():
        assert f"host: {state.value} is left out: " in whole.said


def test_steps_are_what_they_are_predicted_to_be(whole: Session) -> None:
    """Of kernels with rows; not held to it: another microbatch, whose kernels are fitted to a chip like no other."""
    steps = {row.what: row for row in whole.record.steps}
    assert len(steps) == 2
    assert steps["1 layer, 2 microbatches of 1"].error == pytest.approx(0.0, abs=0.02)


def test_a_simulated_step_has_measured_kernels_as_a_step_has_them(whole: Session) -> None:
    """The slowest of eight GPUs is at most some percent slower than the one that was measured."""
    scenario = Scenario.load(whole.path.parent / "plan.yaml", [f"cost.record={whole.path}"])
    assert simulate(scenario).provenance_shares["measured"] > 0.0
    (machine,) = _rank_devices(scenario).models
    times = {row.signature: row.time for row in whole.record.kernels}
    factors = {row.family: row.factor for row in whole.record.chain}
    for kernel in distinct_kernels(scenario):
        timing, known = machine.kernels.time_kernel(kernel), signature_of(kernel)
        expected = times[known].seconds * factors.get(family_of(known), 1.0)
        assert timing.provenance is Provenance.MEASURED
        assert timing.seconds == pytest.approx(expected, rel=0.05)


def test_the_report_says_every_part(whole: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(whole.path), "--html", str(whole.path.with_suffix(".html"))]) == 0
    text = capsys.readouterr().out
    for words in ("NVIDIA H100 80GB HBM3", "power 700 W", "host to device", "cuda graph", "1 layer, 2 microbatches"):
        assert words in text
    assert whole.path.with_suffix(".html").stat().st_size > 10_000
