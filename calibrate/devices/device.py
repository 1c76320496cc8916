"""Which device does PyTorch have here, and what can be measured and read on it?

The protocol between measurements and devices: a GPU (`cuda.CudaDevice`) or the CPU (`cpu.CpuDevice`). A
record names an accelerator of clustersim; it is identified by the name that the driver gives the device.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch

from calibrate.devices.cpu import CpuDevice
from calibrate.devices.cuda import CudaDevice
from calibrate.devices.glibc_heap import retain_freed_memory
from calibrate.devices.load_generator import LoadGenerator
from calibrate.devices.stopwatch import Action, BackgroundLoad, Stopwatch
from calibrate.devices.telemetry_sampling import TelemetryLog
from clustersim.common.data_files import find_file, list_names
from clustersim.common.dtypes import DType
from clustersim.common.errors import ClusterSimError, InputError, suggest_nearest
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import DeviceInfo, DeviceTelemetry

# Words in the driver's device name, and the name in clustersim; the first line whose words all occur counts.
# Driver names: NVIDIA's B300 is "NVIDIA B300 SXM6 AC"; PCIe cards of the H800 contain PCIe, the others do not.
_ACCELERATOR_BY_PATTERN: Final = (
    (("GB300",), "gb300"),
    (("B300",), "b300-sxm-288gb"),
    (("GB200",), "gb200"),
    (("B200",), "b200-sxm-180gb"),
    (("H200",), "h200-sxm-141gb"),
    (("H800",), "h800-sxm-80gb"),
    (("H100", "80GB", "HBM3"), "h100-sxm-80gb"),
    (("H100", "96GB", "HBM2e"), "h100-sxm-96gb"),
    (("H100", "PCIe"), "h100-pcie-80gb"),
    (("A100", "SXM", "80GB"), "a100-sxm-80gb"),
    (("A100", "SXM", "40GB"), "a100-sxm-40gb"),
    (("A100", "80GB", "PCIe"), "a100-pcie-80gb"),
    (("V100", "SXM", "32GB"), "v100-sxm-32gb"),
    (("MI300X",), "mi300x"),
    (("MI325X",), "mi325x"),
    (("MI355X",), "mi355x"),
)
_UNSUPPORTED_PATTERNS: Final = ("MIG", "NVL", "H800 PCIe", "WS")  # MIG instances, and GPUs with other clocks and memory
_DEFAULT_CPU: Final = "cpu-laptop"


class DeviceLostError(ClusterSimError):
    """The device is unusable for the rest of this process."""

    def __init__(self, activity: str, device: str, reason: str, consequence: str) -> None:
        super().__init__(f"{activity} left {device} unusable for this process: {reason}; {consequence}")


class TorchDevice(Protocol):
    """A device that PyTorch computes on."""

    @property
    def torch(self) -> torch.device:
        """The PyTorch device."""

    @property
    def name(self) -> str:
        """The driver's name of the device."""

    @property
    def cache_bytes(self) -> Bytes:
        """Size of its last-level cache."""

    def supports(self, dtype: DType) -> bool:
        """Whether matmuls of that format run."""

    def describe(self, accelerator: str) -> DeviceInfo:
        """The device as records describe it; accelerator: its name in clustersim (see `accelerator_name`)."""

    def telemetry(self) -> DeviceTelemetry:
        """Current clocks, power and temperature, as far as reported."""

    def conditions(self) -> Mapping[str, float]:
        """Clocks, temperature and power by name, as far as reported."""

    def synchronize(self) -> None:
        """Wait until all launched work has finished."""

    def sample_telemetry(self) -> AbstractContextManager[TelemetryLog]:
        """Sample telemetry while the block runs."""

    @property
    def runs_per_flushed_sample(self) -> int:
        """Runs in a sample with a cache flush before each."""

    def load_generator(self) -> LoadGenerator | None:
        """The load that keeps the device as warm as training does; None where that changes nothing."""

    def prepare_under_load(self, make: Callable[[], Action]) -> Action:
        """The action to be timed, built while the device is kept busy, and ready to be timed immediately."""

    def stopwatch(self, *, flush_cache: bool = False, background: BackgroundLoad | None = None) -> Stopwatch:
        """Times by the device's own clock; flush_cache: before each run; background: load that runs concurrently."""

    def host_seconds(self, action: Action, repeats: int) -> Seconds:
        """Wall-clock seconds until `repeats` runs are launched and finished."""

    def free_bytes(self) -> Bytes:
        """Free memory."""

    def release_memory(self) -> None:
        """Return unused memory."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error means that memory ran out."""

    def is_usable_after(self, error: Exception) -> bool:
        """Whether this process can still use the device after an error."""


def find_device(name: str | None) -> TorchDevice:
    """The device of that name: cuda, cpu, or None for the best one; raise InputError where it does not exist."""
    match name:
        case "cpu":
            return _cpu_device()
        case "cuda":
            _require_cuda()
            return CudaDevice(torch.cuda.current_device())
        case None:
            return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_available() else _cpu_device()
    raise InputError(f"there is no device {name!r}; {suggest_nearest(name, ['cuda', 'cpu'])}")


def _cpu_device() -> CpuDevice:
    retain_freed_memory()
    return CpuDevice()


def accelerator_name(device: TorchDevice, accelerator: str | None) -> str:
    """The clustersim accelerator of a device; raise InputError where it is unknown or cannot be identified."""
    if accelerator is not None:
        find_file("accelerators", accelerator)
        if device.torch.type == "cpu" and accelerator in list_names("accelerators") and accelerator != _DEFAULT_CPU:
            raise InputError(
                f"--accelerator: {device.name} is no {accelerator}; of a CPU, name {_DEFAULT_CPU} or a file of your own"
            )
        return accelerator
    if device.torch.type == "cpu":
        return _DEFAULT_CPU
    if not any(word in device.name for word in _UNSUPPORTED_PATTERNS):
        for patterns, accelerator_id in _ACCELERATOR_BY_PATTERN:
            if all(word in device.name for word in patterns):
                return accelerator_id
    raise InputError(
        f"{device.name} is no accelerator that clustersim knows by that name; say which it is with --accelerator: "
        f"{', '.join(list_names('accelerators'))}, or the path of your own file"
    )


def _require_cuda() -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise InputError(
            f"PyTorch {torch.__version__} is built without CUDA; install one that has it "
            "(https://pytorch.org/get-started), or measure the CPU with --device cpu"
        )
    raise InputError("PyTorch finds no GPU here (nvidia-smi lists them); measure the CPU with --device cpu")
