"""What does nvidia-smi report about a GPU? Used where NVML is not available, always with a timeout."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.devices.telemetry import GpuSettings, throttle_reasons
from clustersim.cost.calibration_record import DeviceTelemetry

_TIMEOUT_SECONDS: Final = 30.0  # seconds after which the process is killed; the caller's own timeout is shorter
_STATE_FIELDS: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SETTING_FIELDS: Final = ("driver_version", "enforced.power.limit", "ecc.mode.current", "mig.mode.current")
_REASON_FIELDS: Final = (
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",
)  # since driver 535, and before it
_MODES: Final = {"Enabled": True, "Disabled": False}


@dataclass(frozen=True, slots=True)
class NvidiaSmiSensor:
    """A GPU queried through nvidia-smi.

    command: path of nvidia-smi; gpu_id: the GPU's UUID as nvidia-smi takes it; reasons_field: name of the field
    with the throttle reasons in this driver version, empty if there is none.
    """

    command: str
    gpu_id: str
    reasons_field: str

    def read_telemetry(self) -> DeviceTelemetry:
        """Current telemetry; 0 for values that are not reported."""
        sm, memory, power, temperature, mask = self._query_padded(
            (*_STATE_FIELDS, self.reasons_field) if self.reasons_field else _STATE_FIELDS
        )
        return DeviceTelemetry(
            _parse_number(sm),
            _parse_number(memory),
            _parse_number(power),
            _parse_number(temperature),
            throttle_reasons(int(_parse_number(mask))),
        )

    def read_settings(self) -> GpuSettings:
        """Driver, power limit, ECC and MIG modes."""
        driver, limit, ecc, mig, _ = self._query_padded(_SETTING_FIELDS)
        return GpuSettings(driver, _parse_number(limit), _MODES.get(ecc), _MODES.get(mig))

    def _query_padded(self, fields: Sequence[str]) -> list[str]:
        """Answers padded to five, empty where there are none."""
        answers = query_fields(self.command, self.gpu_id, fields)
        return [*(answers or ()), *[""] * 5][:5]


def find_sensor(uuid: str) -> NvidiaSmiSensor | None:
    """The sensor of the GPU with that UUID; None without nvidia-smi, or where it does not know the GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    reasons_field = next(
        (field for field in _REASON_FIELDS if query_fields(command, f"GPU-{uuid}", (field,)) is not None), ""
    )
    if not reasons_field and query_fields(command, f"GPU-{uuid}", ("uuid",)) is None:
        return None
    return NvidiaSmiSensor(command, f"GPU-{uuid}", reasons_field)


def query_fields(command: str, gpu_id: str, fields: Sequence[str]) -> list[str] | None:
    """Values of some fields of one GPU; None on failure, unknown GPU or field, or timeout."""
    arguments = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", gpu_id]
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    answers = [answer.strip() for answer in process.stdout.strip().split(",")]
    return answers if process.returncode == 0 and len(answers) == len(fields) else None


def _parse_number(answer: str) -> float:
    """The number in an answer, 0 for [N/A]; throttle reasons are hexadecimal."""
    try:
        return float(int(answer, 16)) if answer.startswith("0x") else float(answer)
    except ValueError:
        return 0.0
