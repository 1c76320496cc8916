"""Is torch installed? Measuring needs it; simulating, reading records and fitting do not."""

import os
from importlib.util import find_spec
from typing import Final

from clustersim.common.errors import InputError

_KINETO_LOG_SETTING: Final = ("KINETO_LOG_LEVEL", "6")  # above the level of every message that Kineto prints on stderr


def require_torch() -> None:
    """Raise InputError with install instructions where torch is missing; call it before importing torch."""
    if find_spec("torch") is None:
        raise InputError(
            "measuring needs PyTorch, which is not installed: pip install 'clustersim[calibrate]' "
            "(on a machine without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        )
    os.environ.setdefault(*_KINETO_LOG_SETTING)
