"""Builders for one rank's program: the task list in issue order, and a cache of shared segments."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from clustersim.program.action import Action
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, ComputeTask, Operation, ReceiveTask, Segment, SendTask, Stream, Task


@dataclass(slots=True)
class TaskList:
    """Tasks of one rank in the order in which they are issued.

    _switch_points: task ids at which an interleaved pass may switch to the other one; _interleaved: (begin of the
    first pass, begin of the second, end) of every pair of interleaved passes.
    """

    _tasks: list[Task] = field(default_factory=list)
    _streams: list[Stream] = field(default_factory=list)
    _switch_points: list[int] = field(default_factory=list)
    _interleaved: list[tuple[int, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, stream: Stream, task: Task) -> int:
        """Append a task to a stream; return its task id."""
        task_id = len(self._tasks)
        self._tasks.append(task)
        self._streams.append(stream)
        return task_id

    def add_repeated(self, stream: Stream, task: Task, count: int) -> int:
        """Append a task to a stream `count` times; return the id of the last one."""
        self._tasks += [task] * count
        self._streams += [stream] * count
        return len(self._tasks) - 1

    def copy_tasks(self, tasks: range, action: Action) -> int:
        """Append a copy of earlier tasks as another pass; return the offset of the task ids.

        Dependencies are shifted by the same offset; `action` replaces the action of compute tasks.
        """
        offset = len(self._tasks) - tasks.start
        self._tasks += [_copy_task(task, offset, action) for task in self._tasks[tasks.start : tasks.stop]]
        self._streams += self._streams[tasks.start : tasks.stop]
        return offset

    def mark_switch_point(self) -> None:
        """Mark the point after the tasks added so far as one where interleaved passes may switch."""
        self._switch_points.append(len(self._tasks))

    def interleave(self, first_begin: int, second_begin: int) -> None:
        """Interleave the tasks from `second_begin` on with those from `first_begin` up to there, at switch points.

        The second range is issued first at every switch. Task ids stay valid until `build` renumbers them.
        """
        self._interleaved.append((first_begin, second_begin, len(self._tasks)))

    def build(self) -> RankProgram:
        """The finished program, with interleaved tasks renumbered in issue order."""
        if not self._interleaved:
            return RankProgram(tuple(self._tasks), tuple(self._streams))
        order = self._issue_order()
        new_ids = [0] * len(order)
        for new_id, task_id in enumerate(order):
            new_ids[task_id] = new_id
        tasks = (self._tasks[task_id] for task_id in order)
        renumbered = (
            with_dependencies(task, tuple([new_ids[task_id] for task_id in task.depends_on])) for task in tasks
        )
        return RankProgram(tuple(renumbered), tuple([self._streams[task_id] for task_id in order]))

    def _issue_order(self) -> list[int]:
        """All task ids in the order in which they are issued."""
        order, issued = list[int](), 0
        for first, second, end in self._interleaved:
            order += range(issued, first)
            order += self._interleaved_order(first, second, end)
            issued = end
        return [*order, *range(issued, len(self._tasks))]

    def _interleaved_order(self, first: int, second: int, end: int) -> Iterator[int]:
        """Alternate between the ranges of both passes.

        First-range tasks that a second-range task depends on are issued before it.
        """
        issued = first  # end of the first-range tasks that are issued so far
        for second_range, first_range in zip_longest(
            self._split_at_switch_points(second, end), self._split_at_switch_points(first, second), fillvalue=range(0)
        ):
            for task_id in second_range:
                needed = (
                    max(
                        (dependency for dependency in self._tasks[task_id].depends_on if first <= dependency < second),
                        default=-1,
                    )
                    + 1
                )
                yield from range(issued, needed)
                issued = max(issued, needed)
                yield task_id
            yield from range(issued, first_range.stop)
            issued = max(issued, first_range.stop)

    def _split_at_switch_points(self, begin: int, end: int) -> Iterable[range]:
        switch_points = self._switch_points[
            bisect_right(self._switch_points, begin) : bisect_left(self._switch_points, end)
        ]
        return (range(*edges) for edges in pairwise((begin, *switch_points, end)))


def with_dependencies(task: Task, depends_on: tuple[int, ...]) -> Task:
    """The same task with other dependencies."""
    match task:
        case ComputeTask():
            return ComputeTask(task.segment, depends_on, task.action)
        case CollectiveTask():
            return CollectiveTask(task.comm_op, depends_on)
        case SendTask():
            return SendTask(task.comm_op, task.tag, depends_on)
        case ReceiveTask():
            return ReceiveTask(task.comm_op, task.tag, depends_on)


def _copy_task(task: Task, offset: int, action: Action) -> Task:
    """A task of a pass as part of another pass, whose task ids are `offset` higher."""
    depends_on = shift_task_ids(task.depends_on, offset)
    if isinstance(task, ComputeTask):
        return ComputeTask(task.segment, depends_on, action if task.action else None)
    return with_dependencies(task, depends_on)


def shift_task_ids(task_ids: Sequence[int], offset: int) -> tuple[int, ...]:
    """Task ids, each increased by `offset`."""
    return tuple([task_id + offset for task_id in task_ids])


@dataclass(slots=True)
class SegmentCache:
    """Cache of segments: equal keys, or the same operations in sequence, share one `Segment`."""

    _by_key: dict[Hashable, Segment] = field(default_factory=dict)
    _by_content: dict[tuple[str, bool, tuple[Operation, ...]], Segment] = field(default_factory=dict)

    def segment(
        self, key: Hashable, name: str, operations: Iterable[Operation], *, interleaved: bool = False
    ) -> Segment:
        """The segment of a key; built from the operations on first use."""
        cached = self._by_key.get(key)
        if cached is None:
            segment_operations = tuple(operations)
            candidate = Segment(name, segment_operations, interleaved)
            cached = self._by_key[key] = self._by_content.setdefault((name, interleaved, segment_operations), candidate)
        return cached


BucketSlice = tuple[tuple[Operation, ...], dict[str, int]]
"""Operations, and the number of parameters by parameter group whose gradients are reduced after them."""


def split_into_buckets(operations: Sequence[Operation], bucket_sizes: Mapping[str, float]) -> list[BucketSlice]:
    """Split backward operations after each one that fills a gradient bucket.

    bucket_sizes: parameters per bucket, by parameter group. The last slice may hold operations without
    parameters, and buckets that are not full.
    """
    slices: list[BucketSlice] = []
    begin, filled = 0, dict.fromkeys(bucket_sizes, 0)
    for end, operation in enumerate(operations, start=1):
        if not operation.gradient_count:
            continue
        group = operation.parameter_group
        filled[group] += operation.gradient_count
        if filled[group] >= bucket_sizes[group]:
            slices.append((tuple(operations[begin:end]), {group: filled[group]}))
            begin, filled[group] = end, 0
    unreduced = {group: parameters for group, parameters in filled.items() if parameters}
    if begin < len(operations):
        slices.append((tuple(operations[begin:]), unreduced))
    elif unreduced:
        slices[-1][1].update(unreduced)
    return slices
