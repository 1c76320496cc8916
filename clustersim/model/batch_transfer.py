"""What is sent and run before a microbatch's first layer: its tokens, and masks that are made of them?

Sizes in bytes are those of torch.long (tokens, labels, positions) and torch.float (loss masks). The causal mask of
Megatron-LM of 2021 (megatron/utils.py, `get_ltor_masks_and_position_ids`) is made anew for each microbatch, for one
sequence: FP32 ones are written, their triangle is read and written, and compared into bytes.
"""

from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.overheads import BatchTransfer
from clustersim.model.training import Training

LONG_BYTES: Final = 8  # bytes of torch.long
_SHAPE_BYTES: Final = 5 * LONG_BYTES  # broadcast_data: at most five dimensions of its one key
_MASK_BYTES_PER_ELEMENT: Final = (
    4 * DType.FP32.bytes + 1
)  # ones: 1 write; triangle: 1 read, 1 write; comparison: 1 read, 1 byte
_PACKED_LAUNCHES: Final = (
    9  # sizes to the GPU and back, tokens to it, labels and tokens cut, three of the mask, positions
)
_SEPARATE_LAUNCHES: Final = 4  # four tensors to the GPU


def broadcast_sizes(training: Training) -> tuple[Bytes, ...]:
    """What is broadcast of a microbatch, one after the other."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batches:
        case BatchTransfer.PACKED:
            return _SHAPE_BYTES, float(
                (tokens + training.microbatch) * LONG_BYTES
            )  # a token more than is predicted from
        case BatchTransfer.SEPARATE:
            return (float(tokens * LONG_BYTES),) * 3 + (float(tokens * DType.FP32.bytes),)
    return ()


def batch_kernels(training: Training) -> tuple[Kernel, ...]:
    """What is copied to the GPU, and made there, of a microbatch."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batches:
        case BatchTransfer.PACKED:
            shape = MemoryBoundShape(MemoryBoundOp.CAUSAL_MASK, training.sequence, training.sequence)
            moved_bytes = float(shape.elements * _MASK_BYTES_PER_ELEMENT)
            return (_copy_kernel("batch.mask", DType.FP32, moved_bytes, shape, _PACKED_LAUNCHES),)
        case BatchTransfer.SEPARATE:
            shape = MemoryBoundShape(MemoryBoundOp.COPY, tokens, 1)
            return (_copy_kernel("batch.copy", DType.FP32, sum(broadcast_sizes(training)), shape, _SEPARATE_LAUNCHES),)
    return ()


def _copy_kernel(name: str, dtype: DType, moved_bytes: Bytes, shape: MemoryBoundShape, launches: int) -> Kernel:
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=moved_bytes, shape=shape, launches=launches)
