"""GPU telemetry: correct where supported, empty where not, and never delaying measurements."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from clustersim.cost.calibration_record import DeviceTelemetry

torch = pytest.importorskip("torch")
fake_nvml = pytest.importorskip("tests.calibrate.fake_nvml")
from calibrate.devices import nvidia_smi, nvml, sensors, telemetry  # noqa: E402 - after torch is known to be there
from calibrate.devices.telemetry_sampling import run_periodically, sample_while_running  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip, FakeKernel  # noqa: E402

NOT_SUPPORTED, DRIVER_NOT_LOADED = 3, 9  # nvml.h: nvmlReturn_t
SMI_FIELDS = {
    "clocks.sm": "1410",
    "clocks.mem": "1215",
    "power.draw": "287.31",
    "temperature.gpu": "64",
    "clocks_event_reasons.active": "0x0000000000000024",
    "driver_version": "550.90",
    "enforced.power.limit": "400.00",
    "ecc.mode.current": "Enabled",
    "mig.mode.current": "Disabled",
    "uuid": "GPU-x",
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(FakeChip(uuid="first"), FakeChip(uuid="second", limit_w=400.0)).install(monkeypatch)


@pytest.fixture
def library(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_nvml.install(cuda, monkeypatch)


def _install_smi(monkeypatch: pytest.MonkeyPatch, values: dict[str, str], uuid: str = "GPU-first") -> list[list[str]]:
    """Install an nvidia-smi that returns these values of one GPU; return the list of its calls."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        assert options["timeout"] > 0.0
        commands.append(command)
        fields = command[1].removeprefix("--query-gpu=").split(",")
        is_answered = command[-2:] == ["-i", uuid] and all(field in values for field in fields)
        output = ", ".join(values.get(field, "") for field in fields)
        return subprocess.CompletedProcess(
            command, 0 if is_answered else 6, stdout=f"{output}\n" if is_answered else "No devices\n"
        )

    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(nvidia_smi.subprocess, "run", run)
    return commands


def test_telemetry_under_load_has_throttle_reasons(cuda: FakeCuda, library: Any) -> None:
    cuda.launch(FakeKernel(seconds=20.0))
    cuda.clock.advance(10.0)
    state = sensors.gpu_sensor(0).read_telemetry()
    assert state.sm_clock_mhz == pytest.approx(1e-6 * cuda.chip.sustained, rel=0.01)
    assert state.power_w == 700.0
    assert state.throttled == ("sw_power_cap",)
    cuda.clock.advance(60.0)
    assert sensors.gpu_sensor(0).read_telemetry().throttled == ()  # idle is not a throttle reason
    assert "nvmlDeviceGetCurrentClocksEventReasons" in library.requested_functions


def test_gpu_is_identified_by_uuid_whatever_its_nvml_index(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA orders by speed or by CUDA_VISIBLE_DEVICES, NVML by PCI bus."""
    fake_nvml.install(cuda, monkeypatch, order=[1, 0])
    assert sensors.gpu_sensor(0).read_settings().power_limit_w == 700.0
    assert sensors.gpu_sensor(1).read_settings().power_limit_w == 400.0


def test_mig_instance_has_the_clocks_of_its_gpu(cuda: FakeCuda, library: Any) -> None:
    library.mig_uuids["MIG-part"] = cuda.gpus[1]
    sensor = nvml.find_sensor("part")
    assert sensor is not None
    assert sensor.read_settings() == telemetry.GpuSettings("580.95.05", 400.0, ecc=True, mig=True)
    assert sensor.read_telemetry().sm_clock_mhz == 1980.0
    assert nvml.find_sensor("another") is None


def test_older_drivers_have_another_throttle_function(cuda: FakeCuda, library: Any) -> None:
    library.missing.add("nvmlDeviceGetCurrentClocksEventReasons")
    cuda.launch(FakeKernel(seconds=20.0))
    cuda.clock.advance(10.0)
    assert sensors.gpu_sensor(0).read_telemetry().throttled == ("sw_power_cap",)


@pytest.mark.usefixtures("cuda")
def test_unsupported_nvml_values_are_omitted(library: Any) -> None:
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode"):
        library.failing[name] = NOT_SUPPORTED
    assert sensors.gpu_sensor(0).read_telemetry().power_w == 0.0
    assert sensors.gpu_sensor(0).read_telemetry().sm_clock_mhz == 1980.0
    assert sensors.gpu_sensor(0).read_settings() == telemetry.GpuSettings("580.95.05", 700.0, ecc=None, mig=None)


@pytest.mark.parametrize("missing", ["package", "driver", "gpu"])
@pytest.mark.usefixtures("cuda")
def test_nvidia_smi_is_the_fallback_for_nvml(missing: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "driver":
        library.failing["nvmlInitWithFlags"] = DRIVER_NOT_LOADED
    else:
        library.failing["nvmlDeviceGetHandleByUUID"] = 6
    _install_smi(monkeypatch, SMI_FIELDS)
    sensor = sensors.gpu_sensor(0)
    assert sensor.read_telemetry() == DeviceTelemetry(
        1410.0, 1215.0, 287.31, 64.0, ("sw_power_cap", "sw_thermal_slowdown")
    )
    assert sensor.read_settings() == telemetry.GpuSettings("550.90", 400.0, ecc=True, mig=False)


def test_nvidia_smi_queries_are_rate_limited(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    commands = _install_smi(monkeypatch, SMI_FIELDS)
    sensor = sensors.gpu_sensor(0)
    initial_count = len(commands)
    for _ in range(5):
        sensor.read_telemetry()
    assert len(commands) == initial_count + 1
    cuda.clock.advance(11.0)
    sensor.read_telemetry()
    assert len(commands) == initial_count + 2


@pytest.mark.usefixtures("cuda")
def test_unsupported_nvidia_smi_values_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version without throttle reasons, of a GPU that reports no power."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    values = {name: answer for name, answer in SMI_FIELDS.items() if "reasons" not in name} | {"power.draw": "[N/A]"}
    _install_smi(monkeypatch, values | {"mig.mode.current": "[N/A]"})
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry(1410.0, 1215.0, 0.0, 64.0)
    assert sensors.gpu_sensor(0).read_settings().mig is None


def _raise_timeout(command: list[str], timeout: float, **_: Any) -> Any:
    raise subprocess.TimeoutExpired(command, timeout)


def _raise_missing_file(*_: Any, **__: Any) -> Any:
    raise OSError("no such file")


@pytest.mark.parametrize("run", [_raise_timeout, _raise_missing_file])
@pytest.mark.usefixtures("cuda")
def test_failing_nvidia_smi_gives_empty_telemetry(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _install_smi(monkeypatch, SMI_FIELDS)
    monkeypatch.setattr(nvidia_smi.subprocess, "run", run)
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry()
    assert sensors.gpu_sensor(0).read_settings() == telemetry.GpuSettings()


@pytest.mark.usefixtures("cuda")
def test_nvidia_smi_of_other_gpus_gives_empty_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that does not see this GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _install_smi(monkeypatch, SMI_FIELDS, uuid="GPU-of-another")
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry()


def test_hanging_driver_is_not_queried_again() -> None:
    call_count, release = [0], threading.Event()

    class HangingSensor(sensors.NullSensor):
        def read_telemetry(self) -> DeviceTelemetry:
            call_count[0] += 1
            release.wait()
            return DeviceTelemetry(1.0)

    sensor = sensors.TimeoutSensor(HangingSensor, timeout_seconds=0.05)
    assert sensor.read_telemetry() == sensor.read_telemetry() == DeviceTelemetry()
    assert call_count == [1]
    release.set()


def test_failing_driver_gives_empty_telemetry_and_is_queried_again() -> None:
    answers = iter([RuntimeError("lost"), DeviceTelemetry(1200.0)])

    class FailingSensor(sensors.NullSensor):
        def read_telemetry(self) -> DeviceTelemetry:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    sensor = sensors.TimeoutSensor(FailingSensor)
    assert [sensor.read_telemetry(), sensor.read_telemetry()] == [DeviceTelemetry(), DeviceTelemetry(1200.0)]


def test_amd_telemetry_is_read_through_pytorch(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing_module(_: int) -> int:
        raise ModuleNotFoundError("amdsmi does not seem to be installed")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 2100)
    monkeypatch.setattr(torch.cuda, "power_draw", raise_missing_module)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 55)
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry(sm_clock_mhz=2100.0, temperature_c=55.0)
    assert cuda.calls["launch"] == 0


def test_unknown_throttle_reasons_keep_their_bit() -> None:
    assert telemetry.throttle_reasons(0x1 | 0x8 | 0x8000) == ("hw_slowdown", "0x8000")
    assert telemetry.throttle_reasons(0) == ()


def test_mean_telemetry_ignores_missing_values() -> None:
    mean = telemetry.mean_telemetry(
        [DeviceTelemetry(1000.0, throttled=("a",)), DeviceTelemetry(), DeviceTelemetry(2000.0, power_w=300.0)]
    )
    assert mean == DeviceTelemetry(1500.0, power_w=300.0, throttled=("a",))
    assert telemetry.mean_telemetry([DeviceTelemetry()]) is None


def test_telemetry_is_sampled_at_least_once() -> None:
    with sample_while_running(lambda: DeviceTelemetry(1000.0)) as log:
        pass
    assert log.mean_telemetry == DeviceTelemetry(1000.0)


def test_periodic_action_runs_until_stopped() -> None:
    third_call, call_count = threading.Event(), [0]

    def action() -> None:
        call_count[0] += 1
        if call_count[0] == 3:
            third_call.set()

    stop = run_periodically(action, 0.0)
    assert third_call.wait(timeout=60)
    stop()
    final_count = call_count[0]
    assert call_count[0] == final_count
