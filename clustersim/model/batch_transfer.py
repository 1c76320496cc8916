"""What is sent and run before a microbatch's first layer: its tokens, and masks that are made of them?

Sizes in bytes are those of torch.long (tokens, labels, positions) and torch.float (loss masks). The causal mask of
Megatron-LM of 2021 (megatron/utils.py, `get_ltor_masks_and_position_ids`) is made anew for each microbatch, for one
sequence: FP32 ones are written, their triangle is read and written, and compared into bytes.
"""

from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.overheads import Batches
from clustersim.model.training import Training

LONG: Final = 8  # bytes of torch.long
_SIZES: Final = 5 * LONG  # broadcast_data: at most five dimensions of its one key
_MASK_BYTES: Final = 4 * DType.FP32.bytes + 1  # ones: 1 write; triangle: 1 read, 1 write; comparison: 1 read, 1 byte
_PACKED_LAUNCHES: Final = (
    9  # sizes to the GPU and back, tokens to it, labels and tokens cut, three of the mask, positions
)
_SEPARATE_LAUNCHES: Final = 4  # four tensors to the GPU


def sent(training: Training) -> tuple[Bytes, ...]:
    """What is broadcast of a microbatch, one after the other."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batches:
        case Batches.PACKED:
            return _SIZES, float((tokens + training.microbatch) * LONG)  # a token more than is predicted from
        case Batches.SEPARATE:
            return (float(tokens * LONG),) * 3 + (float(tokens * DType.FP32.bytes),)
    return ()


def made(training: Training) -> tuple[Kernel, ...]:
    """What is copied to the GPU, and made there, of a microbatch."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batches:
        case Batches.PACKED:
            shape = StreamShape(Routine.CAUSAL_MASK, training.sequence, training.sequence)
            moved = float(shape.elements * _MASK_BYTES)
            return (_kernel("batch.mask", DType.FP32, moved, shape, _PACKED_LAUNCHES),)
        case Batches.SEPARATE:
            shape = StreamShape(Routine.COPY, tokens, 1)
            return (_kernel("batch.copy", DType.FP32, sum(sent(training)), shape, _SEPARATE_LAUNCHES),)
    return ()


def _kernel(name: str, dtype: DType, moved: Bytes, shape: StreamShape, launches: int) -> Kernel:
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=moved, shape=shape, launches=launches)
