"""Bytes and launches that expert biases and clamps add to the matmuls."""

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.moe_expert_bias import add_clamp, add_expert_bias
from clustersim.model.operators import Operator, ParallelRegion

TOKENS, HIDDEN, FFN, EXPERTS = 512, 256, 384, 4
NONE = Operator("experts", ParallelRegion.EXPERT, ())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_a_bias_passes_over_the_tokens_six_times_each_way(dtype: DType) -> None:
    """Bias times probability (written), sum (two read, one written), and concatenation (read and written).

    Backward: the gradient times each of the two (read, written), and their sums (read).
    """
    operator = add_expert_bias(NONE, dtype, EXPERTS, (TOKENS, HIDDEN))
    (forward,), (backward,) = operator.forward, operator.input_gradient
    size = TOKENS * HIDDEN * dtype.bytes
    assert forward.bytes == (1 + 3 + 2) * size
    assert backward.bytes == 2 * (2 + 1) * size
    assert (forward.launches, backward.launches) == (2 * EXPERTS + 1, 4 * EXPERTS)


def test_a_clamp_keeps_its_output() -> None:
    """Both halves are read and written, then concatenated; backward masks each gradient where the clamp was active."""
    operator = add_clamp(NONE, DType.BF16, TOKENS, 2 * FFN)
    (forward,), (backward,) = operator.forward, operator.input_gradient
    size = TOKENS * 2 * FFN * DType.BF16.bytes
    assert forward.bytes == (2 + 2) * size
    assert backward.bytes == (3 + 2) * size
    assert operator.saved_bytes == size
