"""Gradient buckets, and shared segments."""

from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.lowering.task_list import SegmentCache, TaskList, split_into_buckets
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.operators import DENSE
from clustersim.program.task import ComputeTask, Operation, Stream, WorkType

KERNEL = Kernel("kernel", KernelKind.COPY, DType.BF16, 0.0, 1.0)


def gradient_operations(gradients: list[int]) -> list[Operation]:
    return [Operation(KERNEL, WorkType.BACKWARD, count) for count in gradients]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_buckets_keep_all_operations_in_order_and_all_gradients(gradients: list[int], size: int) -> None:
    given_operations = gradient_operations(gradients)
    pieces = split_into_buckets(given_operations, {DENSE: size})
    assert [operation for piece, _ in pieces for operation in piece] == given_operations
    assert sum(bucket_sizes.get(DENSE, 0) for _, bucket_sizes in pieces) == sum(gradients)


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_a_bucket_is_split_at_the_gradient_that_fills_it(gradients: list[int], size: int) -> None:
    """All but the last are full, and were not before their last operation (which completed a gradient)."""
    for piece, full in split_into_buckets(gradient_operations(gradients), {DENSE: size})[:-1]:
        parameters = full[DENSE]
        assert parameters == sum(operation.gradient_count for operation in piece) >= size
        assert parameters - piece[-1].gradient_count < size
        assert piece[-1].gradient_count > 0


def test_operations_after_the_last_gradient_are_a_separate_piece() -> None:
    assert [full for _, full in split_into_buckets(gradient_operations([5, 0, 0]), {DENSE: 5})] == [{DENSE: 5}, {}]


GRADIENTS_BY_GROUP = st.lists(st.tuples(st.sampled_from(["one", "other"]), st.integers(0, 20)))


@given(GRADIENTS_BY_GROUP, st.integers(1, 30), st.integers(1, 30))
def test_groups_fill_separate_buckets(
    gradients_by_group: list[tuple[str, int]], first_size: int, second_size: int
) -> None:
    """A piece ends where one group's bucket is full; what is left of both is reduced after the last piece."""
    sizes = {"one": first_size, "other": second_size}
    given_operations = [Operation(KERNEL, WorkType.BACKWARD, count, group) for group, count in gradients_by_group]
    pieces = split_into_buckets(given_operations, sizes)
    assert [operation for piece, _ in pieces for operation in piece] == given_operations
    for group, size in sizes.items():
        assert sum(full.get(group, 0) for _, full in pieces) == sum(
            count for name, count in gradients_by_group if name == group
        )
        assert all(full[group] >= size for _, full in pieces[:-1] if group in full)


def test_segments_are_shared_by_key_or_identical_operations() -> None:
    """Operations are compared by identity: equal ones may be of layers that differ in something else."""
    cache, (first, second) = SegmentCache(), gradient_operations([1, 1])
    segment = cache.segment("a", "x", [first])
    assert segment is cache.segment("a", "x", [second])
    assert segment is cache.segment("b", "x", [first])
    others = [cache.segment("c", "y", [first]), cache.segment("d", "x", [first], interleaved=True)]
    others += [cache.segment("e", "x", [second]), cache.segment("f", "x", [first, first])]
    assert len({segment, *others}) == 5


def test_tasks_are_numbered_in_order_of_addition() -> None:
    tasks, segment = TaskList(), SegmentCache().segment(1, "x", [])
    assert [tasks.add(Stream.COMPUTE, ComputeTask(segment)) for _ in range(3)] == [0, 1, 2]
    assert tasks.build().streams == (Stream.COMPUTE,) * 3
