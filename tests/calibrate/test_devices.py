"""Devices: by which name a record knows them, what they say of themselves, how they keep time."""

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from clustersim.dtypes import COMPUTED, DType
from clustersim.errors import InputError
from clustersim.shipped import names

torch = pytest.importorskip("torch")
devices = pytest.importorskip("calibrate.devices.device")
from calibrate.devices import cuda as cuda_device  # noqa: E402 - after torch is known to be there
from calibrate.devices.cpu import CpuDevice, CpuStopwatch  # noqa: E402

MIB = 2.0**20


@dataclass(frozen=True)
class Named:
    """A GPU of that name."""

    name: str

    @property
    def torch(self) -> Any:
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(name: str, accelerator: str) -> None:
    assert devices.accelerator_of(Named(name), None) == accelerator
    assert accelerator in names("accelerators")


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "Tesla T4"],
)
def test_any_other_gpu_must_be_named_by_the_user(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is no accelerator.*--accelerator: .*h100-sxm-80gb"):
        devices.accelerator_of(Named(name), None)
    assert devices.accelerator_of(Named(name), "h100-sxm-80gb") == "h100-sxm-80gb"


def test_a_name_that_is_no_accelerator_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean h100-"):
        devices.accelerator_of(Named("NVIDIA H200"), "h100-sxm")


def test_the_cpu_is_the_laptop_unless_it_is_named() -> None:
    assert devices.accelerator_of(CpuDevice(), None) == "cpu-laptop"
    assert devices.accelerator_of(CpuDevice(), "my/own.yaml") == "my/own.yaml"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        devices.find("cuda")
    assert isinstance(devices.find(None), CpuDevice)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InputError, match="PyTorch finds no GPU here"):
        devices.find("cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="there is no device 'cudo'; did you mean cuda"):
        devices.find("cudo")


def test_a_cpu_describes_itself() -> None:
    found = CpuDevice().describe("cpu-laptop")
    assert found.threads == found.compute_units == torch.get_num_threads()
    assert found.torch == torch.__version__
    assert found.memory_bytes > CpuDevice().free_bytes() > 0.0
    assert found.name
    assert all(isinstance(value, float) for value in CpuDevice().conditions().values())
    assert CpuDevice().cache_bytes >= 2**18


_HELD = """
import torch
from calibrate.devices.cpu import CpuDevice
device = CpuDevice()
device.reset_peak()
before = device.peak_bytes()
held = torch.ones(16 * 2**20)
del held
print(device.peak_bytes() - before)
device.reset_peak()
print(device.peak_bytes() - before)
"""


def test_a_cpus_peak_is_what_it_held_at_most() -> None:
    """64 MiB that are written count, also once they are gone; in a process that holds no freed memory to reuse."""
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True, timeout=120)
    held, after = map(float, done.stdout.split())
    assert held == pytest.approx(64 * MIB, rel=0.2)
    assert after < 32 * MIB


def test_what_runs_beside_is_begun_before_and_ended_after() -> None:
    order: list[str] = []

    def load(_seconds: float) -> Any:
        order.append("begin")
        return lambda: order.append("end")

    CpuStopwatch(beside=load).time(lambda: order.append("run"), 2)
    assert order == ["begin", "run", "run", "end"]


class _Event:
    """A device's event on a clock that runs a second with each event."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        _Event.made += 1
        self.at = _Event.made

    def elapsed_time(self, end: "_Event") -> float:
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stopwatch asks of a GPU, in order."""
    asked: list[str] = []
    monkeypatch.setattr(_Event, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append("sleep" if cycles > 0 else "nothing"))
    return asked


def test_a_gpu_is_timed_by_events_behind_a_pause(order: list[str]) -> None:
    spent = cuda_device.CudaStopwatch().time(lambda: order.append("run"), 3)
    assert order == ["wait", "sleep", "run", "run", "run", "wait"]
    assert spent == 1.0


def test_a_flush_lies_between_the_events_of_two_runs(order: list[str]) -> None:
    spent = cuda_device.CudaStopwatch(between=lambda: order.append("flush")).time(lambda: order.append("run"), 2)
    assert order == ["wait", "sleep", "flush", "run", "flush", "run", "wait"]
    assert spent == 2.0  # of 3 s by this clock, one is between the runs


def test_what_runs_beside_on_a_gpu_lasts_over_the_pause_and_the_runs(order: list[str]) -> None:
    lasting: list[float] = []

    def load(seconds: float) -> Any:
        lasting.append(seconds)
        order.append("begin")
        return lambda: order.append("end")

    watch = cuda_device.CudaStopwatch(beside=load)
    watch.time(lambda: order.append("run"), 1)
    assert order == ["wait", "begin", "sleep", "run", "wait", "end"]
    watch.time(lambda: None, 4)
    assert lasting[1] > 2.0 * 4.0  # a run took a second


def _gpu(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> cuda_device.CudaDevice:
    """A GPU with an nvidia-smi that gives these answers."""
    properties = SimpleNamespace(
        total_memory=2**37, multi_processor_count=132, L2_cache_size=50 * 2**20, uuid="1234", name="NVIDIA H200"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_device.shutil, "which", lambda _: "/usr/bin/nvidia-smi")

    def run(command: list[str], **_: Any) -> Any:
        assert command[-2:] == ["-i", "GPU-1234"]
        query = command[1].removeprefix("--query-gpu=")
        return subprocess.CompletedProcess(command, 0, stdout=f"{answers[query]}\n")

    monkeypatch.setattr(cuda_device.subprocess, "run", run)
    return cuda_device.CudaDevice(0)


def test_a_gpu_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _gpu(monkeypatch, {"driver_version": "580.95"}).describe("h200-sxm-141gb")
    assert (found.name, found.driver, found.cuda) == ("NVIDIA H200", "580.95", "13.0")
    assert (found.compute_units, found.memory_bytes, found.threads) == (132, 2.0**37, 0)


def test_a_gpus_conditions_are_what_nvidia_smi_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"clocks.sm": "1980", "clocks.mem": "3201", "temperature.gpu": "35", "power.draw": "[N/A]"}
    found = _gpu(monkeypatch, answers).conditions()
    assert found == {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "temperature_c": 35.0}


def test_without_nvidia_smi_a_gpu_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _gpu(monkeypatch, {})
    monkeypatch.setattr(cuda_device.shutil, "which", lambda _: None)
    assert device.conditions() == {}


def test_a_gpus_formats_depend_on_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _gpu(monkeypatch, {})
    assert all(device.supports(dtype) for dtype in COMPUTED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert [dtype for dtype in COMPUTED if not device.supports(dtype)] == [DType.FP8]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert {dtype for dtype in COMPUTED if device.supports(dtype)} == {DType.FP32, DType.FP16}
