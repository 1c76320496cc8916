"""GPUs are measured under sustained load: clocks fall with heat, and events take time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import DeviceTelemetry
from clustersim.cost.record_kinds import MeasurementOutcome
from tests.conftest import examples

torch = pytest.importorskip("torch")
device_module = pytest.importorskip("calibrate.devices.device")
fake_nvml = pytest.importorskip("tests.calibrate.fake_nvml")
from calibrate.devices import cuda as cuda_device  # noqa: E402 - after torch is known to be there
from calibrate.devices.burn_in import burn_in  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.devices.gpu_variation import measure_gpu_variation  # noqa: E402
from calibrate.kernels import measure, pytorch_ops  # noqa: E402
from calibrate.kernels.copy_interference import square_matmul  # noqa: E402
from calibrate.kernels.timing import MeasurementMethod, measure_action  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip, FakeKernel  # noqa: E402

# A matmul of the load generator takes 8 ms here, so that burn-in is some thousand of them.
SLOW_CHIP = FakeChip(flop_per_cycle=4096.0 * 132 / 64, cache=2.0**20, heat=2.0)
CLOCK_RATIO = SLOW_CHIP.boost / SLOW_CHIP.sustained  # slowdown under load: 1.41
KERNEL_SECONDS = 1.5e-3  # at the boost clock
KERNEL = square_matmul(DType.BF16, 4096)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda(SLOW_CHIP).install(monkeypatch)
    fake_nvml.install(fake, monkeypatch)
    with fake_tensors.fake_cuda_tensors(fake):
        yield fake


def _set_prepared_action(monkeypatch: pytest.MonkeyPatch, factory: Callable[[], Any]) -> None:
    monkeypatch.setattr(pytorch_ops, "prepare_kernel", lambda *_: factory())


def test_kernels_are_measured_at_the_sustained_clock(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """After burn-in, with calibrate's kernel measurement, over five kernels with host pauses between them."""
    device = device_module.find_device("cuda")
    _set_prepared_action(monkeypatch, lambda: cuda.kernel(KERNEL_SECONDS))
    samples = burn_in(device, 120.0, lambda _: None)
    assert samples[0].state.sm_clock_mhz > 1.1 * samples[-1].state.sm_clock_mhz
    for size in range(1024, 6 * 1024, 1024):
        cuda.clock.advance(0.02)
        sample = measure.measure_kernel(square_matmul(DType.BF16, size), device, MeasurementMethod())
        assert sample.time is not None and sample.telemetry is not None
        assert sample.time.seconds == pytest.approx(CLOCK_RATIO * KERNEL_SECONDS, rel=0.02)
        assert sample.telemetry.sm_clock_mhz == pytest.approx(1e-6 * SLOW_CHIP.sustained, rel=0.02)
        assert sample.telemetry.throttled == ("sw_power_cap",)
        assert sample.telemetry.power_w == pytest.approx(SLOW_CHIP.limit_w, rel=0.1)


def test_burst_on_a_cold_device_is_at_the_boost_clock(cuda: FakeCuda) -> None:
    """What the previous test would miss: five samples of a millisecond each after an idle wait."""

    class IdleLoad:
        def launch_load(self, seconds: float) -> None:
            torch.cuda._sleep(int(2e9 * seconds))

    burst = MeasurementMethod(min_sample_seconds=1e-3, min_samples=5, min_span_seconds=0.0)
    statistics = measure_action(cuda_device.CudaStopwatch(IdleLoad()), cuda.kernel(KERNEL_SECONDS), burst)
    assert statistics.seconds == pytest.approx(KERNEL_SECONDS, rel=0.02)


def test_device_stays_under_load_between_measurements(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_module.find_device("cuda")

    def slow_factory() -> Any:
        cuda.clock.advance(3.0)  # compiling
        return cuda.kernel(KERNEL_SECONDS)

    _set_prepared_action(monkeypatch, slow_factory)
    burn_in(device, 120.0, lambda _: None)
    start_time = cuda.clock.now
    sample = measure.measure_kernel(KERNEL, device, MeasurementMethod())
    assert sample.outcome is MeasurementOutcome.MEASURED
    assert cuda.gpu().busy_fraction(start_time, cuda.clock.now) > 0.97
    assert sample.time is not None
    assert sample.time.seconds == pytest.approx(CLOCK_RATIO * KERNEL_SECONDS, rel=0.02)


@pytest.mark.usefixtures("cuda")
def test_burn_in_ends_at_a_steady_clock() -> None:
    """With a time constant of 2 s, the drift over 10 s is below 1 % once 3 % of the clock drop remain: after 7 s."""
    messages: list[str] = []
    samples = burn_in(device_module.find_device("cuda"), 120.0, messages.append)
    clocks = [sample.state.sm_clock_mhz for sample in samples]
    assert 10.0 < samples[-1].seconds < 20.0
    assert clocks[-1] == pytest.approx(1e-6 * SLOW_CHIP.sustained, rel=0.01)
    assert clocks[0] > 1.2 * clocks[-1]
    assert {sample.stage for sample in samples} == {"burn_in"}
    assert "steady after" in messages[0]


@pytest.mark.usefixtures("cuda")
def test_too_short_burn_in_is_reported() -> None:
    messages: list[str] = []
    samples = burn_in(device_module.find_device("cuda"), 3.0, messages.append)
    assert 3.0 <= samples[-1].seconds < 4.0
    assert "too short to tell" in messages[0]


def test_without_clock_telemetry_matmul_speed_is_used(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_nvml.install(cuda, monkeypatch)
    library.failing["nvmlInitWithFlags"] = 9
    monkeypatch.setattr("shutil.which", lambda _: None)
    samples = burn_in(device_module.find_device("cuda"), 120.0, lambda _: None)
    assert samples[-1].state == DeviceTelemetry()
    assert 10.0 < samples[-1].seconds < 20.0


def test_cpu_has_one_telemetry_sample_and_no_gpu_variation() -> None:
    (sample,) = burn_in(CpuDevice(), 120.0, lambda _: None)
    assert sample.seconds == 0.0
    assert measure_gpu_variation(CpuDevice()) == ()


def test_gpus_of_a_node_are_compared_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is as fast as the first in a burst, and 20 % slower when warm."""
    hot = FakeChip(
        flop_per_cycle=SLOW_CHIP.flop_per_cycle, sustained=SLOW_CHIP.sustained / 1.2, heat=0.5, uuid="second"
    )
    cuda = FakeCuda(FakeChip(flop_per_cycle=SLOW_CHIP.flop_per_cycle, heat=0.5), hot).install(monkeypatch)
    fake_nvml.install(cuda, monkeypatch, order=[1, 0])
    with fake_tensors.fake_cuda_tensors(cuda):
        first, second = measure_gpu_variation(device_module.find_device("cuda"))
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert second.time.seconds / first.time.seconds == pytest.approx(1.2, rel=0.01)
    assert first.telemetry is not None and second.telemetry is not None
    assert first.telemetry.sm_clock_mhz / second.telemetry.sm_clock_mhz == pytest.approx(1.2, rel=0.01)


@given(
    seconds=st.floats(1e-6, 10e-6),
    event=st.tuples(st.floats(0.5e-6, 1.5e-6), st.floats(1.5e-6, 4e-6)),
    resolution=st.sampled_from([0.0, 0.5e-6]),
    flushed=st.booleans(),
)
@examples(24)
def test_short_kernels_are_correct_whatever_events_cost(
    seconds: float, event: tuple[float, float], resolution: float, flushed: bool
) -> None:
    """With a flushed cache every kernel has its own pair of events; otherwise some hundred kernels share one."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda(FakeChip(event=event, resolution=resolution)).install(patch)
        flush = cuda.kernel(2e-5, clocked=False)

        class KernelLoad:
            def launch_load(self, seconds: float) -> None:
                cuda.launch(FakeKernel(seconds=max(seconds, 1e-4)))

        stopwatch = cuda_device.CudaStopwatch(KernelLoad(), pre_run=flush if flushed else None)
        run = cuda.kernel(seconds, clocked=False)
        method = MeasurementMethod(
            max_seconds=10.0,
            min_span_seconds=0.2 if flushed else 0.02,
            max_runs_per_sample=32 if flushed else 256,
            target_error=0.0,
            max_samples=60,
        )
        assert measure_action(stopwatch, run, method).seconds == pytest.approx(seconds, rel=0.02)


def test_cache_flush_leaves_no_dirty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading half a cache takes its bytes over the bandwidth; dirty lines would be evicted meanwhile."""
    chip = FakeChip(flop_per_cycle=SLOW_CHIP.flop_per_cycle, event=(2e-6, 2e-6))
    cuda, half = FakeCuda(chip).install(monkeypatch), 0.5 * chip.cache
    method = MeasurementMethod(max_seconds=0.05, min_span_seconds=0.0)

    def read() -> None:
        cuda.launch(FakeKernel(reads=((1, half),)))

    with fake_tensors.fake_cuda_tensors(cuda):
        device = device_module.find_device("cuda")
        clean = measure_action(device.stopwatch(flush_cache=True), read, method)
        assert clean.seconds == pytest.approx(half / chip.bandwidth, rel=0.001)
        monkeypatch.setattr(cuda_device, "_read_buffer", lambda other, _total: other.zero_())
        dirty = measure_action(device.stopwatch(flush_cache=True), read, method)
    assert dirty.seconds == pytest.approx(2.0 * clean.seconds, rel=0.001)
