"""What a GPU says of itself: right where it is known, empty where it is not, and never at the cost of measuring."""

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
from tests.calibrate.fake_gpu import Chip, Work  # noqa: E402

NOT_SUPPORTED, DRIVER_NOT_LOADED = 3, 9  # nvml.h: nvmlReturn_t
ANSWERS = {
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
    return FakeCuda(Chip(uuid="first"), Chip(uuid="second", limit_w=400.0)).install(monkeypatch)


@pytest.fixture
def library(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_nvml.install(cuda, monkeypatch)


def _smi(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], uuid: str = "GPU-first") -> list[list[str]]:
    """An nvidia-smi that has these answers about one GPU; what it was asked."""
    asked: list[list[str]] = []

    def run(command: list[str], **given: Any) -> Any:
        assert given["timeout"] > 0.0
        asked.append(command)
        fields = command[1].removeprefix("--query-gpu=").split(",")
        known = command[-2:] == ["-i", uuid] and all(field in answers for field in fields)
        said = ", ".join(answers.get(field, "") for field in fields)
        return subprocess.CompletedProcess(command, 0 if known else 6, stdout=f"{said}\n" if known else "No devices\n")

    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(nvidia_smi.subprocess, "run", run)
    return asked


def test_a_gpu_under_load_says_what_holds_it_down(cuda: FakeCuda, library: Any) -> None:
    cuda.launch(Work(seconds=20.0))
    cuda.clock.advance(10.0)
    state = sensors.gpu_sensor(0).read_telemetry()
    assert state.sm_clock_mhz == pytest.approx(1e-6 * cuda.chip.sustained, rel=0.01)
    assert state.power_w == 700.0
    assert state.throttled == ("sw_power_cap",)
    cuda.clock.advance(60.0)
    assert sensors.gpu_sensor(0).read_telemetry().throttled == ()  # it waits, which holds nothing down
    assert "nvmlDeviceGetCurrentClocksEventReasons" in library.asked


def test_a_gpu_is_found_whatever_numbers_the_driver_gives(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts by speed or as CUDA_VISIBLE_DEVICES says, NVML by the bus."""
    fake_nvml.install(cuda, monkeypatch, order=[1, 0])
    assert sensors.gpu_sensor(0).read_settings().power_limit_w == 700.0
    assert sensors.gpu_sensor(1).read_settings().power_limit_w == 400.0


def test_a_part_of_a_gpu_has_the_clocks_of_the_whole(cuda: FakeCuda, library: Any) -> None:
    library.mig_uuids["MIG-part"] = cuda.gpus[1]
    found = nvml.find_sensor("part")
    assert found is not None
    assert found.read_settings() == telemetry.GpuSettings("580.95.05", 400.0, ecc=True, mig=True)
    assert found.read_telemetry().sm_clock_mhz == 1980.0
    assert nvml.find_sensor("another") is None


def test_an_older_driver_has_other_words_for_reasons(cuda: FakeCuda, library: Any) -> None:
    library.missing.add("nvmlDeviceGetCurrentClocksEventReasons")
    cuda.launch(Work(seconds=20.0))
    cuda.clock.advance(10.0)
    assert sensors.gpu_sensor(0).read_telemetry().throttled == ("sw_power_cap",)


@pytest.mark.usefixtures("cuda")
def test_what_a_gpu_does_not_tell_is_left_out(library: Any) -> None:
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode"):
        library.failing[name] = NOT_SUPPORTED
    assert sensors.gpu_sensor(0).read_telemetry().power_w == 0.0
    assert sensors.gpu_sensor(0).read_telemetry().sm_clock_mhz == 1980.0
    assert sensors.gpu_sensor(0).read_settings() == telemetry.GpuSettings("580.95.05", 700.0, ecc=None, mig=None)


@pytest.mark.parametrize("missing", ["package", "driver", "gpu"])
@pytest.mark.usefixtures("cuda")
def test_where_nvml_is_missing_nvidia_smi_is_asked(missing: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "driver":
        library.failing["nvmlInitWithFlags"] = DRIVER_NOT_LOADED
    else:
        library.failing["nvmlDeviceGetHandleByUUID"] = 6
    _smi(monkeypatch, ANSWERS)
    sensor = sensors.gpu_sensor(0)
    assert sensor.read_telemetry() == DeviceTelemetry(
        1410.0, 1215.0, 287.31, 64.0, ("sw_power_cap", "sw_thermal_slowdown")
    )
    assert sensor.read_settings() == telemetry.GpuSettings("550.90", 400.0, ecc=True, mig=False)


def test_nvidia_smi_is_asked_seldom(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    asked = _smi(monkeypatch, ANSWERS)
    sensor = sensors.gpu_sensor(0)
    before = len(asked)
    for _ in range(5):
        sensor.read_telemetry()
    assert len(asked) == before + 1
    cuda.clock.advance(11.0)
    sensor.read_telemetry()
    assert len(asked) == before + 2


@pytest.mark.usefixtures("cuda")
def test_what_nvidia_smi_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one, of a GPU that tells no power, without a word for reasons."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    known = {name: answer for name, answer in ANSWERS.items() if "reasons" not in name} | {"power.draw": "[N/A]"}
    _smi(monkeypatch, known | {"mig.mode.current": "[N/A]"})
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry(1410.0, 1215.0, 0.0, 64.0)
    assert sensors.gpu_sensor(0).read_settings().mig is None


def _hanging(command: list[str], timeout: float, **_: Any) -> Any:
    raise subprocess.TimeoutExpired(command, timeout)


def _gone(*_: Any, **__: Any) -> Any:
    raise OSError("no such file")


@pytest.mark.parametrize("run", [_hanging, _gone])
@pytest.mark.usefixtures("cuda")
def test_an_nvidia_smi_that_hangs_says_nothing(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _smi(monkeypatch, ANSWERS)
    monkeypatch.setattr(nvidia_smi.subprocess, "run", run)
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry()
    assert sensors.gpu_sensor(0).read_settings() == telemetry.GpuSettings()


@pytest.mark.usefixtures("cuda")
def test_an_nvidia_smi_of_other_gpus_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's, which does not see this one."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _smi(monkeypatch, ANSWERS, uuid="GPU-of-another")
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry()


def test_a_driver_that_hangs_is_not_asked_again() -> None:
    asked, over = [0], threading.Event()

    class Hanging(sensors.NullSensor):
        def state(self) -> DeviceTelemetry:
            asked[0] += 1
            over.wait()
            return DeviceTelemetry(1.0)

    sensor = sensors.TimeoutSensor(Hanging, timeout_seconds=0.05)
    assert sensor.read_telemetry() == sensor.read_telemetry() == DeviceTelemetry()
    assert asked == [1]
    over.set()


def test_a_driver_that_fails_says_nothing_and_is_asked_again() -> None:
    answers = iter([RuntimeError("lost"), DeviceTelemetry(1200.0)])

    class Failing(sensors.NullSensor):
        def state(self) -> DeviceTelemetry:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    sensor = sensors.TimeoutSensor(Failing)
    assert [sensor.read_telemetry(), sensor.read_telemetry()] == [DeviceTelemetry(), DeviceTelemetry(1200.0)]


def test_an_amd_gpu_is_asked_through_pytorch(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise ModuleNotFoundError("amdsmi does not seem to be installed")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 2100)
    monkeypatch.setattr(torch.cuda, "power_draw", missing)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 55)
    assert sensors.gpu_sensor(0).read_telemetry() == DeviceTelemetry(sm_clock_mhz=2100.0, temperature_c=55.0)
    assert cuda.calls["launch"] == 0


def test_reasons_that_are_not_known_keep_their_bit() -> None:
    assert telemetry.throttle_reasons(0x1 | 0x8 | 0x8000) == ("hw_slowdown", "0x8000")
    assert telemetry.throttle_reasons(0) == ()


def test_means_are_of_what_was_told() -> None:
    found = telemetry.mean_telemetry(
        [DeviceTelemetry(1000.0, throttled=("a",)), DeviceTelemetry(), DeviceTelemetry(2000.0, power_w=300.0)]
    )
    assert found == DeviceTelemetry(1500.0, power_w=300.0, throttled=("a",))
    assert telemetry.mean_telemetry([DeviceTelemetry()]) is None


def test_a_watch_looks_at_least_once_and_stops() -> None:
    with sample_while_running(lambda: DeviceTelemetry(1000.0)) as watch:
        pass
    assert watch.mean_telemetry == DeviceTelemetry(1000.0)


def test_what_is_repeated_goes_on_until_it_is_ended() -> None:
    thrice, done = threading.Event(), [0]

    def action() -> None:
        done[0] += 1
        if done[0] == 3:
            thrice.set()

    end = run_periodically(action, 0.0)
    assert thrice.wait(timeout=60)
    end()
    after = done[0]
    assert done[0] == after
