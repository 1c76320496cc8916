"""How does one rank work through its streams?

For each task of a stream: wait until the rank's earlier tasks that it names are done, perform it, write its span, tell
those who wait. A compute task takes its block's time; where other simulated ranks take part in a block's exchanges,
the block is run operation by operation, so that they can meet inside it. A collective starts when its last member has
come. A message starts when it is sent (receive buffers are posted ahead) and is done at both ends together.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy

from clustersim.engine.world import World
from clustersim.program.task import Block, Communicate, Compute, Send, Stream

Steps = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Rank:
    """One simulated rank: which of its tasks are done (their trace rows), and who waits for which."""

    number: int
    world: World
    rows: list[int] = field(init=False)
    _waiting: dict[int, simpy.Event] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [-1] * len(self.world.program_of(self.number).tasks)

    def start(self) -> None:
        """Let every stream of the rank run."""
        program = self.world.program_of(self.number)
        queues: dict[Stream, list[int]] = {}
        for number, stream in enumerate(program.streams):
            queues.setdefault(stream, []).append(number)
        for stream in sorted(queues):
            if stream is not Stream.RECEIVE:
                self.world.environment.process(self._run(stream, queues[stream]))

    def finish(self, number: int, row: int) -> None:
        """Note that a task is done and wake those who wait for it."""
        self.rows[number] = row
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.succeed()

    def _run(self, stream: Stream, queue: list[int]) -> Steps:
        environment, tasks = self.world.environment, self.world.program_of(self.number).tasks
        record, begin = self.world.recorder.span, self.world.transfers.begin
        cause = -1
        for number in queue:
            task = tasks[number]
            queued = environment.now
            for needed in task.after:
                if self.rows[needed] < 0:
                    yield self._done(needed)
                    cause = self.rows[needed]
                elif cause < 0:
                    cause = self.rows[needed]
            ready = environment.now
            start = ready
            match task:
                case Compute():
                    yield from self._compute(number, task.block)
                case Communicate():
                    rendezvous = self.world.join(self.number, task.exchange)
                    yield rendezvous.arrive(cause)
                    start, cause = environment.now, rendezvous.cause
                    yield rendezvous.together(partial(begin, self.number, task.exchange))
                case Send():
                    yield begin(self.number, task.exchange)
                    self.world.deliver(self.number, task, start, cause)
            cause = record((self.number, number, stream), cause, (queued, ready, start, environment.now))
            self.finish(number, cause)

    def _done(self, number: int) -> simpy.Event:
        event = self._waiting.get(number)
        if event is None:
            event = self._waiting[number] = self.world.environment.event()
        return event

    def _compute(self, number: int, block: Block) -> Steps:
        """Run a block as one event, or operation by operation where others meet this rank inside it."""
        environment, timing = self.world.environment, self.world.cost.block(self.number, block)
        if self.world.private(self.number, block):
            yield environment.timeout(timing.seconds)
            return
        for place, operation in enumerate(block.operations):
            if operation.exchange is not None:
                yield self.world.join(self.number, operation.exchange).arrive(-1)
            start = environment.now
            yield environment.timeout(timing.durations[place])
            self.world.recorder.operation((self.number, number, place), start, environment.now)
