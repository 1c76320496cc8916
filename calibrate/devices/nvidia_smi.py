"""What does nvidia-smi say of a GPU? Asked where NVML cannot be, and never longer than it may take."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.devices.telemetry import Facts, reasons
from clustersim.cost.calibration_record import DeviceTelemetry

_PATIENCE: Final = 30.0  # seconds after which it is ended; who waits for its answer has given up before
_STATE: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_FACTS: Final = ("driver_version", "enforced.power.limit", "ecc.mode.current", "mig.mode.current")
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # since driver 535, and before
_SWITCHED: Final = {"Enabled": True, "Disabled": False}


@dataclass(frozen=True, slots=True)
class Smi:
    """A GPU. command: where nvidia-smi is; name: the GPU's UUID as it wants it; reasons: its word for them."""

    command: str
    name: str
    reasons: str

    def state(self) -> DeviceTelemetry:
        """Now; 0 for what it does not tell."""
        sm, memory, power, temperature, mask = self._asked((*_STATE, self.reasons) if self.reasons else _STATE)
        return DeviceTelemetry(
            _number(sm), _number(memory), _number(power), _number(temperature), reasons(int(_number(mask)))
        )

    def facts(self) -> Facts:
        """What it is set to."""
        driver, limit, ecc, mig, _ = self._asked(_FACTS)
        return Facts(driver, _number(limit), _SWITCHED.get(ecc), _SWITCHED.get(mig))

    def _asked(self, fields: Sequence[str]) -> list[str]:
        """Five answers, empty where there are none."""
        found = asked(self.command, self.name, fields)
        return [*(found or ()), *[""] * 5][:5]


def find(uuid: str) -> Smi | None:
    """The GPU of that UUID; None where there is no nvidia-smi, or where it does not know it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    known = next((word for word in _REASONS if asked(command, f"GPU-{uuid}", (word,)) is not None), "")
    if not known and asked(command, f"GPU-{uuid}", ("uuid",)) is None:
        return None
    return Smi(command, f"GPU-{uuid}", known)


def asked(command: str, name: str, fields: Sequence[str]) -> list[str] | None:
    """Answers about one GPU; None where it fails, knows neither the GPU nor a field, or takes too long."""
    words = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", name]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    answers = [answer.strip() for answer in done.stdout.strip().split(",")]
    return answers if done.returncode == 0 and len(answers) == len(fields) else None


def _number(answer: str) -> float:
    """What it says, 0 for [N/A]; reasons are hexadecimal."""
    try:
        return float(int(answer, 16)) if answer.startswith("0x") else float(answer)
    except ValueError:
        return 0.0
