"""Host time per launch: recovered from a host with a known time per operation, on a CPU and on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from clustersim.cost.calibration_record import CalibrationRecord, HostLaunchSample, MeasurementConditions
from clustersim.cost.record_kinds import LaunchMode
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import GPT, LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - torch first

import calibrate.devices.cpu  # noqa: E402
import calibrate.host.measure  # noqa: E402
from calibrate.check.phase_timer import StepPhase  # noqa: E402
from calibrate.check.prediction import predict_step  # noqa: E402
from calibrate.check.single_process import build_single_trainer  # noqa: E402
from calibrate.check.trainer import random_batch  # noqa: E402
from calibrate.devices.device import find_device  # noqa: E402
from calibrate.host.measure import measure_host_launches  # noqa: E402
from calibrate.host.tiny_model import count_passes, tiny_plan  # noqa: E402
from calibrate.kernels import measure as kernel_rows  # noqa: E402
from calibrate.kernels.timing import QUICK  # noqa: E402
from clustersim.build import build_plan, distinct_kernels  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip  # noqa: E402
from tests.sentences import parts  # noqa: E402

EAGER, FSDP, DTENSOR, COMPILED, GRAPH = LaunchMode
OP_SECONDS = 1e-3  # host seconds of every operation
CPU_DEVICE = find_device("cpu")


class CountingHost(TorchDispatchMode):  # type: ignore[misc]
    """A host that takes a known time for every operation, and none for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))

    @property
    def now(self) -> float:
        return OP_SECONDS * self.operations


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingHost]:
    """All clocks read that host's time; flushing the cache is one operation, whatever its size."""
    counting_host = CountingHost()
    monkeypatch.setattr(calibrate.devices.cpu.CpuDevice, "cache_bytes", 1e6)
    monkeypatch.setattr(calibrate.host.measure, "perf_counter", lambda: counting_host.now)
    monkeypatch.setattr(calibrate.devices.cpu, "perf_counter_ns", lambda: round(1e9 * counting_host.now))
    with single_thread(), counting_host:
        yield counting_host


def count_operations(scenario: Scenario, host: CountingHost) -> tuple[int, int]:
    """Operations of forward and backward of one microbatch."""
    plan = build_plan(scenario)
    trainer, batch = build_single_trainer(plan, CPU_DEVICE.torch), random_batch(plan, CPU_DEVICE.torch)
    tokens, targets = batch.tokens[0], batch.targets[0]
    for _ in range(2):
        start_count = host.operations
        loss = trainer.model(tokens, targets)
        forward_end = host.operations
        loss.backward()
    return forward_end - start_count, host.operations - forward_end


@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_launch_seconds_times_launches_is_the_host_time(model: dict[str, Any], host: CountingHost) -> None:
    """The small model has the scenario's layers, in number and kind, and so the same operations."""
    scenario = small_scenario({**model, "tied_embeddings": False})
    (sample,) = measure_host_launches(scenario, CPU_DEVICE, 1e-3, [EAGER])
    forward, backward = count_operations(scenario, host)
    assert sample.forward * sample.launches[0] == pytest.approx(forward * OP_SECONDS)
    assert sample.backward * sample.launches[1] == pytest.approx(backward * OP_SECONDS)


@pytest.mark.usefixtures("host")
def test_launch_counts_are_those_of_the_simulation() -> None:
    (sample,) = measure_host_launches(small_scenario(), CPU_DEVICE, 1e-3, [EAGER])
    plan = tiny_plan(small_scenario(), CPU_DEVICE, Layout())
    assert sample.launches == tuple(counts.launch_count for counts in count_passes(plan))
    assert plan.model.layer_count == LLAMA["layers"]


def test_step_is_predicted_from_kernels_and_the_remaining_host_time(host: CountingHost) -> None:
    """Of a wider and deeper model than the measured one, on the same host."""
    scenario = small_scenario({**LLAMA, "layers": 6})
    kernels = tuple(kernel_rows.measure_sequence(distinct_kernels(scenario), CPU_DEVICE, QUICK))
    samples = measure_host_launches(scenario, CPU_DEVICE, 1e-3, [EAGER])
    device = CPU_DEVICE.describe(scenario.cluster.accelerator.name)
    record = CalibrationRecord(device, MeasurementConditions("", "", ""), kernels=kernels, host_launches=samples)
    predicted = predict_step(scenario, record).phases
    seconds_per_operation = build_plan(scenario).microbatches * OP_SECONDS
    forward, backward = (seconds_per_operation * operations for operations in count_operations(scenario, host))
    assert predicted[StepPhase.FORWARD] == pytest.approx(forward, rel=0.03)
    assert predicted[StepPhase.BACKWARD] == pytest.approx(backward, rel=0.06)
    kernels_only = predict_step(scenario, replace(record, host_launches=())).phases
    assert kernels_only[StepPhase.FORWARD] < 0.9 * forward, "kernels by themselves are less than the step"


@pytest.mark.usefixtures("host")
def test_fsdp_and_dtensor_take_more_host_time() -> None:
    """They run the same kernels, plus copies, gathers and communication; no process group is left behind."""
    eager, fsdp, dtensor = measure_host_launches(small_scenario(), CPU_DEVICE, 1e-3, [DTENSOR, FSDP, EAGER])
    assert [eager.mode, fsdp.mode, dtensor.mode] == [EAGER, FSDP, DTENSOR]
    assert fsdp.launches == eager.launches
    for wrapped in (fsdp, dtensor):
        assert wrapped.forward * wrapped.launches[0] > eager.forward * eager.launches[0]
        assert wrapped.backward * wrapped.launches[1] > eager.backward * eager.launches[1]
    assert not torch.distributed.is_initialized()
    assert len(measure_host_launches(small_scenario(), CPU_DEVICE, 1e-3, [DTENSOR, FSDP])) == 2, (
        "again, in the same process"
    )


@pytest.mark.usefixtures("host")
def test_unsupported_layer_options_do_not_change_launch_times() -> None:
    """Windows, caps, tied embeddings and the like do not affect launch times."""
    unusual = small_scenario(
        {**LLAMA, "window": 8, "attn_logit_softcapping": True, "tied_embeddings": True}, "training.recompute=full"
    )
    (sample,) = measure_host_launches(unusual, CPU_DEVICE, 1e-3, [EAGER])
    (plain,) = measure_host_launches(small_scenario(), CPU_DEVICE, 1e-3, [EAGER])
    assert sample.launches == plain.launches
    assert (sample.forward, sample.backward) == pytest.approx((plain.forward, plain.backward))


@pytest.mark.usefixtures("host")
def test_uncompilable_state_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_compile(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", failing_compile)
    assert [sample.mode for sample in measure_host_launches(small_scenario(), CPU_DEVICE, 1e-3, [EAGER, COMPILED])] == [
        EAGER
    ]
    assert capsys.readouterr().err == "host: compiled is left out: No working C++ compiler found\n"


LARGE_SCENARIO = {
    "model": {"preset": "llama3-8b", "layers": 1},
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "training": {"sequence": 4096, "global_batch": 8, "fused": False, "loss": "torch"},
}


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, **chip: float) -> Iterator[FakeCuda]:
    cuda = FakeCuda(replace(FakeChip(), **chip)).install(monkeypatch)
    with fake_tensors.fake_cuda_tensors(cuda):
        yield cuda


def measure_on_gpu(*states: LaunchMode) -> dict[LaunchMode, HostLaunchSample]:
    return {
        sample.mode: sample
        for sample in measure_host_launches(Scenario.from_mapping(LARGE_SCENARIO), find_device("cuda"), 1e-4, states)
    }


def test_gpu_host_time_is_the_launch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's host time is launches only: about one per launch that the simulation counts."""
    with fake_gpu(monkeypatch, launch=4e-6) as cuda:
        samples = measure_on_gpu(EAGER, COMPILED, GRAPH)
        per_launch = [samples[EAGER].forward, samples[EAGER].backward]
    assert set(samples) == {EAGER, COMPILED, GRAPH}
    assert all(0.5 * 4e-6 < seconds < 3 * 4e-6 for seconds in per_launch)
    assert (samples[GRAPH].forward, samples[GRAPH].backward) == pytest.approx((4e-6, 4e-6)), "one launch for each pass"
    assert samples[GRAPH].launches == samples[EAGER].launches
    assert all(sample.in_kernel_times == (0.0, 0.0) for sample in samples.values()), (
        "kernels of a GPU contain nothing of its host"
    )
    assert cuda.calls["graph"] == 2


def test_host_time_is_proportional_to_the_launch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = []
    for launch in (4e-6, 8e-6):
        with monkeypatch.context() as patch, fake_gpu(patch, launch=launch):
            samples.append(measure_on_gpu(EAGER)[EAGER])
    assert samples[1].forward == pytest.approx(2.0 * samples[0].forward)
    assert samples[1].backward == pytest.approx(2.0 * samples[0].backward)


def test_device_bound_state_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_gpu(monkeypatch, launch=4e-6, min_kernel_seconds=50e-6):
        assert measure_on_gpu(EAGER) == {}
    assert "host: eager is left out: the device was done" in capsys.readouterr().err


def test_uncapturable_graph_state_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_gpu(monkeypatch) as cuda:
        cuda.fail("graph", RuntimeError("CUDA error: operation not permitted when stream is capturing"))
        assert set(measure_on_gpu(EAGER, GRAPH)) == {EAGER}
    assert parts("host: cuda_graph ... left out: CUDA error: operation not permitted").search(capsys.readouterr().err)


def test_lost_gpu_ends_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch) as cuda:
        cuda.fail("synchronize", RuntimeError("CUDA error: an illegal memory access was encountered"), sticky=True)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            measure_on_gpu(EAGER, GRAPH)
