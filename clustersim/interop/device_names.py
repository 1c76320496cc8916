"""Is a device what a record is to name? Drivers and profilers call a GPU otherwise than files do."""

import re
from typing import Final

_MEMORY: Final = re.compile(r"(\d+) ?gb", re.IGNORECASE)
_FORM: Final = re.compile(r"pcie|sxm|nvl", re.IGNORECASE)


def same_chip(device: str, accelerator: str) -> bool:
    """Whether a device's own name can be an accelerator's: its chip, and memory and form where both say."""
    chip = accelerator.partition("-")[0]
    if not re.search(rf"(?<![a-z0-9]){re.escape(chip)}(?![a-z0-9])", device, re.IGNORECASE):
        return False
    return all(_agree(pattern, device, accelerator) for pattern in (_MEMORY, _FORM))


def _agree(pattern: re.Pattern[str], first: str, second: str) -> bool:
    mine, other = (re.findall(pattern, text.lower()) for text in (first, second))
    return not mine or not other or mine[0] == other[0]
