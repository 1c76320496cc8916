"""Translation of training errors into messages that tell the user what to do."""

from calibrate.devices.device import DeviceLostError, TorchDevice
from calibrate.kernels.compiler import missing_tool, summary_line
from calibrate.kernels.formulas import UnsupportedKernel
from clustersim.common.errors import ClusterSimError, InputError

_RETRY_ADVICE = "start the same command again"


def explain_training_error(error: Exception, device: TorchDevice, out_of_memory_text: str) -> ClusterSimError | None:
    """The error to raise instead, None: the original; out_of_memory_text: message if memory ran out."""
    if isinstance(error, ClusterSimError):
        return None
    if isinstance(error, UnsupportedKernel):
        return InputError(f"training.fused: {error}; set it to false")
    if (missing := missing_tool(error)) is not None:
        return InputError(f"training.fused: {missing}, or set it to false")
    if not device.is_usable_after(error):
        return DeviceLostError("training", device.name, summary_line(error), _RETRY_ADVICE)
    return InputError(out_of_memory_text) if device.is_out_of_memory(error) else None
