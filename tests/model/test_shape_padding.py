"""A compiler pads matmuls whose rows are no multiples of 16 bytes: eight elements of 16 bits."""

from dataclasses import replace

import pytest

from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape
from clustersim.model.layers import LayerShard, head_layer
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import Training

T = 64
HIDDEN = 4096


def output_matrix(vocab: int, *, shape_padding: bool) -> list[Kernel]:
    """Kernels of the output matrix, in the order forward, input gradient, weight gradient."""
    model = replace(load_preset("llama3-8b"), vocab=vocab)
    training = Training(T, 1, overheads=Overheads(shape_padding=shape_padding))
    (logits,) = (
        operator
        for operator in head_layer(model, training, LayerShard(1, T, T)).operators
        if operator.name == "head.logits"
    )
    return [*logits.forward, *logits.input_gradient, *logits.weight_gradient]


def sizes(kernels: list[Kernel]) -> list[tuple[int, int, int]]:
    shapes = (kernel.shape for kernel in kernels)
    return [(shape.m, shape.n, shape.k) for shape in shapes if isinstance(shape, MatmulShape)]


def test_matmuls_of_an_odd_vocabulary_are_those_of_the_next_multiple_of_eight() -> None:
    odd, even = output_matrix(50257, shape_padding=True), output_matrix(50264, shape_padding=False)
    assert sizes(odd) == sizes(even) == [(T, 50264, HIDDEN), (T, HIDDEN, 50264), (50264, HIDDEN, T)]


def test_the_weight_is_copied_twice_and_the_output_gradient_once() -> None:
    """Read and written, in two bytes an element."""
    copies = [kernel.bytes for kernel in output_matrix(50257, shape_padding=True) if kernel.kind is KernelKind.COPY]
    assert copies == [4 * HIDDEN * 50264, 4 * HIDDEN * 50264, 4 * T * 50264]


def test_aligned_sizes_are_left_alone() -> None:
    assert output_matrix(50264, shape_padding=True) == output_matrix(50264, shape_padding=False)


@pytest.mark.parametrize(
    ("name", "version", "pads"),
    [("pytorch", "2.0", False), ("pytorch", "2.4.1", True), ("pytorch", "", True), ("torchtitan", "", False)],
)
def test_inductor_pads_since_release_2_1_what_is_compiled(name: str, version: str, pads: bool) -> None:
    framework = load_framework(name, version)
    assert not framework.overheads.shape_padding
    assert framework.with_compiled().overheads.shape_padding is pads
