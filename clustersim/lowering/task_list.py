"""How is the program of one rank put together? A list of tasks in the making, and the blocks that tasks share."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from clustersim.program.action import Action
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, ComputeTask, Operation, ReceiveTask, Segment, SendTask, Stream, Task


@dataclass(slots=True)
class TaskList:
    """Tasks of one rank in the order in which they are issued."""

    _tasks: list[Task] = field(default_factory=list)
    _streams: list[Stream] = field(default_factory=list)
    _switch_points: list[int] = field(default_factory=list)
    _interleaved: list[tuple[int, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, stream: Stream, task: Task) -> int:
        """Append a task to a stream; return its number."""
        task_id = len(self._tasks)
        self._tasks.append(task)
        self._streams.append(stream)
        return task_id

    def add_repeated(self, stream: Stream, task: Task, count: int) -> int:
        """Append a task to a stream so many times; return the last one's number."""
        self._tasks += [task] * count
        self._streams += [stream] * count
        return len(self._tasks) - 1

    def copy_tasks(self, tasks: range, action: Action) -> int:
        """Append tasks like some before as another pass, which waits for what is as far before it; return how far."""
        offset = len(self._tasks) - tasks.start
        self._tasks += [_copy_task(task, offset, action) for task in self._tasks[tasks.start : tasks.stop]]
        self._streams += self._streams[tasks.start : tasks.stop]
        return offset

    def mark_switch_point(self) -> None:
        """Let tasks that run beside these come between what was added so far and what follows."""
        self._switch_points.append(len(self._tasks))

    def interleave(self, first_begin: int, second_begin: int) -> None:
        """Let what was added from `second` on run side by side with what was added from `first` to there, in turns.

        The second's turn is first. Tasks keep their numbers until the program is finished.
        """
        self._interleaved.append((first_begin, second_begin, len(self._tasks)))

    def build(self) -> RankProgram:
        """The finished program."""
        if not self._interleaved:
            return RankProgram(tuple(self._tasks), tuple(self._streams))
        order = self._issue_order()
        new_ids = [0] * len(order)
        for new_id, task_id in enumerate(order):
            new_ids[task_id] = new_id
        tasks = (self._tasks[task_id] for task_id in order)
        renumbered = (
            _with_dependencies(task, tuple([new_ids[task_id] for task_id in task.depends_on])) for task in tasks
        )
        return RankProgram(tuple(renumbered), tuple([self._streams[task_id] for task_id in order]))

    def _issue_order(self) -> list[int]:
        """Numbers of all tasks in the order in which they are issued."""
        order, issued = list[int](), 0
        for first, second, end in self._interleaved:
            order += range(issued, first)
            order += self._interleaved_order(first, second, end)
            issued = end
        return [*order, *range(issued, len(self._tasks))]

    def _interleaved_order(self, first: int, second: int, end: int) -> Iterator[int]:
        """Turns of both, what a task waits for before it."""
        issued = first  # of the first, so far
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


def _with_dependencies(task: Task, depends_on: tuple[int, ...]) -> Task:
    """The same that waits for other numbers."""
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
    """A task of a pass as one of another pass, whose tasks are so much further on."""
    depends_on = shift_task_ids(task.depends_on, offset)
    if isinstance(task, ComputeTask):
        return ComputeTask(task.segment, depends_on, action if task.action else None)
    return _with_dependencies(task, depends_on)


def shift_task_ids(task_ids: Sequence[int], offset: int) -> tuple[int, ...]:
    """Numbers of tasks that are so much further on."""
    return tuple([task_id + offset for task_id in task_ids])


@dataclass(slots=True)
class SegmentCache:
    """Blocks by what they are: asking twice for the same key, or for the same operations, gives the same block.

    Operations are told by their identity, as layers share them; blocks keep them.
    """

    _by_key: dict[Hashable, Segment] = field(default_factory=dict)
    _by_operations: dict[Hashable, Segment] = field(default_factory=dict)

    def segment(
        self, key: Hashable, name: str, operations: Iterable[Operation], *, interleaved: bool = False
    ) -> Segment:
        """The block of this key, made from the operations the first time."""
        cached = self._by_key.get(key)
        if cached is None:
            segment_operations = tuple(operations)
            candidate = Segment(name, segment_operations, interleaved)
            cached = self._by_key[key] = self._by_operations.setdefault(
                (name, interleaved, *map(id, segment_operations)), candidate
            )
        return cached


BucketSlice = tuple[tuple[Operation, ...], dict[str, int]]
"""Operations, and how many parameters of which groups are reduced after them."""


def split_into_buckets(operations: Sequence[Operation], bucket_sizes: Mapping[str, float]) -> list[BucketSlice]:
    """Cut operations after each that fills a bucket. sizes: parameters in a bucket, by their group.

    The last piece may hold operations without any parameters, and buckets that are not full.
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
