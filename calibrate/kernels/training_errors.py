"""What does a user do about an error of training? A sentence, where it is one that a machine or a library may have."""

from calibrate.devices.device import DeviceLostError, TorchDevice
from calibrate.kernels.compiler import lacks, sentence
from calibrate.kernels.formulas import Unsupported
from clustersim.common.errors import ClusterSimError, InputError

_AGAIN = "start the same command again"


def refusal(error: Exception, device: TorchDevice, too_large: str) -> ClusterSimError | None:
    """What is to be raised in place of an error, None: itself; too_large: the sentence where memory ran out."""
    if isinstance(error, ClusterSimError):
        return None
    if isinstance(error, Unsupported):
        return InputError(f"training.fused: {error}; set it to false")
    if (lacking := lacks(error)) is not None:
        return InputError(f"training.fused: {lacking}, or set it to false")
    if not device.survives(error):
        return DeviceLostError("training", device.name, sentence(error), _AGAIN)
    return InputError(too_large) if device.out_of_memory(error) else None
