"""What does a machine's file change in a packaged cluster?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MachineChanges:
    """Values of a cluster file, nested; None removes a key. gpus: of the whole machine, None: not said."""

    values: Mapping[str, Any]
    gpus: int | None = None
    remarks: tuple[str, ...] = ()
