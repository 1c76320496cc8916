"""Buckets of gradients, and blocks that are shared."""

from hypothesis import given
from hypothesis import strategies as st

from clustersim.dtypes import DType
from clustersim.lowering.tasklist import Blocks, TaskList, buckets
from clustersim.program.task import Compute, Operation, Stream, Work
from clustersim.workload.kernels import Kernel, KernelKind

KERNEL = Kernel("kernel", KernelKind.COPY, DType.BF16, 0.0, 1.0)


def operations(gradients: list[int]) -> list[Operation]:
    return [Operation(KERNEL, Work.BACKWARD, count) for count in gradients]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_buckets_keep_every_operation_in_order_and_every_gradient(gradients: list[int], size: int) -> None:
    given_operations = operations(gradients)
    pieces = buckets(given_operations, size)
    assert [each for piece, _ in pieces for each in piece] == given_operations
    assert sum(parameters for _, parameters in pieces) == sum(gradients)


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_a_bucket_is_cut_at_the_gradient_that_fills_it(gradients: list[int], size: int) -> None:
    """All but the last are full, and were not before their last operation (which completed a gradient)."""
    for piece, parameters in buckets(operations(gradients), size)[:-1]:
        assert parameters == sum(each.gradients for each in piece) >= size
        assert parameters - piece[-1].gradients < size
        assert piece[-1].gradients > 0


def test_operations_after_the_last_gradient_are_a_piece_of_their_own() -> None:
    assert [parameters for _, parameters in buckets(operations([5, 0, 0]), 5)] == [5, 0]


def test_blocks_of_one_key_are_one_block() -> None:
    blocks = Blocks()
    assert blocks.block("a", "x", []) is blocks.block("a", "x", [])
    assert blocks.block("a", "x", []) is not blocks.block("b", "x", [])


def test_tasks_are_numbered_as_they_are_added() -> None:
    tasks, block = TaskList(), Blocks().block(1, "x", [])
    assert [tasks.add(Stream.COMPUTE, Compute(block)) for _ in range(3)] == [0, 1, 2]
    assert tasks.program().streams == (Stream.COMPUTE,) * 3
