"""A fake of the driver's management library below `nvidia-ml-py`.

C functions by name, which fill in their arguments. So the real `pynvml` runs. `missing`: functions that this
driver lacks; `failing`: error codes that functions return.
"""
# ruff: noqa: N802, N815 - the library's own names

from collections.abc import Callable
from typing import Any

import pytest

from tests.calibrate.fake_cuda import FakeCuda
from tests.calibrate.fake_gpu import VirtualGpu

pynvml = pytest.importorskip("pynvml")
IDLE, POWER_CAP = 0x1, 0x4


class FakeNvmlLibrary:
    """The driver's answers. failing: {function: NVML error code}."""

    def __init__(self, cuda: FakeCuda, *, order: list[int] | None = None) -> None:
        """order: NVML's numbering of the GPUs, which may differ from CUDA's."""
        self._cuda = cuda
        self._gpus = [cuda.gpus[index] for index in order or range(len(cuda.gpus))]
        self.failing: dict[str, int] = {}
        self.missing: set[str] = set()
        self.requested_functions: list[str] = []
        self.mig_uuids: dict[str, VirtualGpu] = {}

    def function(self, name: str) -> Callable[..., int]:
        """A function by name, as the dynamic linker returns it."""
        self.requested_functions.append(name)
        if name in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name in self.failing:
            return lambda *_: self.failing[name]
        fake_function: Callable[..., int] = getattr(self, f"_{name}")
        return fake_function

    def _nvmlInitWithFlags(self, _flags: int) -> int:
        return 0

    def _nvmlShutdown(self) -> int:
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return _set_value(count, len(self._gpus))

    def _nvmlSystemGetDriverVersion(self, buffer: Any, _size: Any) -> int:
        buffer.value = b"580.95.05"
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._set_handle(handle, index.value if index.value < len(self._gpus) else None)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        uuid_text = uuid.value.decode()
        index_by_uuid = {f"GPU-{gpu.chip.uuid}": index for index, gpu in enumerate(self._gpus)}
        index_by_uuid |= {mig: self._gpus.index(gpu) for mig, gpu in self.mig_uuids.items()}
        return self._set_handle(handle, index_by_uuid.get(uuid_text))

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mig_handle: Any, handle: Any) -> int:
        return self._set_handle(handle, self._gpus.index(self._gpu_of(mig_handle)))

    def _set_handle(self, handle: Any, index: int | None) -> int:
        if index is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        handle._obj.stage_contents = pynvml.struct_c_nvmlDevice_t()
        self._handles = getattr(self, "_handles", {})
        self._handles[_address(handle._obj)] = self._gpus[index]
        return 0

    def _gpu_of(self, handle: Any) -> VirtualGpu:
        return self._handles[_address(handle)]

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, _size: Any) -> int:
        buffer.value = f"GPU-{self._gpu_of(handle).chip.uuid}".encode()
        return 0

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, clock: Any) -> int:
        gpu = self._gpu_of(handle)
        memory = getattr(kind, "value", kind) == pynvml.NVML_CLOCK_MEM
        return _set_value(clock, 2619 if memory else round(1e-6 * gpu.state_at(self._cuda.clock.now).clock))

    def _nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        return _set_value(power, round(1e3 * self._gpu_of(handle).state_at(self._cuda.clock.now).power))

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, power: Any) -> int:
        return _set_value(power, round(1e3 * self._gpu_of(handle).chip.limit_w))

    def _nvmlDeviceGetTemperature(self, handle: Any, _sensor: Any, degrees: Any) -> int:
        return _set_value(degrees, round(30 + 45 * self._gpu_of(handle).state_at(self._cuda.clock.now).heat))

    def _reasons(self, handle: Any, reasons: Any) -> int:
        state = self._gpu_of(handle).state_at(self._cuda.clock.now)
        active = POWER_CAP if state.heat > 0.05 else 0
        return _set_value(reasons, active if state.load else IDLE)

    _nvmlDeviceGetCurrentClocksEventReasons = _reasons
    _nvmlDeviceGetCurrentClocksThrottleReasons = _reasons

    def _nvmlDeviceGetEccMode(self, handle: Any, current: Any, pending: Any) -> int:
        return _set_value(pending, 1) or _set_value(current, int(self._gpu_of(handle).chip.ecc))

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return _set_value(pending, 0) or _set_value(current, int(self._gpu_of(handle).chip.mig))


def install(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, order: list[int] | None = None) -> FakeNvmlLibrary:
    """Replace the library that `pynvml` loads."""
    library = FakeNvmlLibrary(cuda, order=order)
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", library.function)
    return library


def _set_value(reference: Any, value: int) -> int:
    reference._obj.value = value
    return 0


def _address(pointer: Any) -> int:
    import ctypes

    return ctypes.addressof(pointer.stage_contents)
