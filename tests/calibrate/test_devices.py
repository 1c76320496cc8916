"""Devices: by which name a record knows them, what they say of themselves, how they keep time."""

import platform
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from clustersim.common.data_files import list_names
from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError

torch = pytest.importorskip("torch")
devices = pytest.importorskip("calibrate.devices.device")
from calibrate.devices import cuda as cuda_device  # noqa: E402 - after torch is known to be there
from calibrate.devices.cpu import CpuDevice, CpuStopwatch  # noqa: E402
from calibrate.devices.matmul_support import fp8_dtype  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import Chip  # noqa: E402

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
        ("NVIDIA H100 96GB HBM2e", "h100-sxm-96gb"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(name: str, accelerator: str) -> None:
    assert devices.accelerator_name(Named(name), None) == accelerator
    assert accelerator in list_names("accelerators")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "Tesla T4",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H800 PCIe",
        "NVIDIA H100 96GB HBM3",
    ],
)
def test_any_other_gpu_must_be_named_by_the_user(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is no accelerator.*--accelerator: .*h100-sxm-80gb"):
        devices.accelerator_name(Named(name), None)
    assert devices.accelerator_name(Named(name), "h100-sxm-80gb") == "h100-sxm-80gb"


def test_a_name_that_is_no_accelerator_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean h100-"):
        devices.accelerator_name(Named("NVIDIA H200"), "h100-sxm")


def test_the_cpu_is_the_laptop_unless_it_is_named() -> None:
    assert devices.accelerator_name(CpuDevice(), None) == "cpu-laptop"
    assert devices.accelerator_name(CpuDevice(), "my/own.yaml") == "my/own.yaml"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        devices.find_device("cuda")
    assert isinstance(devices.find_device(None), CpuDevice)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InputError, match="PyTorch finds no GPU here"):
        devices.find_device("cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="there is no device 'cudo'; did you mean cuda"):
        devices.find_device("cudo")


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

    CpuStopwatch(background=load).time(lambda: order.append("run"), 2)
    assert order == ["begin", "run", "run", "end"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
    return FakeCuda(Chip(name="NVIDIA H200", event=(2e-6, 2e-6))).install(monkeypatch)


class Idle:
    """A filler that takes its time and does nothing else."""

    seconds = 1e-4

    def __init__(self, cuda: "FakeCuda", order: list[str]) -> None:
        self._run, self._order = cuda.kernel(self.seconds, clocked=False), order

    def launch(self, seconds: float) -> None:
        self._order.append("fill")
        for _ in range(1 + int(seconds / self.seconds)):
            self._run()


def test_a_gpu_is_timed_behind_products_and_works_on_after(cuda: "FakeCuda") -> None:
    order: list[str] = []
    run = cuda.kernel(1e-5, clocked=False)
    watch = cuda_device.CudaStopwatch(Idle(cuda, order))

    def action() -> None:
        order.append("run")
        run()

    assert watch.time(action, 3) == pytest.approx(3e-5)
    assert order == ["fill", "run", "run", "run", "fill"]
    assert cuda.gpu().done > cuda.clock.now  # it works, while the host decides what comes next


def test_a_flush_lies_between_the_events_of_two_runs(cuda: "FakeCuda") -> None:
    order: list[str] = []
    flush, run = cuda.kernel(1e-3), cuda.kernel(1e-5, clocked=False)
    watch = cuda_device.CudaStopwatch(Idle(cuda, order), pre_run=lambda: (order.append("flush"), flush()))  # type: ignore[func-returns-value]
    assert watch.time(run, 2) == pytest.approx(2e-5)
    assert order == ["fill", "flush", "flush", "fill"]


def test_what_runs_beside_on_a_gpu_lasts_over_the_pause_and_the_runs(cuda: "FakeCuda") -> None:
    lasting: list[float] = []
    order: list[str] = []

    def load(seconds: float) -> Any:
        lasting.append(seconds)
        return lambda: order.append("end")

    watch = cuda_device.CudaStopwatch(Idle(cuda, order), background=load)
    watch.time(cuda.kernel(1.0, clocked=False), 1)
    assert order == ["fill", "fill", "end"]  # products before and after, so that its clock is that of a step
    watch.time(lambda: None, 4)
    assert lasting[1] > 2.0 * 4.0  # a run took a second


def test_a_gpu_describes_itself(cuda: "FakeCuda", monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    torch.backends.cuda.enable_flash_sdp(True)
    found = cuda_device.CudaDevice(0).describe("h200-sxm-141gb")
    assert (found.name, found.driver, found.cuda) == ("NVIDIA H200", "580.95.05", "13.0")
    assert (found.compute_units, found.memory_bytes, found.threads) == (132, 80 * 2.0**30, 0)
    assert (found.power_limit_w, found.ecc, found.mig) == (700.0, True, False)
    assert found.attention.split()[0] == "flash"
    assert found.host == CpuDevice().name
    assert found.environment["NCCL_ALGO"] == "Ring"
    assert "CUDA_VISIBLE_DEVICES" not in found.environment


def test_a_gpus_conditions_are_what_its_driver_knows(cuda: "FakeCuda", monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    library.failing["nvmlDeviceGetPowerUsage"] = 3  # not supported
    found = cuda_device.CudaDevice(0).conditions()
    assert found == {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "temperature_c": 30.0}


def _gpu(monkeypatch: pytest.MonkeyPatch) -> cuda_device.CudaDevice:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return cuda_device.CudaDevice(0)


def test_a_gpus_formats_depend_on_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device, of_rows = _gpu(monkeypatch), {DType.FP8, DType.FP8_ROWWISE}
    for capability, narrow in (
        ((8, 0), set()),
        ((8, 9), of_rows),
        ((9, 0), {*of_rows, DType.FP8_BLOCKWISE}),
        ((10, 0), {*of_rows, DType.MXFP8, DType.NVFP4}),
        ((10, 3), {*of_rows, DType.MXFP8, DType.NVFP4}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, now=capability: now)
        assert {dtype for dtype in LOW_PRECISION_DTYPES if device.supports(dtype)} == narrow
        assert all(device.supports(dtype) for dtype in COMPUTE_DTYPES if dtype not in LOW_PRECISION_DTYPES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert {dtype for dtype in COMPUTE_DTYPES if device.supports(dtype)} == {DType.FP32, DType.FP16}


@pytest.mark.parametrize(
    ("architecture", "narrow", "form"),
    [
        ("gfx90a:sramecc+:xnack-", set(), torch.float8_e4m3fn),
        ("gfx942:sramecc+:xnack-", {DType.FP8, DType.FP8_ROWWISE}, torch.float8_e4m3fnuz),
        ("gfx950:sramecc+:xnack-", {DType.FP8, DType.FP8_ROWWISE, DType.MXFP8}, torch.float8_e4m3fn),
    ],
)
def test_an_amd_gpus_formats_depend_on_its_architecture(
    monkeypatch: pytest.MonkeyPatch, architecture: str, narrow: set[DType], form: torch.dtype
) -> None:
    """MI250X, MI300X, MI355X: the second has eight bits of its own."""
    device = cuda_device.CudaDevice(0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert {dtype for dtype in LOW_PRECISION_DTYPES if device.supports(dtype)} == narrow
    assert not device.supports(DType.TF32) and device.supports(DType.BF16)
    assert fp8_dtype(device.torch) is form


_KEPT = """
import resource
import torch
from calibrate.devices import device as devices
cpu = devices.find("cpu")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(4 * 2**20)
before = faults()
for _ in range(8):
    torch.ones(4 * 2**20)
print(faults() - before)
cpu.release()
before = faults()
torch.ones(4 * 2**20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what is freed")
def test_a_cpu_keeps_freed_memory_until_it_is_asked_for_it() -> None:
    """16 MiB are 4,096 pages (8 where they are huge): none is new once they are there, all are after a release."""
    done = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True, timeout=120)
    again, released = map(int, done.stdout.split())
    assert again < 8 and released >= 8
