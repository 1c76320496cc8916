"""What do experts with biases move and launch beside their products?"""

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.moe_expert_bias import add_clamp, add_expert_bias
from clustersim.model.operators import Operator, ParallelRegion

ROWS, HIDDEN, FFN, EXPERTS = 512, 256, 384, 4
NONE = Operator("experts", ParallelRegion.EXPERT, ())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_a_bias_passes_the_rows_six_times_each_way(dtype: DType) -> None:
    """Bias times probability (written), sum (two read, one written), and together (read and written).

    Back: the gradient times each of the two (read, written), and their sums (read).
    """
    found = add_expert_bias(NONE, dtype, EXPERTS, (ROWS, HIDDEN))
    (ahead,), (behind,) = found.forward, found.input_gradient
    size = ROWS * HIDDEN * dtype.bytes
    assert ahead.bytes == (1 + 3 + 2) * size
    assert behind.bytes == 2 * (2 + 1) * size
    assert (ahead.launches, behind.launches) == (2 * EXPERTS + 1, 4 * EXPERTS)


def test_a_clamp_keeps_what_it_made() -> None:
    """Both halves are read and written, then put together; back each passes its gradient where it was not limited."""
    found = add_clamp(NONE, DType.BF16, ROWS, 2 * FFN)
    (ahead,), (behind,) = found.forward, found.input_gradient
    size = ROWS * 2 * FFN * DType.BF16.bytes
    assert ahead.bytes == (2 + 2) * size
    assert behind.bytes == (3 + 2) * size
    assert found.saved_bytes == size
