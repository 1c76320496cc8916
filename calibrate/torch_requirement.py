"""Is torch there? Measuring needs it; simulating, reading records and fitting do not."""

import os
from importlib.util import find_spec
from typing import Final

from clustersim.common.errors import InputError

_KINETO_LOG_SETTING: Final = ("KINETO_LOG_LEVEL", "6")  # above all that the profiler's library says of itself on stderr


def require_torch() -> None:
    """Raise InputError that says how to install torch where it is missing; to be asked before it is imported."""
    if find_spec("torch") is None:
        raise InputError(
            "measuring needs PyTorch, which is not installed: pip install 'clustersim[calibrate]' "
            "(on a machine without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        )
    os.environ.setdefault(*_KINETO_LOG_SETTING)
