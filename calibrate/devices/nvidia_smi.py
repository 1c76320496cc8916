"""What does nvidia-smi say of a GPU? Asked where NVML cannot be, and never longer than it may take."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.devices.telemetry import GpuSettings, throttle_reasons
from clustersim.cost.calibration_record import DeviceTelemetry

_TIMEOUT_SECONDS: Final = 30.0  # seconds after which it is ended; who waits for its answer has given up before
_STATE_FIELDS: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SETTING_FIELDS: Final = ("driver_version", "enforced.power.limit", "ecc.mode.current", "mig.mode.current")
_REASON_FIELDS: Final = (
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",
)  # since driver 535, and before
_MODES: Final = {"Enabled": True, "Disabled": False}


@dataclass(frozen=True, slots=True)
class NvidiaSmiSensor:
    """A GPU. command: where nvidia-smi is; name: the GPU's UUID as it wants it; reasons: its word for them."""

    command: str
    gpu_id: str
    reasons_field: str

    def read_telemetry(self) -> DeviceTelemetry:
        """Now; 0 for what it does not tell."""
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
        """What it is set to."""
        driver, limit, ecc, mig, _ = self._query_padded(_SETTING_FIELDS)
        return GpuSettings(driver, _parse_number(limit), _MODES.get(ecc), _MODES.get(mig))

    def _query_padded(self, fields: Sequence[str]) -> list[str]:
        """Five answers, empty where there are none."""
        answers = query_fields(self.command, self.gpu_id, fields)
        return [*(answers or ()), *[""] * 5][:5]


def find_sensor(uuid: str) -> NvidiaSmiSensor | None:
    """The GPU of that UUID; None where there is no nvidia-smi, or where it does not know it."""
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
    """Answers about one GPU; None where it fails, knows neither the GPU nor a field, or takes too long."""
    arguments = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", gpu_id]
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    answers = [answer.strip() for answer in process.stdout.strip().split(",")]
    return answers if process.returncode == 0 and len(answers) == len(fields) else None


def _parse_number(answer: str) -> float:
    """What it says, 0 for [N/A]; reasons are hexadecimal."""
    try:
        return float(int(answer, 16)) if answer.startswith("0x") else float(answer)
    except ValueError:
        return 0.0
