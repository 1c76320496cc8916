"""Rotary positions as products of complex numbers, as torchtitan's Llama has them."""

import pytest

from clustersim.cost.elementwise import elementwise_work
from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layers import LayerShard
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import ALL_FUSED, NONE_FUSED, FusedKernel, Training
from tests.uniform_models import uniform_layer

T = 64
COMPLEX = Overheads(complex_rotary=True)


def rotary_kernels(model: str, *, overheads: Overheads, fused: frozenset[FusedKernel]) -> list[Kernel]:
    layer = uniform_layer(load_preset(model), Training(T, 1, overheads=overheads, fused=fused), LayerShard(1, T, T))
    (operator,) = (operator for operator in layer.operators if operator.name == "attention.rotary")
    return [*operator.forward, *operator.input_gradient]


def routines(kernels: list[Kernel]) -> set[MemoryBoundOp]:
    return {kernel.shape.routine for kernel in kernels if isinstance(kernel.shape, MemoryBoundShape)}


@pytest.mark.parametrize("fused", [ALL_FUSED, NONE_FUSED])
def test_a_compiler_moves_as_many_bytes_as_eager_pytorch(fused: frozenset[FusedKernel]) -> None:
    """20 bytes an element of queries (32 x 128) and keys (8 x 128), each by itself, in both directions."""
    kernels = rotary_kernels("llama3-8b", overheads=COMPLEX, fused=fused)
    assert [kernel.bytes for kernel in kernels] == [20 * T * heads * 128 for heads in (32, 8)] * 2


def test_a_compiler_converts_at_the_rate_of_a_copy() -> None:
    eager, compiled = (rotary_kernels("llama3-8b", overheads=COMPLEX, fused=fused) for fused in (NONE_FUSED, ALL_FUSED))
    assert all(work is not None and work.streamed == 0 for work in map(elementwise_work, eager))
    assert [elementwise_work(kernel) for kernel in compiled] == [None] * 4


@pytest.mark.parametrize(("model", "is_complex"), [("llama3-8b", True), ("qwen3-32b", False)])
def test_torchtitans_qwen3_rotates_halves(model: str, is_complex: bool) -> None:
    overheads = load_framework("torchtitan").overheads
    found = routines(rotary_kernels(model, overheads=overheads, fused=NONE_FUSED))
    assert found == {MemoryBoundOp.ROTARY_COMPLEX if is_complex else MemoryBoundOp.ROTARY}


def test_other_software_rotates_halves() -> None:
    overheads = load_framework("pytorch").overheads
    assert routines(rotary_kernels("llama3-8b", overheads=overheads, fused=NONE_FUSED)) == {MemoryBoundOp.ROTARY}
