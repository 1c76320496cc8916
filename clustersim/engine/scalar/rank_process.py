"""How does one rank work through its streams?

For each task of a stream: wait until the rank's earlier tasks that it names are done, perform it, write its span, tell
those who wait. A compute task takes its block's time; where other simulated ranks take part in a block's exchanges,
all of them run it together (`joint`), or piece by piece, so that they can meet inside it. A collective starts
when its last member has come. A message starts when it is sent (receive buffers are posted ahead) and is done at both
ends together.

While a collective of the data stream, or of the experts', moves data, kernels of the compute stream go at another pace,
and so does the collective where they slow it (`moving`). Beside both they go at the slower pace of the two.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.in_flight_collective import Moving
from clustersim.engine.kernel.rendezvous import Rendezvous
from clustersim.engine.recording.operation_log import Inner
from clustersim.engine.recording.recorder import Longer, Lost
from clustersim.engine.recording.unroll import NAMES, Repeat
from clustersim.engine.scalar.fast_path import Course
from clustersim.engine.scalar.fast_path_run import Passage
from clustersim.engine.scalar.fluid_action import Paces, Stretch
from clustersim.engine.scalar.group_segments import Seat
from clustersim.engine.scalar.shared_state import World
from clustersim.engine.scalar.skipped_period import Skipped
from clustersim.engine.scalar.split_segment import Cuts
from clustersim.engine.scalar.sub_segment import Piece, Transfer
from clustersim.program.task import BESIDE, Block, Communicate, Compute, Exchange, Send, Stream

Steps = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Lane:
    """How far a stream has come: `queue[place]` is its head.

    gathers: the head has come to a collective and waits for others. skipped: something was (`Rank.skip`) since the head
    began to wait; moved: what is repeated, if it has moved on with it; idle: for how many seconds more it has waited,
    if it has not.
    """

    queue: list[int]
    place: int = 0
    gathers: bool = False
    skipped: bool = False
    moved: list[Repeat] = field(default_factory=list)
    idle: Seconds = 0.0

    def later(self, name: int) -> int:
        """The name of the row that allowed the head, after what has moved on; it is told once."""
        for repeat in self.moved:
            name = int(repeat.named(np.array(name), repeat.times))
        self.moved.clear()
        return name


def unheard(mark: int) -> None:
    """What a rank tells of marked tasks that have ended: nobody listens."""


def _unseen(stream: Stream, needed: int) -> None:
    """What a stream waits for beside which no kernels go at another pace: nobody asks."""


@dataclass(slots=True)
class Rank:
    """One simulated rank: which of its tasks are done, and who waits for which.

    marks: tasks whose ends are told, and as what (`steady`).
    """

    number: int
    world: World
    marks: Mapping[int, int] = field(init=False, default_factory=dict)
    told: Callable[[int], None] = field(init=False, default=unheard)
    done: bytearray = field(init=False)
    lanes: dict[Stream, Lane] = field(init=False, default_factory=dict)
    _computing: int = field(init=False, default=-1)
    _waiting: dict[int, simpy.Event] = field(init=False, default_factory=dict)
    _beside: int = field(init=False, default=0)
    _moves: dict[Stream, int] = field(init=False, default_factory=lambda: dict.fromkeys(BESIDE, 0))
    _stretch: Stretch | Seat | None = field(init=False, default=None)
    _awaited: dict[Stream, int] = field(init=False, default_factory=lambda: dict.fromkeys(BESIDE, -1))
    _idle_until: int = field(init=False, default=-1)
    _block: Block | None = field(init=False, default=None)
    _moving: dict[Stream, tuple[Moving, Exchange]] = field(init=False, default_factory=dict)
    _paces: dict[Block, Paces] = field(init=False, default_factory=dict)
    _alone: dict[Block, Seconds | None] = field(init=False, default_factory=dict)
    _cuts: Cuts = field(init=False)

    def __post_init__(self) -> None:
        self._cuts = Cuts(self.number, self.world)
        self.done = bytearray(len(self.world.program_of(self.number).tasks))

    def start(self) -> None:
        """Let every stream of the rank run."""
        program = self.world.program_of(self.number)
        queues: dict[Stream, list[int]] = {}
        for number, stream in enumerate(program.streams):
            queues.setdefault(stream, []).append(number)
        self._awaited |= {stream: len(program.tasks) for stream in BESIDE if stream not in queues}
        self._idle_until = min(self._awaited.values())
        self.lanes |= {stream: Lane(queues[stream]) for stream in sorted(queues) if stream is not Stream.RECEIVE}
        for stream, lane in self.lanes.items():
            self.world.environment.process(self._run(stream, lane))

    def finish(self, number: int) -> None:
        """Note that a task is done and wake those who wait for it."""
        self.done[number] = True
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.succeed()
        if number in self.marks:
            self.told(self.marks[number])

    def _run(self, stream: Stream, lane: Lane) -> Steps:
        environment, done, tasks = self.world.environment, self.done, self.world.program_of(self.number).tasks
        record, begin, deliver = self.world.recorder.span, self.world.transfers.begin, self.world.deliver
        rank, queue, name = self.number, lane.queue, self.number * NAMES
        awaiting = self._await if stream in BESIDE else _unseen
        cause, now = -1, environment.now
        while lane.place < len(queue):
            number = queue[lane.place]
            task, queued = tasks[number], now
            for needed in task.after:
                if not done[needed]:
                    awaiting(stream, needed)
                    yield self._done(needed)
                    awaiting(stream, -1)
                    cause, now = name + needed, environment.now
                    if lane.skipped:
                        cause, queued = yield from self._go_on(awaiting, stream, (cause, queued))
                        now, number = environment.now, queue[lane.place]
                        task = tasks[number]
                        break
                elif cause < 0:
                    cause = name + needed
            ready, start = now, now
            waited = slowed = 0.0
            match task:
                case Compute():
                    seconds = self._undisturbed(number, task.block)
                    if seconds is None:
                        waited, slowed = yield from self._disturbed(number, task.block)
                    else:
                        yield environment.wait(seconds)
                case Communicate():
                    start, cause, idle = yield from self._communicate(stream, lane, cause)
                    queued, ready = queued - idle, ready - idle
                case Send():
                    yield begin(rank, task.exchange)
                    cause = lane.later(cause) if lane.moved else cause
                    deliver(rank, cast(Send, tasks[queue[lane.place]]), start, cause)
            now, number = environment.now, queue[lane.place]
            cause = lane.later(cause) if lane.moved else cause
            record((rank, number, stream, cause, queued, ready, start, now, waited, slowed))
            lane.place += 1
            cause = name + number
            self.finish(number)
        awaiting(stream, len(done))

    def _go_on(
        self, awaiting: Callable[[Stream, int], None], stream: Stream, known: tuple[int, Seconds]
    ) -> Generator[simpy.Event, Any, tuple[int, Seconds]]:
        """Wait for what else the head waits for, which may be another task by now, like what it was.

        known: what allowed it so far, and when it was queued; the same as they are in the end.
        """
        lane, (cause, queued) = self.lanes[stream], known
        while lane.skipped:
            cause, queued = lane.later(cause), queued - lane.idle
            lane.skipped, lane.idle = False, 0.0
            for needed in self.waits(lane)[:1]:
                awaiting(stream, needed)
                yield self._done(needed)
                awaiting(stream, -1)
                cause, lane.skipped = self.number * NAMES + needed, True
        return cause, queued

    def _communicate(
        self, stream: Stream, lane: Lane, cause: int
    ) -> Generator[simpy.Event, Any, tuple[Seconds, int, Seconds]]:
        """Run a collective: when it began, what allowed it, and for how long it waited beyond what the clock says."""
        world, tasks = self.world, self.world.program_of(self.number).tasks
        exchange = cast(Communicate, tasks[lane.queue[lane.place]]).exchange
        rendezvous = world.join(self.number, exchange, stream)
        gathered = rendezvous.arrive(cause)
        if not gathered.triggered:
            self._alongside(stream, 0)
            lane.gathers = True
        yield gathered
        start, idle, lane.gathers, lane.idle = world.environment.now, lane.idle, False, 0.0
        lane.skipped = False
        lane.moved.clear()
        self._alongside(stream, world.cost.pace(exchange))
        yield self._moved(stream, exchange, rendezvous)
        return start, rendezvous.cause, idle

    def waits(self, lane: Lane) -> list[int]:
        """What the head of a stream waits for before it can begin."""
        if lane.place == len(lane.queue):
            return []
        task = self.world.program_of(self.number).tasks[lane.queue[lane.place]]
        return [needed for needed in task.after if not self.done[needed]]

    def skip(self, skipped: Skipped, repeat: Repeat) -> None:
        """Take what is under way for what is that many periods later, and all up to there as done."""
        tasks = skipped.tasks * repeat.times
        waited: set[int] = set()
        for stream, lane in self.lanes.items():
            lane.skipped, many = True, skipped.streams[stream]
            if not many:
                lane.idle += repeat.seconds * repeat.times
                continue
            waited.update(self.waits(lane)[:1])
            lane.place += many * repeat.times
            lane.moved.append(repeat)
            if 0 <= self._awaited.get(stream, -1) < len(self.done):
                self._awaited[stream] += tasks
        self._idle_until = min(self._awaited.values())
        self._computing += tasks if skipped.streams.get(Stream.COMPUTE) else 0
        self._waiting = {item + tasks if item in waited else item: event for item, event in self._waiting.items()}
        under_way = self.done[skipped.first : skipped.last]
        self.done[skipped.first : skipped.first + tasks] = b"\1" * tasks
        self.done[skipped.first + tasks : skipped.last + tasks] = under_way

    def _await(self, stream: Stream, needed: int) -> None:
        """Note for which compute task a stream of `BESIDE` waits, so that nothing moves there; -1: for none.

        None, too, where it waits for another stream's task.
        """
        if needed >= 0:
            self._alongside(stream, 0)
        streams = self.world.program_of(self.number).streams
        other = 0 <= needed < len(streams) and streams[needed] is not Stream.COMPUTE
        self._awaited[stream] = -1 if other else needed
        self._idle_until = min(self._awaited.values())

    def _done(self, number: int) -> simpy.Event:
        event = self._waiting.get(number)
        if event is None:
            event = self._waiting[number] = simpy.Event(self.world.environment)
        return event

    def _alongside(self, stream: Stream, beside: int) -> None:
        """Let the compute stream know its pace beside what is under way on a stream (0: nothing), if it is new.

        One that follows another like it at once changes nothing.
        """
        if stream not in BESIDE or beside == self._moves[stream]:
            return
        self._moves[stream] = beside
        both = self.world.cost.pace_of_both(*self._moves.values())
        if both != self._beside:
            self._beside = both
            if self._stretch is not None:
                self._stretch.change(both)

    def _moved(self, stream: Stream, exchange: Exchange, rendezvous: Rendezvous) -> simpy.Event:
        """The end of a collective that begins now, whose members' kernels slow it if they may be beside it."""
        transfers = self.world.transfers
        if stream not in BESIDE or not self.world.cost.hinders:
            return rendezvous.together(partial(transfers.begin, self.number, exchange))
        moving = rendezvous.together(partial(transfers.moving, self.number, exchange))
        self._moving[stream] = moving, exchange
        self._hinder()
        return moving.done

    def _computes(self, block: Block | None) -> None:
        """Note which block runs."""
        self._block = block
        self._hinder()

    def _hinder(self) -> None:
        """Tell collectives that are under way at which pace they can go beside what the rank computes."""
        for moving, exchange in self._moving.values():
            block, cost = self._block, self.world.cost
            moving.beside(self.number, 1.0 if block is None else cost.speed(self.number, block, exchange))

    def _compute(self, number: int, block: Block) -> Generator[simpy.Event, Any, Lost]:
        """Run a block as one event, or piece by piece where others meet or share links with it inside."""
        role = self.world.joint_role(self.number, block)
        if role is not None:
            seat = self._stretch = self.world.joint.come(self.number, number, block, role, beside=self._beside)
            yield seat.done
            self._stretch = None
            return seat.lost
        whole, calm = self._whole(number, block), self._calm(number)
        if self.world.private(self.number, block, calm=calm):
            stretch = yield from self._work(whole, calm=calm)
            return Lost(slowed=0.0 if stretch is None else stretch.slowed)
        return (yield from self._in_pieces(block, whole, quiet=calm and self.world.coalesce))

    def _in_pieces(self, block: Block, whole: Paces, *, quiet: bool) -> Generator[simpy.Event, Any, Lost]:
        """Run a block piece by piece; quiet: nothing is beside it, and several may be one event.

        Operations between exchanges that share links, or where others meet, are one piece.
        """
        pieces, place = self._cuts.of(block, whole, quiet=quiet), 0
        waited = slowed = 0.0
        while place < len(pieces):
            passage = self._passage(self._cuts.course(block, whole, place)) if quiet else None
            if passage is not None:
                yield passage.done
                self._passed(passage)
                place += passage.reached
                continue
            piece = pieces[place]
            place += 1
            come = self.world.environment.now
            rendezvous = None if piece.met is None else (yield from self._meet(piece.met))
            start = self.world.environment.now
            waited += start - come
            if piece.transfer is None:
                paces = piece.paces or whole.between(piece.begin, piece.end)
                stretch = yield from self._work(paces, calm=self._calm(self._computing))
                slowed += 0.0 if stretch is None else stretch.slowed
                self._record(piece, whole if stretch is None else stretch.ends(), start)
            else:
                longer = yield from self._exchange(piece.begin, block, piece.transfer, rendezvous)
                slowed += longer.kernel
                at = self.number, self._computing, piece.begin
                self.world.recorder.operation(at, start, self.world.environment.now, longer)
        return Lost(waited, slowed)

    def _undisturbed(self, number: int, block: Block) -> Seconds | None:
        """Seconds of the block of a task that nobody else sees and that nothing can be beside; None of others."""
        if self._beside or self._idle_until < number:  # not `_calm`
            return None
        if block not in self._alone:
            self._alone[block] = self._unseen(number, block)
        return self._alone[block]

    def _unseen(self, number: int, block: Block) -> Seconds | None:
        """Seconds of every run of a block that nobody else sees; None where others do, or runs differ."""
        world = self.world
        if world.jitter is not None or world.cost.hinders or not world.private(self.number, block):
            return None
        return self._whole(number, block).alone[-1] if world.joint_role(self.number, block) is None else None

    def _disturbed(self, number: int, block: Block) -> Generator[simpy.Event, Any, Lost]:
        """Run a block that others may see, or collectives that its kernels slow."""
        self._computes(block)
        self._computing = number
        lost = yield from self._compute(number, block)
        self._computes(None)
        self.world.note(self.number, self._computing, block)
        return lost

    def _whole(self, number: int, block: Block) -> Paces:
        """Paces of the block of a task; those of all its runs where kernels do not vary."""
        known = self._paces.get(block)
        if known is None:
            known = self.world.paces.of(self.number, number, block)
            if self.world.jitter is None:
                self._paces[block] = known
        return known

    def _calm(self, number: int) -> bool:
        """Whether no collective can be beside the block of a task: their streams wait for its end, or a later one's.

        The compute stream runs its tasks in ascending number.
        """
        return not self._beside and self._idle_until >= number

    def _record(self, piece: Piece, ends: Inner, start: Seconds) -> None:
        """Write the operations of a piece that has just ended."""
        now = self.world.environment.now
        self.world.recorder.piece((self.number, self._computing, piece.begin), piece.end, (start, now), ends)

    def _passage(self, course: Course | None) -> Passage | None:
        """Begin pieces as one event, if nobody is on their links."""
        network = self.world.transfers.network
        if course is None or network is None or not network.free(course.links):
            return None
        return Passage(self.world.environment, network, course)

    def _passed(self, passage: Passage) -> None:
        """Write the operations of a passage that has just ended."""
        recorder, pieces = self.world.recorder, passage.course.pieces
        alone = passage.reached - (passage.shared is not None)
        if alone:
            times = passage.times[0], passage.start(alone)
            recorder.piece(
                (self.number, self._computing, pieces[0].begin), pieces[alone - 1].end, times, passage.course.ends
            )
        if passage.shared is not None:
            at, start = (self.number, self._computing, pieces[alone].begin), passage.start(alone)
            recorder.operation(at, start, self.world.environment.now, self._longer(start, passage.shared))

    def _longer(self, start: Seconds, transfer: Transfer) -> Longer:
        """What an exchange that has just ended took more than alone."""
        now = self.world.environment.now
        longer = now - start - transfer.alone
        return Longer(0.0, longer, longer).felt(now)

    def _meet(self, exchange: Exchange) -> Generator[simpy.Event, Any, Rendezvous]:
        """Wait for the other ranks that take part in an exchange."""
        rendezvous = self.world.join(self.number, exchange, Stream.COMPUTE)
        yield rendezvous.arrive(-1)
        return rendezvous

    def _exchange(
        self, place: int, block: Block, transfer: Transfer, rendezvous: Rendezvous | None
    ) -> Generator[simpy.Event, Any, Longer]:
        """Run an operation of a task whose exchange shares links, with its kernel beside it if it has one."""
        world, start, both = self.world, self.world.environment.now, transfer.beside
        moved = transfer.begin() if rendezvous is None else rendezvous.together(transfer.begin)
        if both is None:
            yield moved
            return self._longer(start, transfer)
        arrived: list[Seconds] = []
        moved.callbacks.append(lambda _: arrived.append(world.environment.now))
        stretch = yield from self._work(world.paces.kernel(self.number, self._computing, block, place))
        slowed = 0.0 if stretch is None else stretch.slowed
        kernel = world.environment.now - start
        if not arrived:
            yield moved
        moving = arrived[0] - start
        whole = both.of(kernel, moving)
        yield world.environment.wait(max(start + whole - world.environment.now, 0.0))
        runs, usual = both.runs(kernel, moving), both.runs(kernel - slowed, both.exchange)
        exposed = (whole - runs) - (both.of(kernel - slowed, both.exchange) - usual)
        exposed = max(exposed, -transfer.exposed)  # jitter may have exposed more than the timing says
        return Longer(runs - usual, exposed, moving - both.exchange).felt(world.environment.now)

    def _work(self, paces: Paces, *, calm: bool = False) -> Generator[simpy.Event, Any, Stretch | None]:
        """Run operations that nobody else can observe; return how they went, None where nothing was beside them."""
        environment = self.world.environment
        if calm or paces.equal:
            yield environment.wait(paces.alone[-1])
            return None
        stretch = self._stretch = Stretch(environment, paces, self._beside)
        yield stretch.done
        self._stretch = None
        return stretch if stretch.disturbed else None
