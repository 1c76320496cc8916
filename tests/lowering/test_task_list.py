"""Buckets of gradients, and blocks that are shared."""

from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.lowering.task_list import SegmentCache, TaskList, split_into_buckets
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.operators import DENSE
from clustersim.program.task import ComputeTask, Operation, Stream, WorkType

KERNEL = Kernel("kernel", KernelKind.COPY, DType.BF16, 0.0, 1.0)


def operations(gradients: list[int]) -> list[Operation]:
    return [Operation(KERNEL, WorkType.BACKWARD, count) for count in gradients]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_buckets_keep_every_operation_in_order_and_every_gradient(gradients: list[int], size: int) -> None:
    given_operations = operations(gradients)
    pieces = split_into_buckets(given_operations, {DENSE: size})
    assert [operation for piece, _ in pieces for operation in piece] == given_operations
    assert sum(full.get(DENSE, 0) for _, full in pieces) == sum(gradients)


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_a_bucket_is_cut_at_the_gradient_that_fills_it(gradients: list[int], size: int) -> None:
    """All but the last are full, and were not before their last operation (which completed a gradient)."""
    for piece, full in split_into_buckets(operations(gradients), {DENSE: size})[:-1]:
        parameters = full[DENSE]
        assert parameters == sum(operation.gradient_count for operation in piece) >= size
        assert parameters - piece[-1].gradient_count < size
        assert piece[-1].gradient_count > 0


def test_operations_after_the_last_gradient_are_a_piece_of_their_own() -> None:
    assert [full for _, full in split_into_buckets(operations([5, 0, 0]), {DENSE: 5})] == [{DENSE: 5}, {}]


MARKED = st.lists(st.tuples(st.sampled_from(["one", "other"]), st.integers(0, 20)))


@given(MARKED, st.integers(1, 30), st.integers(1, 30))
def test_groups_fill_buckets_of_their_own(marked: list[tuple[str, int]], one: int, other: int) -> None:
    """A piece ends where one group's bucket is full; what is left of both is reduced after the last piece."""
    sizes = {"one": one, "other": other}
    given_operations = [Operation(KERNEL, WorkType.BACKWARD, count, group) for group, count in marked]
    pieces = split_into_buckets(given_operations, sizes)
    assert [operation for piece, _ in pieces for operation in piece] == given_operations
    for group, size in sizes.items():
        assert sum(full.get(group, 0) for _, full in pieces) == sum(count for name, count in marked if name == group)
        assert all(full[group] >= size for _, full in pieces[:-1] if group in full)


def test_blocks_of_one_key_or_of_the_same_operations_are_one_block() -> None:
    """Operations are the same if they are one object: equal ones may be of layers that differ in something else."""
    blocks, (first, second) = SegmentCache(), operations([1, 1])
    block = blocks.segment("a", "x", [first])
    assert block is blocks.segment("a", "x", [second])
    assert block is blocks.segment("b", "x", [first])
    others = [blocks.segment("c", "y", [first]), blocks.segment("d", "x", [first], interleaved=True)]
    others += [blocks.segment("e", "x", [second]), blocks.segment("f", "x", [first, first])]
    assert len({block, *others}) == 5


def test_tasks_are_numbered_as_they_are_added() -> None:
    tasks, block = TaskList(), SegmentCache().segment(1, "x", [])
    assert [tasks.add(Stream.COMPUTE, ComputeTask(block)) for _ in range(3)] == [0, 1, 2]
    assert tasks.build().streams == (Stream.COMPUTE,) * 3
