"""How is the program of one rank put together? A list of tasks in the making, and the blocks that tasks share."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clustersim.program.program import RankProgram
from clustersim.program.task import Block, Operation, Stream, Task


@dataclass(slots=True)
class TaskList:
    """Tasks of one rank in the order in which they are issued."""

    _tasks: list[Task] = field(default_factory=list)
    _streams: list[Stream] = field(default_factory=list)

    def add(self, stream: Stream, task: Task) -> int:
        """Append a task to a stream; return its number."""
        self._tasks.append(task)
        self._streams.append(stream)
        return len(self._tasks) - 1

    def program(self) -> RankProgram:
        """The finished program."""
        return RankProgram(tuple(self._tasks), tuple(self._streams))


@dataclass(slots=True)
class Blocks:
    """Blocks by what they are: asking twice for the same key gives the same block."""

    _known: dict[Hashable, Block] = field(default_factory=dict)

    def block(self, key: Hashable, name: str, operations: Iterable[Operation]) -> Block:
        """The block of this key, made from the operations the first time."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Block(name, tuple(operations))
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
        if not operation.gradients:
            continue
        group = operation.group
        full[group] += operation.gradients
        if full[group] >= sizes[group]:
            pieces.append((tuple(operations[begin:place]), {group: full[group]}))
            begin, full[group] = place, 0
    left = {group: parameters for group, parameters in full.items() if parameters}
    if begin < len(operations):
        pieces.append((tuple(operations[begin:]), left))
    elif left:
        pieces[-1][1].update(left)
    return pieces
