"""Is torch there? Measuring needs it; simulating, reading records and fitting do not."""

from importlib.util import find_spec

from clustersim.errors import InputError


def require_torch() -> None:
    """Raise InputError that says how to install torch where it is missing."""
    if find_spec("torch") is None:
        raise InputError(
            "measuring needs PyTorch, which is not installed: pip install 'clustersim[calibrate]' "
            "(on a machine without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        )
