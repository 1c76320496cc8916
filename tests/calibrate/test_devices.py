"""Devices: accelerator names, descriptions, supported formats, and stopwatches."""

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
device_module = pytest.importorskip("calibrate.devices.device")
from calibrate.devices import cuda as cuda_device  # noqa: E402 - after torch is known to be there
from calibrate.devices.cpu import CpuDevice, CpuStopwatch  # noqa: E402
from calibrate.devices.matmul_support import fp8_dtype  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip  # noqa: E402


@dataclass(frozen=True)
class NamedGpu:
    """A GPU with that driver name."""

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
def test_driver_names_map_to_accelerators(name: str, accelerator: str) -> None:
    assert device_module.accelerator_name(NamedGpu(name), None) == accelerator
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
def test_unknown_gpu_names_need_the_accelerator_option(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is no accelerator.*--accelerator: .*h100-sxm-80gb"):
        device_module.accelerator_name(NamedGpu(name), None)
    assert device_module.accelerator_name(NamedGpu(name), "h100-sxm-80gb") == "h100-sxm-80gb"


def test_unknown_accelerator_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean h100-"):
        device_module.accelerator_name(NamedGpu("NVIDIA H200"), "h100-sxm")


def test_default_cpu_accelerator() -> None:
    assert device_module.accelerator_name(CpuDevice(), None) == "cpu-laptop"
    assert device_module.accelerator_name(CpuDevice(), "my/own.yaml") == "my/own.yaml"


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cpu"):
        device_module.find_device("cuda")
    assert isinstance(device_module.find_device(None), CpuDevice)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InputError, match="PyTorch finds no GPU here"):
        device_module.find_device("cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="there is no device 'cudo'; did you mean cuda"):
        device_module.find_device("cudo")


def test_cpu_description() -> None:
    info = CpuDevice().describe("cpu-laptop")
    assert info.threads == info.compute_units == torch.get_num_threads()
    assert info.torch == torch.__version__
    assert info.memory_bytes > CpuDevice().free_bytes() > 0.0
    assert info.name
    assert all(isinstance(value, float) for value in CpuDevice().conditions().values())
    assert CpuDevice().cache_bytes >= 2**18


def test_cpu_background_load_spans_the_timed_runs() -> None:
    order: list[str] = []

    def background_load(_seconds: float) -> Any:
        order.append("begin")
        return lambda: order.append("end")

    CpuStopwatch(background=background_load).time(lambda: order.append("run"), 2)
    assert order == ["begin", "run", "run", "end"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
    return FakeCuda(FakeChip(name="NVIDIA H200", event=(2e-6, 2e-6))).install(monkeypatch)


class FakeLoadGenerator:
    """A load generator whose load is a kernel that only takes time."""

    seconds = 1e-4

    def __init__(self, cuda: "FakeCuda", order: list[str]) -> None:
        self._run, self._order = cuda.kernel(self.seconds, clocked=False), order

    def launch_load(self, seconds: float) -> None:
        self._order.append("fill")
        for _ in range(1 + int(seconds / self.seconds)):
            self._run()


def test_gpu_is_timed_under_load(cuda: "FakeCuda") -> None:
    order: list[str] = []
    run = cuda.kernel(1e-5, clocked=False)
    stopwatch = cuda_device.CudaStopwatch(FakeLoadGenerator(cuda, order))

    def action() -> None:
        order.append("run")
        run()

    assert stopwatch.time(action, 3) == pytest.approx(3e-5)
    assert order == ["fill", "run", "run", "run", "fill"]
    assert (
        cuda.gpu().finish_time > cuda.clock.now
    )  # the GPU stays under load while the host prepares the next measurement


def test_cache_flush_is_outside_the_timed_events(cuda: "FakeCuda") -> None:
    order: list[str] = []
    flush, run = cuda.kernel(1e-3), cuda.kernel(1e-5, clocked=False)
    stopwatch = cuda_device.CudaStopwatch(
        FakeLoadGenerator(cuda, order), pre_run=lambda: (order.append("flush"), flush())
    )  # type: ignore[func-returns-value]
    assert stopwatch.time(run, 2) == pytest.approx(2e-5)
    assert order == ["fill", "flush", "flush", "fill"]


def test_gpu_background_load_spans_lead_and_runs(cuda: "FakeCuda") -> None:
    durations: list[float] = []
    order: list[str] = []

    def background_load(seconds: float) -> Any:
        durations.append(seconds)
        return lambda: order.append("end")

    stopwatch = cuda_device.CudaStopwatch(FakeLoadGenerator(cuda, order), background=background_load)
    stopwatch.time(cuda.kernel(1.0, clocked=False), 1)
    assert order == [
        "fill",
        "fill",
        "end",
    ]  # matmul load before and after, so that the clock is that of a training step
    stopwatch.time(lambda: None, 4)
    assert durations[1] > 2.0 * 4.0  # the first run took a second


def test_gpu_description(cuda: "FakeCuda", monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    torch.backends.cuda.enable_flash_sdp(True)
    info = cuda_device.CudaDevice(0).describe("h200-sxm-141gb")
    assert (info.name, info.driver, info.cuda) == ("NVIDIA H200", "580.95.05", "13.0")
    assert (info.compute_units, info.memory_bytes, info.threads) == (132, 80 * 2.0**30, 0)
    assert (info.power_limit_w, info.ecc, info.mig) == (700.0, True, False)
    assert info.attention.split()[0] == "flash"
    assert info.host == CpuDevice().name
    assert info.environment["NCCL_ALGO"] == "Ring"
    assert "CUDA_VISIBLE_DEVICES" not in info.environment


def test_gpu_conditions_are_the_supported_telemetry(cuda: "FakeCuda", monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("tests.calibrate.fake_nvml").install(cuda, monkeypatch)
    library.failing["nvmlDeviceGetPowerUsage"] = 3  # not supported
    conditions = cuda_device.CudaDevice(0).conditions()
    assert conditions == {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "temperature_c": 30.0}


def _hopper_device(monkeypatch: pytest.MonkeyPatch) -> cuda_device.CudaDevice:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return cuda_device.CudaDevice(0)


def test_gpu_formats_by_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rowwise = _hopper_device(monkeypatch), {DType.FP8, DType.FP8_ROWWISE}
    for capability, low_precision in (
        ((8, 0), set()),
        ((8, 9), rowwise),
        ((9, 0), {*rowwise, DType.FP8_BLOCKWISE}),
        ((10, 0), {*rowwise, DType.MXFP8, DType.NVFP4}),
        ((10, 3), {*rowwise, DType.MXFP8, DType.NVFP4}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, now=capability: now)
        assert {dtype for dtype in LOW_PRECISION_DTYPES if device.supports(dtype)} == low_precision
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
def test_amd_gpu_formats_by_architecture(
    monkeypatch: pytest.MonkeyPatch, architecture: str, narrow: set[DType], form: torch.dtype
) -> None:
    """MI250X, MI300X, MI355X: the second has its own 8-bit encoding (fnuz)."""
    device = cuda_device.CudaDevice(0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert {dtype for dtype in LOW_PRECISION_DTYPES if device.supports(dtype)} == narrow
    assert not device.supports(DType.TF32) and device.supports(DType.BF16)
    assert fp8_dtype(device.torch) is form


_PAGE_FAULT_SCRIPT = """
import resource
import torch
from calibrate.devices import device as devices
cpu = devices.find_device("cpu")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(4 * 2**20)
before = faults()
for _ in range(8):
    torch.ones(4 * 2**20)
print(faults() - before)
cpu.release_memory()
before = faults()
torch.ones(4 * 2**20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what is freed")
def test_cpu_retains_freed_memory_until_release() -> None:
    """16 MiB are 4,096 pages (8 huge pages): allocating again faults none of them in, but all after a release."""
    process = subprocess.run(
        [sys.executable, "-c", _PAGE_FAULT_SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    repeated_faults, released_faults = map(int, process.stdout.split())
    assert repeated_faults < 8 and released_faults >= 8
