"""A GPU is measured as it is after hours, not in a burst: one whose clock falls under load and whose events cost."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import DeviceTelemetry, MeasurementOutcome
from tests.conftest import examples

torch = pytest.importorskip("torch")
devices = pytest.importorskip("calibrate.devices.device")
fake_nvml = pytest.importorskip("tests.calibrate.fake_nvml")
from calibrate.devices import cuda as cuda_device  # noqa: E402 - after torch is known to be there
from calibrate.devices.burn_in import burn_in  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.devices.gpu_variation import measure_gpu_variation  # noqa: E402
from calibrate.kernels import measure, pytorch_ops, selection  # noqa: E402
from calibrate.kernels.copy_interference import square_matmul  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod, measure_action  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import Chip, Work  # noqa: E402

# A product of the filler takes 8 ms here, so that a soak is some thousand of them.
SLOW = Chip(flop_per_cycle=4096.0 * 132 / 64, cache=2.0**20, heat=2.0)
LOWER = SLOW.boost / SLOW.sustained  # times longer under load: 1.41
SECONDS = 1.5e-3  # of a kernel at the boost clock
KERNEL = square_matmul(DType.BF16, 4096)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    made = FakeCuda(SLOW).install(monkeypatch)
    fake_nvml.install(made, monkeypatch)
    with fake_tensors.on(made):
        yield made


def _prepared(monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any]) -> None:
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", lambda *_: made())


def test_a_device_whose_clock_falls_is_measured_at_its_sustained_rate(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a soak, by what `calibrate` measures kernels with, over five of them and pauses of the host between."""
    device = devices.find_device("cuda")
    _prepared(monkeypatch, lambda: cuda.kernel(SECONDS))
    moments = burn_in(device, 120.0, lambda _: None)
    assert moments[0].state.sm_clock_mhz > 1.1 * moments[-1].state.sm_clock_mhz
    for size in range(1024, 6 * 1024, 1024):
        cuda.clock.advance(0.02)
        (row,) = selection.measure_kernels([square_matmul(DType.BF16, size)], device)
        assert row.time is not None and row.under is not None
        assert row.time.seconds == pytest.approx(LOWER * SECONDS, rel=0.02)
        assert row.under.sm_clock_mhz == pytest.approx(1e-6 * SLOW.sustained, rel=0.02)
        assert row.under.throttled == ("sw_power_cap",)
        assert row.under.power_w == pytest.approx(SLOW.limit_w, rel=0.1)


def test_a_burst_on_a_cold_device_is_at_its_boost_rate(cuda: FakeCuda) -> None:
    """What the proof above would miss: five samples of a millisecond each behind a kernel that only waits."""

    class Waiting:
        def launch(self, seconds: float) -> None:
            torch.cuda._sleep(int(2e9 * seconds))

    burst = MeasurementMethod(min_sample_seconds=1e-3, min_samples=5, min_span_seconds=0.0)
    found = measure_action(cuda_device.CudaStopwatch(Waiting()), cuda.kernel(SECONDS), burst)
    assert found.seconds == pytest.approx(SECONDS, rel=0.02)


def test_a_device_works_while_the_host_prepares_and_between_samples(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices.find_device("cuda")

    def slowly() -> Any:
        cuda.clock.advance(3.0)  # compiling
        return cuda.kernel(SECONDS)

    _prepared(monkeypatch, slowly)
    burn_in(device, 120.0, lambda _: None)
    began = cuda.clock.now
    row = measure.measure_kernel(KERNEL, device, MeasurementMethod())
    assert row.outcome is MeasurementOutcome.MEASURED
    assert cuda.gpu().loaded(began, cuda.clock.now) > 0.97
    assert row.time is not None
    assert row.time.seconds == pytest.approx(LOWER * SECONDS, rel=0.02)


@pytest.mark.usefixtures("cuda")
def test_a_soak_ends_when_the_clock_is_steady_and_says_so() -> None:
    """With a time constant of 2 s, 10 s drift less than 1 % when what is left of the fall is 3 % of it: after 7 s."""
    said: list[str] = []
    moments = burn_in(devices.find_device("cuda"), 120.0, said.append)
    clocks = [moment.state.sm_clock_mhz for moment in moments]
    assert 10.0 < moments[-1].seconds < 20.0
    assert clocks[-1] == pytest.approx(1e-6 * SLOW.sustained, rel=0.01)
    assert clocks[0] > 1.2 * clocks[-1]
    assert {telemetry_sample.part for telemetry_sample in moments} == {"soak"}
    assert "steady after" in said[0]


@pytest.mark.usefixtures("cuda")
def test_a_soak_that_is_too_short_says_so() -> None:
    said: list[str] = []
    moments = burn_in(devices.find_device("cuda"), 3.0, said.append)
    assert 3.0 <= moments[-1].seconds < 4.0
    assert "too short a soak" in said[0]


def test_without_a_driver_that_tells_clocks_the_pace_of_products_does(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake_nvml.install(cuda, monkeypatch)
    library.failing["nvmlInitWithFlags"] = 9
    monkeypatch.setattr("shutil.which", lambda _: None)
    moments = burn_in(devices.find_device("cuda"), 120.0, lambda _: None)
    assert moments[-1].state == DeviceTelemetry()
    assert 10.0 < moments[-1].seconds < 20.0


def test_a_cpu_is_looked_at_once() -> None:
    (moment,) = burn_in(CpuDevice(), 120.0, lambda _: None)
    assert moment.seconds == 0.0
    assert measure_gpu_variation(CpuDevice()) == ()


def test_gpus_of_a_node_are_compared_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is as fast as the first in a burst, and 20 % slower when it is warm."""
    hot = Chip(flop_per_cycle=SLOW.flop_per_cycle, sustained=SLOW.sustained / 1.2, heat=0.5, uuid="second")
    cuda = FakeCuda(Chip(flop_per_cycle=SLOW.flop_per_cycle, heat=0.5), hot).install(monkeypatch)
    fake_nvml.install(cuda, monkeypatch, order=[1, 0])
    with fake_tensors.on(cuda):
        first, second = measure_gpu_variation(devices.find_device("cuda"))
    assert (first.place, second.place) == ("cuda:0", "cuda:1")
    assert second.time.seconds / first.time.seconds == pytest.approx(1.2, rel=0.01)
    assert first.under is not None and second.under is not None
    assert first.under.sm_clock_mhz / second.under.sm_clock_mhz == pytest.approx(1.2, rel=0.01)


@given(
    seconds=st.floats(1e-6, 10e-6),
    event=st.tuples(st.floats(0.5e-6, 1.5e-6), st.floats(1.5e-6, 4e-6)),
    resolution=st.sampled_from([0.0, 0.5e-6]),
    flushed=st.booleans(),
)
@examples(24)
def test_short_kernels_are_right_whatever_events_take(
    seconds: float, event: tuple[float, float], resolution: float, flushed: bool
) -> None:
    """Each kernel in a pair of events of its own where the cache is flushed, some hundred in one where it is not."""
    with pytest.MonkeyPatch.context() as patched:
        cuda = FakeCuda(Chip(event=event, resolution=resolution)).install(patched)
        flush = cuda.kernel(2e-5, clocked=False)

        class Filling:
            def launch(self, seconds: float) -> None:
                cuda.launch(Work(seconds=max(seconds, 1e-4)))

        watch = cuda_device.CudaStopwatch(Filling(), pre_run=flush if flushed else None)
        run = cuda.kernel(seconds, clocked=False)
        method = MeasurementMethod(
            max_seconds=10.0,
            min_span_seconds=0.2 if flushed else 0.02,
            max_runs_per_sample=32 if flushed else 256,
            target_error=0.0,
            max_samples=60,
        )
        assert measure_action(watch, run, method).seconds == pytest.approx(seconds, rel=0.02)


def test_a_flush_leaves_nothing_to_be_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a cache takes its bytes over the bandwidth to be read; what was written would be driven out meanwhile."""
    chip = Chip(flop_per_cycle=SLOW.flop_per_cycle, event=(2e-6, 2e-6))
    cuda, half = FakeCuda(chip).install(monkeypatch), 0.5 * chip.cache
    method = MeasurementMethod(max_seconds=0.05, min_span_seconds=0.0)

    def read() -> None:
        cuda.launch(Work(reads=((1, half),)))

    with fake_tensors.on(cuda):
        device = devices.find_device("cuda")
        found = measure_action(device.stopwatch(flushed=True), read, method)
        assert found.seconds == pytest.approx(half / chip.bandwidth, rel=0.001)
        monkeypatch.setattr(cuda_device, "_read_buffer", lambda other, _total: other.zero_())
        written = measure_action(device.stopwatch(flushed=True), read, method)
    assert written.seconds == pytest.approx(2.0 * found.seconds, rel=0.001)
