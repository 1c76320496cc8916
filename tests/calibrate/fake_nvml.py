"""The driver's management library as a stand-in below `nvidia-ml-py`: C functions, by name, that fill in what they get.

So `pynvml` itself is what runs. `missing`: functions that this driver has not; `failing`: what one returns, not 0.
"""
# ruff: noqa: N802, N815 - the library's own names

from collections.abc import Callable
from typing import Any

import pytest

from tests.calibrate.fake_cuda import FakeCuda
from tests.calibrate.fake_gpu import Gpu

pynvml = pytest.importorskip("pynvml")
IDLE, POWER_CAP = 0x1, 0x4


class Library:
    """What the driver answers. failing: {function: NVML's number of an error}."""

    def __init__(self, cuda: FakeCuda, *, order: list[int] | None = None) -> None:
        """order: NVML's numbering of the GPUs, which need not be CUDA's."""
        self._cuda = cuda
        self._gpus = [cuda.gpus[place] for place in order or range(len(cuda.gpus))]
        self.failing: dict[str, int] = {}
        self.missing: set[str] = set()
        self.asked: list[str] = []
        self.mig_uuids: dict[str, Gpu] = {}

    def function(self, name: str) -> Callable[..., int]:
        """By its name, as the dynamic linker gives it."""
        self.asked.append(name)
        if name in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name in self.failing:
            return lambda *_: self.failing[name]
        found: Callable[..., int] = getattr(self, f"_{name}")
        return found

    def _nvmlInitWithFlags(self, _flags: int) -> int:
        return 0

    def _nvmlShutdown(self) -> int:
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return _put(count, len(self._gpus))

    def _nvmlSystemGetDriverVersion(self, buffer: Any, _size: Any) -> int:
        buffer.value = b"580.95.05"
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._found(handle, index.value if index.value < len(self._gpus) else None)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        name = uuid.value.decode()
        names = {f"GPU-{gpu.chip.uuid}": place for place, gpu in enumerate(self._gpus)}
        names |= {mig: self._gpus.index(gpu) for mig, gpu in self.mig_uuids.items()}
        return self._found(handle, names.get(name))

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Any, handle: Any) -> int:
        return self._found(handle, self._gpus.index(self._of(part)))

    def _found(self, handle: Any, place: int | None) -> int:
        if place is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        handle._obj.stage_contents = pynvml.struct_c_nvmlDevice_t()
        self._handles = getattr(self, "_handles", {})
        self._handles[_address(handle._obj)] = self._gpus[place]
        return 0

    def _of(self, handle: Any) -> Gpu:
        return self._handles[_address(handle)]

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, _size: Any) -> int:
        buffer.value = f"GPU-{self._of(handle).chip.uuid}".encode()
        return 0

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, clock: Any) -> int:
        gpu = self._of(handle)
        memory = getattr(kind, "value", kind) == pynvml.NVML_CLOCK_MEM
        return _put(clock, 2619 if memory else round(1e-6 * gpu.state(self._cuda.clock.now).clock))

    def _nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        return _put(power, round(1e3 * self._of(handle).state(self._cuda.clock.now).power))

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, power: Any) -> int:
        return _put(power, round(1e3 * self._of(handle).chip.limit_w))

    def _nvmlDeviceGetTemperature(self, handle: Any, _sensor: Any, degrees: Any) -> int:
        return _put(degrees, round(30 + 45 * self._of(handle).state(self._cuda.clock.now).heat))

    def _reasons(self, handle: Any, reasons: Any) -> int:
        state = self._of(handle).state(self._cuda.clock.now)
        capped = POWER_CAP if state.heat > 0.05 else 0
        return _put(reasons, capped if state.load else IDLE)

    _nvmlDeviceGetCurrentClocksEventReasons = _reasons
    _nvmlDeviceGetCurrentClocksThrottleReasons = _reasons

    def _nvmlDeviceGetEccMode(self, handle: Any, current: Any, pending: Any) -> int:
        return _put(pending, 1) or _put(current, int(self._of(handle).chip.ecc))

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return _put(pending, 0) or _put(current, int(self._of(handle).chip.mig))


def install(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, order: list[int] | None = None) -> Library:
    """Be the library that `pynvml` loads."""
    library = Library(cuda, order=order)
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", library.function)
    return library


def _put(reference: Any, value: int) -> int:
    reference._obj.value = value
    return 0


def _address(pointer: Any) -> int:
    import ctypes

    return ctypes.addressof(pointer.stage_contents)
