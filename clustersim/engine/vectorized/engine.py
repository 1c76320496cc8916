"""Vectorized engine: batches of ranks that run the same program, as arrays and without an event queue.

Each stream of a batch runs its tasks in order, as soon as the times of their dependencies are known. A
collective within a batch is a maximum over its groups; one that connects batches runs when all of them have
arrived at it; both ends of a message are known when it is sent.

It gives the same spans as the scalar engine. It is for programs with many simulated ranks and uncontended
links; what it does not support (`can_vectorize`) is left to the scalar engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.task_progress import TaskProgress
from clustersim.engine.vectorized.group_sync import GroupSync
from clustersim.engine.vectorized.rank_batch import RankBatch, ReadyTimes
from clustersim.engine.vectorized.segment_durations import RankSegmentDurations, find_group_syncs, rank_group_colours
from clustersim.engine.vectorized.trace_writer import BatchEvents, BatchSpan, TraceWriter
from clustersim.program.action import Action
from clustersim.program.program import Program
from clustersim.program.task import CollectiveTask, ComputeTask, ReceiveTask, SendTask, Stream
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class _BatchIndex:
    """Location of simulated ranks: [ranks] index of the batch, and position in it."""

    batch: IntArray
    position: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _BatchArrival:
    """A batch that has arrived at a collective: with which task, and when."""

    batch_index: int
    task_id: int
    times: ReadyTimes


@dataclass(slots=True, eq=False)
class _PendingCollective:
    """A collective that not all batches have arrived at."""

    arrivals: dict[int, _BatchArrival] = field(default_factory=dict)


class VectorizedEngine:
    """All batches of a program and what connects them."""

    def __init__(self, program: Program, classes: SymmetryClasses, cost: SegmentCost, jitter: Jitter | None) -> None:
        self._program, self._classes, self._cost = program, classes, cost
        simulated = np.unique(classes.representative)
        program_indices = range(len(program.programs))
        ranks = [simulated[program.program_index[simulated] == program_index] for program_index in program_indices]
        self._writer = TraceWriter.allocate(program, ranks)
        self._batches = [self._create_batch(events, jitter) for events in self._writer.batches]
        self._batch_index = self._index_batches()
        self._queues = [_stream_queues(batch) for batch in self._batches]
        self._connected_batches = self._connect_batches()
        self._issue_counts: dict[tuple[int, str, Stream], int] = {}
        self._pending: dict[tuple[int, str, Stream, int], _PendingCollective] = {}
        self._waiting: set[tuple[int, int]] = set()
        self._receive_tasks = [_find_receive_tasks(batch) for batch in self._batches]
        self._targets: dict[tuple[int, str], tuple[int, IntArray]] = {}

    @property
    def progress(self) -> TaskProgress:
        """The progress of the batches."""
        return TaskProgress(tuple(batch.done for batch in self._batches))

    def simulate_all(self) -> Trace | None:
        """Run all tasks; None where batches wait for each other in a cycle."""
        has_progress = True
        while has_progress:
            has_progress = False
            for batch_index, queues in enumerate(self._queues):
                for queue in queues:
                    while queue and self._try_run_task(batch_index, queue[-1]):
                        queue.pop()
                        has_progress = True
        if any(queue for queues in self._queues for queue in queues):
            return None
        return self._writer.build_trace(self._program, self._classes.representative)

    def _try_run_task(self, batch_index: int, task_id: int) -> bool:
        """Run a task of a batch if the times of its dependencies are known; return whether it is done."""
        batch = self._batches[batch_index]
        if batch.done[task_id]:
            return True
        task = batch.program.tasks[task_id]
        if (batch_index, task_id) in self._waiting or not all(batch.done[dependency] for dependency in task.depends_on):
            return False
        match task:
            case ComputeTask():
                if not batch.can_compute(task_id):
                    return False
                batch.run_segment(task_id, task.segment)
            case CollectiveTask():
                self._arrive(batch_index, task_id, task)
            case SendTask():
                self._run_send(batch_index, task_id, task)
        return batch.done[task_id]

    def _arrive(self, batch_index: int, task_id: int, task: CollectiveTask) -> None:
        """Arrive at a collective; the last batch to arrive runs it."""
        comm_group, stream = task.comm_op.comm_group, self._batches[batch_index].program.streams[task_id]
        sequence = self._issue_counts.get((batch_index, comm_group, stream), 0)
        self._issue_counts[batch_index, comm_group, stream] = sequence + 1
        connected = self._connected_batches[comm_group][batch_index]
        pending = self._pending.setdefault((connected[0], comm_group, stream, sequence), _PendingCollective())
        pending.arrivals[batch_index] = _BatchArrival(
            batch_index, task_id, self._batches[batch_index].ready_times(task_id)
        )
        self._waiting.add((batch_index, task_id))
        if len(pending.arrivals) == len(connected):
            self._run_collective(comm_group, [pending.arrivals[member] for member in connected])
            del self._pending[connected[0], comm_group, stream, sequence]

    def _run_collective(self, comm_group: str, arrivals: list[_BatchArrival]) -> None:
        """Run a collective of all groups of a kind in the batches that have arrived."""
        ranks = np.concatenate([self._batches[arrival.batch_index].ranks for arrival in arrivals])
        ready = np.concatenate([arrival.times.ready for arrival in arrivals])
        predecessor = np.concatenate([arrival.times.predecessor for arrival in arrivals])
        group_sync = GroupSync.from_groups(self._group_colours(comm_group, ranks))
        start = ready if group_sync.is_trivial else group_sync.group_max(ready)
        predecessor = predecessor if group_sync.is_trivial else predecessor[group_sync.last_arriver(ready, start)]
        begin = 0
        for arrival in arrivals:
            batch, times, stop = self._batches[arrival.batch_index], arrival.times, begin + len(arrival.times.ready)
            comm_op = batch.program.tasks[arrival.task_id].comm_op  # type: ignore[union-attr]
            batch_start = start[begin:stop]
            end = batch_start + self._cost.comm_seconds(batch.ranks, comm_op)
            batch.finish_task(arrival.task_id, BatchSpan(times.ready, batch_start, end, predecessor[begin:stop]))
            begin = stop

    def _run_send(self, batch_index: int, task_id: int, task: SendTask) -> None:
        """Send a message from every rank of a batch, and receive it."""
        batch, comm_group = self._batches[batch_index], task.comm_op.comm_group
        times = batch.ready_times(task_id)
        end = times.ready + self._cost.comm_seconds(batch.ranks, task.comm_op)
        batch.finish_task(task_id, BatchSpan(times.ready, times.ready, end, times.predecessor))
        receiver, sender_position = self._receiver_batch(batch_index, comm_group)
        start = times.ready[sender_position]
        receive_id = self._receive_tasks[receiver][comm_group, task.tag]
        self._batches[receiver].finish_task(
            receive_id, BatchSpan(start, start, end[sender_position], times.predecessor[sender_position])
        )

    def _receiver_batch(self, batch_index: int, comm_group: str) -> tuple[int, IntArray]:
        """The batch that a batch sends to, and for each of its ranks the position of the sender."""
        if (batch_index, comm_group) not in self._targets:
            ranks = self._batches[batch_index].ranks
            pairs = self._program.groups[comm_group].members[self._program.group_indices[comm_group][ranks]]
            receivers = self._classes.representative[pairs[:, 1]]
            receiver = int(self._batch_index.batch[receivers[0]])
            sender_position = np.empty(len(receivers), dtype=np.int64)
            sender_position[self._batch_index.position[receivers]] = np.arange(len(receivers))
            self._targets[batch_index, comm_group] = receiver, sender_position
        return self._targets[batch_index, comm_group]

    def _create_batch(self, events: BatchEvents, jitter: Jitter | None) -> RankBatch:
        program = self._program.programs[int(self._program.program_index[events.ranks[0]])]
        group_syncs = find_group_syncs(self._program, self._classes, events.ranks)
        return RankBatch(program, events, RankSegmentDurations(program, events.ranks, self._cost, jitter, group_syncs))

    def _group_colours(self, comm_group: str, ranks: IntArray) -> IntArray:
        return rank_group_colours(self._program, self._classes, comm_group, ranks)

    def _index_batches(self) -> _BatchIndex:
        batch, position = np.full((2, self._program.world_size), -1, dtype=np.int64)
        for index, rank_batch in enumerate(self._batches):
            batch[rank_batch.ranks], position[rank_batch.ranks] = index, np.arange(len(rank_batch.ranks))
        return _BatchIndex(batch, position)

    def _connect_batches(self) -> dict[str, dict[int, list[int]]]:
        """For each kind of group and batch that communicates in it, all batches that its groups connect."""
        connected: dict[str, dict[int, list[int]]] = {}
        for comm_group in {comm_group for batch in self._batches for comm_group in _collective_kinds(batch)}:
            batch_indices = [
                index for index, batch in enumerate(self._batches) if comm_group in _collective_kinds(batch)
            ]
            connected[comm_group] = _connect_by_groups(
                batch_indices,
                [set(self._group_colours(comm_group, self._batches[n].ranks).tolist()) for n in batch_indices],
            )
        return connected


def _connect_by_groups(indices: list[int], groups: list[set[int]]) -> dict[int, list[int]]:
    """Connected components of indices whose sets of groups intersect."""
    components: list[tuple[list[int], set[int]]] = []
    for index, index_groups in zip(indices, groups, strict=True):
        touching = [component for component in components if component[1] & index_groups]
        components = [component for component in components if not component[1] & index_groups]
        members = sorted([index, *(member for component in touching for member in component[0])])
        components.append((members, index_groups.union(*(component[1] for component in touching))))
    return {index: members for members, _ in components for index in members}


def _stream_queues(batch: RankBatch) -> list[list[int]]:
    """Tasks of each stream, the next one last."""
    queues: dict[Stream, list[int]] = {}
    for task_id, stream in enumerate(batch.program.streams):
        if stream is not Stream.RECEIVE:
            queues.setdefault(stream, []).append(task_id)
    return [queues[stream][::-1] for stream in sorted(queues)]


def _collective_kinds(batch: RankBatch) -> set[str]:
    return {task.comm_op.comm_group for task in batch.program.tasks if isinstance(task, CollectiveTask)}


def _find_receive_tasks(batch: RankBatch) -> dict[tuple[str, Action], int]:
    return {
        (task.comm_op.comm_group, task.tag): task_id
        for task_id, task in enumerate(batch.program.tasks)
        if isinstance(task, ReceiveTask)
    }


def can_vectorize(program: Program) -> bool:
    """Whether the vectorized engine supports a program.

    Collectives inside segments must stay among ranks of one program, and all ranks of a program must send their
    messages to all ranks of one program.
    """
    comm_groups = {comm_op.comm_group for comm_op in program.segment_comm_ops}
    return all(map(program.has_uniform_program, comm_groups)) and all(_sends_are_paired(program))


def _sends_are_paired(program: Program) -> Iterator[bool]:
    """For each kind of p2p pairs whether all ranks of one program send to all ranks of one program."""
    sizes = np.bincount(program.program_index, minlength=len(program.programs))
    for groups in program.groups.values():
        if groups.ordered:
            program_indices = program.program_index[groups.members]
            for sender in np.unique(program_indices[:, 0]).tolist():
                receivers = program_indices[program_indices[:, 0] == sender, 1]
                yield len(receivers) == sizes[sender] == sizes[receivers[0]] and bool((receivers == receivers[0]).all())
