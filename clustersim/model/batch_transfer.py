"""What is broadcast and run before the first layer of a microbatch: its tokens, and the masks made of them?

Sizes in bytes are those of torch.long (tokens, labels, positions) and torch.float (loss masks).
Megatron-LM of 2021 (megatron/utils.py, `get_ltor_masks_and_position_ids`) rebuilds the causal mask for
each microbatch, for one sequence: FP32 ones are written, their lower triangle is read and written, and
compared into bytes.
"""

from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.overheads import BatchTransfer
from clustersim.model.training import Training

LONG_BYTES: Final = 8  # bytes of torch.long
_SHAPE_BYTES: Final = 5 * LONG_BYTES  # broadcast_data sends a shape of at most five dimensions for its one key
_MASK_BYTES_PER_ELEMENT: Final = (
    4 * DType.FP32.bytes + 1
)  # ones: 1 write; triangle: 1 read, 1 write; comparison: 1 read, 1 byte
_PACKED_LAUNCHES: Final = (
    9  # sizes to the GPU and back, tokens to it, labels and tokens sliced, three of the mask, positions
)
_SEPARATE_LAUNCHES: Final = 4  # four tensors to the GPU


def broadcast_sizes(training: Training) -> tuple[Bytes, ...]:
    """Bytes of each broadcast of a microbatch to the tensor-parallel ranks, in order."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batch_transfer:
        case BatchTransfer.PACKED:
            return _SHAPE_BYTES, float(
                (tokens + training.microbatch) * LONG_BYTES
            )  # one token more per sequence than model inputs: the last label
        case BatchTransfer.SEPARATE:
            return (float(tokens * LONG_BYTES),) * 3 + (float(tokens * DType.FP32.bytes),)
    return ()


def batch_kernels(training: Training) -> tuple[Kernel, ...]:
    """Kernels that copy a microbatch to the GPU and build its mask."""
    tokens = training.microbatch * training.sequence
    match training.overheads.batch_transfer:
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
