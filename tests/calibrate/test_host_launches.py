"""The host's time for a launch: a host that takes a known time for each operation gives it back, on a CPU and a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from clustersim.cost.calibration_record import CalibrationRecord, HostLaunchSample, HostState, MeasurementConditions
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import GPT, LLAMA, one_thread, scenario

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
from tests.calibrate.fake_gpu import Chip  # noqa: E402

EAGER, FSDP, DTENSOR, COMPILED, GRAPH = HostState
TICK = 1e-3  # seconds for each operation
CPU = find_device("cpu")


class Ticking(TorchDispatchMode):  # type: ignore[misc]
    """A host that takes a known time for every operation that it runs, and none for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))

    @property
    def now(self) -> float:
        return TICK * self.operations


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticking]:
    """Everything is timed by what that host takes."""
    ticking = Ticking()
    monkeypatch.setattr(calibrate.host.measure, "perf_counter", lambda: ticking.now)
    monkeypatch.setattr(calibrate.devices.cpu, "perf_counter_ns", lambda: round(1e9 * ticking.now))
    with one_thread(), ticking:
        yield ticking


def ran(given: Scenario, host: Ticking) -> tuple[int, int]:
    """Operations of forward and of backward of one microbatch, counted one by one."""
    plan = build_plan(given)
    loop, batch = build_single_trainer(plan, CPU.torch), random_batch(plan, CPU.torch)
    tokens, targets = batch.tokens[0], batch.targets[0]
    for _ in range(2):
        begun = host.operations
        loss = loop.model(tokens, targets)
        between = host.operations
        loss.backward()
    return between - begun, host.operations - between


@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_launches_times_seconds_are_what_the_host_took(model: dict[str, Any], host: Ticking) -> None:
    """The small model's layers are the scenario's own, in number and kind, and so are their operations."""
    given = scenario({**model, "tied_embeddings": False})
    (row,) = measure_host_launches(given, CPU, 1e-3, [EAGER])
    forward, backward = ran(given, host)
    assert row.forward * row.launches[0] == pytest.approx(forward * TICK)
    assert row.backward * row.launches[1] == pytest.approx(backward * TICK)


@pytest.mark.usefixtures("host")
def test_launches_are_those_that_clustersim_counts() -> None:
    (row,) = measure_host_launches(scenario(), CPU, 1e-3, [EAGER])
    plan = tiny_plan(scenario(), CPU, Layout())
    assert row.launches == tuple(count_pass.launch_count for count_pass in count_passes(plan))
    assert plan.model.layer_count == LLAMA["layers"]


def test_a_step_is_predicted_whole_from_kernels_alone_and_the_rest_of_the_hosts_time(host: Ticking) -> None:
    """Of a model that is wider and deeper than what was measured, by the same host."""
    given = scenario({**LLAMA, "layers": 6})
    kernels = tuple(kernel_rows.measure_sequence(distinct_kernels(given), CPU, QUICK))
    rows = measure_host_launches(given, CPU, 1e-3, [EAGER])
    device = CPU.describe(given.cluster.accelerator.name)
    record = CalibrationRecord(device, MeasurementConditions("", "", ""), kernels=kernels, host=rows)
    predicted = predict_step(given, record).phases
    times = build_plan(given).microbatches * TICK
    forward, backward = (times * operations for operations in ran(given, host))
    assert predicted[StepPhase.FORWARD] == pytest.approx(forward, rel=0.03)
    assert predicted[StepPhase.BACKWARD] == pytest.approx(backward, rel=0.06)
    alone = predict_step(given, replace(record, host=())).phases
    assert alone[StepPhase.FORWARD] < 0.9 * forward, "kernels by themselves are less than the step"


@pytest.mark.usefixtures("host")
def test_hooks_and_distributed_tensors_take_the_host_longer() -> None:
    """They run the same kernels, and copies, gathers and exchanges beside them; no group is left behind."""
    eager, fsdp, dtensor = measure_host_launches(scenario(), CPU, 1e-3, [DTENSOR, FSDP, EAGER])
    assert [eager.state, fsdp.state, dtensor.state] == [EAGER, FSDP, DTENSOR]
    assert fsdp.launches == eager.launches
    for wrapped in (fsdp, dtensor):
        assert wrapped.forward * wrapped.launches[0] > eager.forward * eager.launches[0]
        assert wrapped.backward * wrapped.launches[1] > eager.backward * eager.launches[1]
    assert not torch.distributed.is_initialized()
    assert len(measure_host_launches(scenario(), CPU, 1e-3, [DTENSOR, FSDP])) == 2, "again, in the same process"


@pytest.mark.usefixtures("host")
def test_layers_that_cannot_be_built_are_not_what_is_left_out() -> None:
    """Windows, caps, tied matrices and their like change nothing of a launch."""
    odd = scenario({**LLAMA, "window": 8, "softcap": True, "tied_embeddings": True}, "training.recompute=full")
    (row,) = measure_host_launches(odd, CPU, 1e-3, [EAGER])
    (plain,) = measure_host_launches(scenario(), CPU, 1e-3, [EAGER])
    assert row.launches == plain.launches
    assert (row.forward, row.backward) == pytest.approx((plain.forward, plain.backward))


@pytest.mark.usefixtures("host")
def test_what_cannot_be_compiled_here_is_left_out_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    assert [row.state for row in measure_host_launches(scenario(), CPU, 1e-3, [EAGER, COMPILED])] == [EAGER]
    assert capsys.readouterr().err == "host: compiled is left out: No working C++ compiler found\n"


LARGE = {
    "model": {"preset": "llama3-8b", "layers": 1},
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "training": {"sequence": 4096, "global_batch": 8, "fused": False, "loss": "torch"},
}


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, **chip: float) -> Iterator[FakeCuda]:
    cuda = FakeCuda(replace(Chip(), **chip)).install(monkeypatch)
    with fake_tensors.on(cuda):
        yield cuda


def on_gpu(*states: HostState) -> dict[HostState, HostLaunchSample]:
    return {
        row.state: row for row in measure_host_launches(Scenario.from_mapping(LARGE), find_device("cuda"), 1e-4, states)
    }


def test_on_a_gpu_launches_are_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the stand-in's host does is launch: as often as a real one, for some launches of ours."""
    with gpu(monkeypatch, launch=4e-6) as cuda:
        found = on_gpu(EAGER, COMPILED, GRAPH)
        per_launch = [found[EAGER].forward, found[EAGER].backward]
    assert set(found) == {EAGER, COMPILED, GRAPH}
    assert all(0.5 * 4e-6 < item < 3 * 4e-6 for item in per_launch)
    assert (found[GRAPH].forward, found[GRAPH].backward) == pytest.approx((4e-6, 4e-6)), "one launch for each pass"
    assert found[GRAPH].launches == found[EAGER].launches
    assert all(row.alone == (0.0, 0.0) for row in found.values()), "kernels of a GPU contain nothing of its host"
    assert cuda.calls["graph"] == 2


def test_a_host_twice_as_slow_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for launch in (4e-6, 8e-6):
        with monkeypatch.context() as patched, gpu(patched, launch=launch):
            found.append(on_gpu(EAGER)[EAGER])
    assert found[1].forward == pytest.approx(2.0 * found[0].forward)
    assert found[1].backward == pytest.approx(2.0 * found[0].backward)


def test_a_gpu_that_is_behind_its_host_is_not_taken_for_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with gpu(monkeypatch, launch=4e-6, least=50e-6):
        assert on_gpu(EAGER) == {}
    assert "host: eager is left out: the device was done" in capsys.readouterr().err


def test_a_pass_that_cannot_be_captured_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with gpu(monkeypatch) as cuda:
        cuda.fail("graph", RuntimeError("CUDA error: operation not permitted when stream is capturing"))
        assert set(on_gpu(EAGER, GRAPH)) == {EAGER}
    assert "host: cuda_graph is left out: CUDA error: operation not permitted" in capsys.readouterr().err


def test_a_gpu_that_cannot_be_used_any_more_ends_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch) as cuda:
        cuda.fail("synchronize", RuntimeError("CUDA error: an illegal memory access was encountered"), sticky=True)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            on_gpu(EAGER, GRAPH)
