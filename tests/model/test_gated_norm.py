"""The gated norm of linear mixers, by one kernel and by PyTorch's operations."""

from collections.abc import Callable

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.memory_bound import GATE, MemoryBoundSpec, gate_spec, gated_rmsnorm_spec, norm_spec
from clustersim.model.transformer import Norm

BF16, FP32 = 2, 4
ROWS, WIDTH = 64, 128
ELEMENTS = ROWS * WIDTH


def test_a_gated_norm_of_operations_is_its_norm_and_a_product_in_fp32() -> None:
    """Forward: the gate to FP32 (2 + 4), SiLU (4 + 4), the product (4 + 4 + 4): 26 B an element and three kernels.

    Backward: both gradients of the product (12 + 12), SiLU's (12), back to BF16 (4 + 2): 42 B in four kernels.
    Saved besides what the norm saves: both factors and the gate, in FP32.
    """
    gated, norm = gated_rmsnorm_spec(fused=False), norm_spec(Norm.RMSNORM, fused=False)
    assert gated.forward.bytes(DType.BF16, ELEMENTS) - norm.forward.bytes(DType.BF16, ELEMENTS) == 26 * ELEMENTS
    assert gated.backward is not None and norm.backward is not None
    assert gated.backward.bytes(DType.BF16, ELEMENTS) - norm.backward.bytes(DType.BF16, ELEMENTS) == 42 * ELEMENTS
    assert gated.forward.launches - norm.forward.launches == 3
    assert gated.backward.launches - norm.backward.launches == 4
    assert gated.saved.bytes(DType.BF16, 1) - norm.saved.bytes(DType.BF16, 1) == 3 * FP32


@pytest.mark.parametrize("spec", [gated_rmsnorm_spec, gate_spec])
def test_one_kernel_moves_less_and_keeps_less(spec: Callable[..., MemoryBoundSpec]) -> None:
    fused, unfused = spec(fused=True), spec(fused=False)
    assert fused.forward.bytes(DType.BF16, 1) < unfused.forward.bytes(DType.BF16, 1)
    assert fused.backward.bytes(DType.BF16, 1) < unfused.backward.bytes(DType.BF16, 1)
    assert fused.saved.bytes(DType.BF16, 1) < unfused.saved.bytes(DType.BF16, 1)
    assert fused.op is unfused.op


def test_a_gate_reads_both_and_writes_their_product() -> None:
    assert GATE.forward.bytes(DType.BF16, ELEMENTS) == 3 * BF16 * ELEMENTS
