"""Does a device name denote an accelerator? Drivers and profilers name GPUs differently from our files."""

import re
from typing import Final

_MEMORY: Final = re.compile(r"(\d+) ?gb", re.IGNORECASE)
_FORM_FACTOR: Final = re.compile(r"pcie|sxm|nvl", re.IGNORECASE)


def device_matches(device_name: str, accelerator: str) -> bool:
    """Whether a device name can be an accelerator's: same chip; same memory and form factor if both state it."""
    chip = accelerator.partition("-")[0]
    if not re.search(rf"(?<![a-z0-9]){re.escape(chip)}(?![a-z0-9])", device_name, re.IGNORECASE):
        return False
    return all(_is_consistent(pattern, device_name, accelerator) for pattern in (_MEMORY, _FORM_FACTOR))


def _is_consistent(pattern: re.Pattern[str], device_name: str, accelerator: str) -> bool:
    device_values, accelerator_values = (re.findall(pattern, text.lower()) for text in (device_name, accelerator))
    return not device_values or not accelerator_values or device_values[0] == accelerator_values[0]
