"""What does a program copy whose layers are iterations of a loop?

XLA runs a stack of layers as a while loop (`jax.lax.scan`, Praxis' `StackedTransformerRepeated`, MaxText's
`scan_layers`). What backward reads of a layer is its slice of an array for all layers (dynamic-update-slice): a
fusion writes its slice in place, but a library's matmul does not, so that its result is read and written once more.
Backward slices where it reads, within fusions, at no cost; where a library's kernel reads a slice, there would be one
more copy, which is not counted. A layer that is recomputed in full saves its input alone, which a fusion makes.

Reference: NVIDIA/JAX-Toolbox, rosetta/docs/GPU_performance.md, "Dynamic-Update Slice Fusion" (pull request 698): the
option that removes these copies, xla_gpu_enable_address_computation_fusion, later xla_gpu_enable_dynamic_slice_fusion,
is off by default (xla/debug_options_flags.cc of openxla/xla).
"""

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.layers import LayerOperators
from clustersim.model.memory_bound import copy_kernel
from clustersim.model.training import Recompute, SelectiveOpRecompute
from clustersim.program.task import Operation, WorkType


def scan_copies(layer: LayerOperators, recompute: Recompute, dtype: DType) -> tuple[Operation, ...]:
    """The copy of a layer's saved results of products, where it is not recomputed in full."""
    elements = int(_saved_product_bytes(layer, recompute) / dtype.bytes)
    return (Operation(copy_kernel("stack saved products", dtype, elements), WorkType.FORWARD),) if elements else ()


def _saved_product_bytes(layer: LayerOperators, recompute: Recompute) -> Bytes:
    if isinstance(recompute, SelectiveOpRecompute):
        return sum(operator.saved_output_bytes for operator in layer.operators if operator.weight_products)
    return layer.saved_product_bytes
