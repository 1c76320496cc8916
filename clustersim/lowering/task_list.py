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
    _turns: list[int] = field(default_factory=list)
    _woven: list[tuple[int, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, stream: Stream, task: Task) -> int:
        """Append a task to a stream; return its number."""
        number = len(self._tasks)
        self._tasks.append(task)
        self._streams.append(stream)
        return number

    def repeat(self, stream: Stream, task: Task, times: int) -> int:
        """Append a task to a stream so many times; return the last one's number."""
        self._tasks += [task] * times
        self._streams += [stream] * times
        return len(self._tasks) - 1

    def again(self, tasks: range, action: Action) -> int:
        """Append tasks like some before as another pass, which waits for what is as far before it; return how far."""
        further = len(self._tasks) - tasks.start
        self._tasks += [_moved(task, further, action) for task in self._tasks[tasks.start : tasks.stop]]
        self._streams += self._streams[tasks.start : tasks.stop]
        return further

    def turn(self) -> None:
        """Let tasks that run beside these come between what was added so far and what follows."""
        self._turns.append(len(self._tasks))

    def weave(self, first: int, second: int) -> None:
        """Let what was added from `second` on run side by side with what was added from `first` to there, in turns.

        The second's turn is first. Tasks keep their numbers until the program is finished.
        """
        self._woven.append((first, second, len(self._tasks)))

    def program(self) -> RankProgram:
        """The finished program."""
        if not self._woven:
            return RankProgram(tuple(self._tasks), tuple(self._streams))
        order = self._order()
        place = [0] * len(order)
        for new, number in enumerate(order):
            place[number] = new
        tasks = (self._tasks[number] for number in order)
        moved = (_after(task, tuple([place[number] for number in task.depends_on])) for task in tasks)
        return RankProgram(tuple(moved), tuple([self._streams[number] for number in order]))

    def _order(self) -> list[int]:
        """Numbers of all tasks in the order in which they are issued."""
        order, done = list[int](), 0
        for first, second, end in self._woven:
            order += range(done, first)
            order += self._side_by_side(first, second, end)
            done = end
        return [*order, *range(done, len(self._tasks))]

    def _side_by_side(self, first: int, second: int, end: int) -> Iterator[int]:
        """Turns of both, what a task waits for before it."""
        issued = first  # of the first, so far
        for later, own in zip_longest(self._in_turns(second, end), self._in_turns(first, second), fillvalue=range(0)):
            for number in later:
                needed = (
                    max((item for item in self._tasks[number].depends_on if first <= item < second), default=-1) + 1
                )
                yield from range(issued, needed)
                issued = max(issued, needed)
                yield number
            yield from range(issued, own.stop)
            issued = max(issued, own.stop)

    def _in_turns(self, first: int, end: int) -> Iterable[range]:
        cuts = self._turns[bisect_right(self._turns, first) : bisect_left(self._turns, end)]
        return (range(*edges) for edges in pairwise((first, *cuts, end)))


def _after(task: Task, numbers: tuple[int, ...]) -> Task:
    """The same that waits for other numbers."""
    match task:
        case ComputeTask():
            return ComputeTask(task.segment, numbers, task.action)
        case CollectiveTask():
            return CollectiveTask(task.comm_op, numbers)
        case SendTask():
            return SendTask(task.comm_op, task.tag, numbers)
        case ReceiveTask():
            return ReceiveTask(task.comm_op, task.tag, numbers)


def _moved(task: Task, further: int, action: Action) -> Task:
    """A task of a pass as one of another pass, whose tasks are so much further on."""
    after = moved(task.depends_on, further)
    if isinstance(task, ComputeTask):
        return ComputeTask(task.segment, after, action if task.action else None)
    return _after(task, after)


def moved(numbers: Sequence[int], further: int) -> tuple[int, ...]:
    """Numbers of tasks that are so much further on."""
    return tuple([number + further for number in numbers])


@dataclass(slots=True)
class Blocks:
    """Blocks by what they are: asking twice for the same key, or for the same operations, gives the same block.

    Operations are told by their identity, as layers share them; blocks keep them.
    """

    _known: dict[Hashable, Segment] = field(default_factory=dict)
    _made: dict[Hashable, Segment] = field(default_factory=dict)

    def block(self, key: Hashable, name: str, operations: Iterable[Operation], *, takes_turns: bool = False) -> Segment:
        """The block of this key, made from the operations the first time."""
        found = self._known.get(key)
        if found is None:
            does = tuple(operations)
            made = Segment(name, does, takes_turns)
            found = self._known[key] = self._made.setdefault((name, takes_turns, *map(id, does)), made)
        return found


Piece = tuple[tuple[Operation, ...], dict[str, int]]
"""Operations, and how many parameters of which groups are reduced after them."""


def buckets(operations: Sequence[Operation], sizes: Mapping[str, float]) -> list[Piece]:
    """Cut operations after each that fills a bucket. sizes: parameters in a bucket, by their group.

    The last piece may hold operations without any parameters, and buckets that are not full.
    """
    pieces: list[Piece] = []
    begin, full = 0, dict.fromkeys(sizes, 0)
    for place, operation in enumerate(operations, start=1):
        if not operation.gradient_count:
            continue
        group = operation.parameter_group
        full[group] += operation.gradient_count
        if full[group] >= sizes[group]:
            pieces.append((tuple(operations[begin:place]), {group: full[group]}))
            begin, full[group] = place, 0
    left = {group: parameters for group, parameters in full.items() if parameters}
    if begin < len(operations):
        pieces.append((tuple(operations[begin:]), left))
    elif left:
        pieces[-1][1].update(left)
    return pieces
