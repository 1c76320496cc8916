"""What do simulated ranks share? The clock, the program, the costs, the network, the meeting places and the mail."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from clustersim.common.units import Seconds
from clustersim.cost.contention import Sharing
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.kernel.background_traffic import beside
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.network.flow_demands import Loads
from clustersim.engine.kernel.network.fluid_network import Network
from clustersim.engine.kernel.rendezvous import MeetingPlaces, Rendezvous
from clustersim.engine.kernel.transfers import Shared, Transfers, Uncontended
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.scalar.group_segments import JointBlocks
from clustersim.engine.scalar.segment_curves import BlockPaces
from clustersim.program.action import Action
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import Block, Exchange, Receive, Send, Stream
from clustersim.symmetry.refinement import Classes

_RECEIVE: Final = Stream.RECEIVE  # as a global, for each message
Receipts = Mapping[tuple[str, Action], int]
"""Tasks of a rank that receive, by the role of the pair and the tag of the message."""


class Addressee(Protocol):
    """Whoever can be told that one of its tasks is done."""

    def finish(self, number: int) -> None:
        """Note that task `number` is done."""


@dataclass(slots=True)
class World:
    """Shared state of one simulation; nothing here outlives it. sharing: which exchanges share a network's links.

    environment, network: the clock and the links, which jobs on one machine share, too.
    """

    program: Program
    classes: Classes
    cost: BlockCost
    coalesce: bool = True
    sharing: Sharing | None = None
    jitter: Jitter | None = None
    environment: Clock = field(default_factory=Clock)
    network: Network | None = None
    recorder: Recorder = field(default_factory=Recorder)
    ranks: dict[int, Addressee] = field(default_factory=dict)
    transfers: Transfers = field(init=False)
    paces: BlockPaces = field(init=False)
    joint: JointBlocks = field(init=False)
    _meetings: MeetingPlaces = field(init=False)
    _groups: dict[tuple[str, int], tuple[tuple[str, int], int]] = field(init=False, default_factory=dict)
    _members: dict[tuple[str, int], int] = field(init=False, default_factory=dict)
    _private: dict[tuple[Block, int, bool], bool] = field(init=False, default_factory=dict)
    _met: dict[tuple[Block, int], list[tuple[str, int]]] = field(init=False, default_factory=dict)
    _joint: dict[tuple[Block, int], str | None] = field(init=False, default_factory=dict)
    _own: dict[tuple[Block, int], str | None] = field(init=False, default_factory=dict)
    _receivers: dict[tuple[str, int], tuple[int, Receipts]] = field(init=False, default_factory=dict)
    _receipts: dict[int, Receipts] = field(init=False, default_factory=dict)
    _tasks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._meetings = MeetingPlaces(self.environment)
        self.paces = BlockPaces(self.program, self.cost, self.jitter)
        self.joint = JointBlocks(self.environment, self.program, self.classes, self.cost, self.jitter)
        if self.sharing is None:
            self.transfers = Uncontended(self.environment, self.cost)
        else:
            clock, links = self.environment, self.classes.links
            network = self.network = self.network or Network(clock, len(links))
            self.transfers = Shared(clock, Loads(self.program, self.classes, self.sharing.demands), network)
            for other in self.sharing.others:
                clock.process(beside(clock, network, other, links, self._finished))

    def _finished(self) -> bool:
        """Whether all simulated ranks are done."""
        if not self._tasks:
            self._tasks = sum(len(self.program_of(rank).tasks) for rank in self.ranks)
        return self.recorder.rows >= self._tasks

    def program_of(self, rank: int) -> RankProgram:
        """The tasks of a rank."""
        return self.program.programs[int(self.program.kind[rank])]

    def join(self, rank: int, exchange: Exchange, stream: Stream) -> Rendezvous:
        """Meet the other simulated members of the rank's group for the next collective of one of its streams."""
        group, members = self._group(exchange.group, rank)
        return self._meetings.join((group, stream), rank, members)

    def private(self, rank: int, block: Block, *, calm: bool = False) -> bool:
        """Whether the block may be one event: its exchanges concern no other simulated rank and share no links.

        calm: no collective of the rank's data stream can be beside it.
        """
        if not self.coalesce:
            return False
        known = self._private.get((block, rank, calm))
        if known is None:
            every = block.different
            known = not any(self.meets(rank, exchange) or self.shares(rank, exchange, calm=calm) for exchange in every)
            self._private[block, rank, calm] = known
        return known

    def joint_role(self, rank: int, block: Block) -> str | None:
        """The role whose group runs a rank's block as one (`joint`); None where each rank runs it by itself.

        All members must say so: of two that meet, one may meet others in a group of another role, too.
        """
        if not self.coalesce:
            return None
        if (block, rank) not in self._joint:
            role = self._own_role(rank, block)
            agreed = role is not None and all(self._own_role(mate, block) == role for mate in self._mates(role, rank))
            self._joint[block, rank] = role if agreed else None
        return self._joint[block, rank]

    def _own_role(self, rank: int, block: Block) -> str | None:
        """`_joins`, worked out once: every member of a group asks of every other."""
        if (block, rank) not in self._own:
            self._own[block, rank] = self._joins(rank, block)
        return self._own[block, rank]

    def _joins(self, rank: int, block: Block) -> str | None:
        """The only role in whose groups a rank meets others inside a block, if none of its exchanges shares links."""
        every = block.different
        roles = {exchange.group: None for exchange in every if self.meets(rank, exchange)}
        if len(roles) != 1 or any(self.shares(rank, item) for item in every):
            return None
        (role,) = roles
        return role if self.program.stays_inside(role) else None

    def _mates(self, role: str, rank: int) -> list[int]:
        """The simulated ranks that stand for the members of a rank's group."""
        members = self.program.groups[role].members[self.program.rows[role][rank]]
        return sorted(set(self.classes.representative[members].tolist()))

    def note(self, rank: int, number: int, block: Block) -> None:
        """Remember whose blocks ran together: task `number` of a rank."""
        if not self.private(rank, block):
            self.recorder.meet(rank, number, self._met_by(rank, block))

    def _met_by(self, rank: int, block: Block) -> list[tuple[str, int]]:
        """The groups whose other members a rank meets inside a block, by name, in the order of their first meetings."""
        known = self._met.get((block, rank))
        if known is None:
            groups = dict.fromkeys(self._group(exchange.group, rank) for exchange in block.different)
            known = self._met[block, rank] = [name for name, members in groups if members > 1]
        return known

    def shares(self, rank: int, exchange: Exchange, *, calm: bool = False) -> bool:
        """Whether an exchange inside a block shares links with others, in the rank's group.

        calm: no collective of the rank's data stream can be beside it, nor of those that it stands for in the group.
        """
        if self.sharing is None or exchange not in self.sharing.inside:
            return False
        row = self.program.rows[exchange.group][rank]
        idle = calm and self.sharing.own[exchange][row] and not self.meets(rank, exchange)
        return bool(self.sharing.inside[exchange][row] and not idle)

    def meets(self, rank: int, exchange: Exchange) -> bool:
        """Whether other simulated ranks take part in an exchange."""
        return self._group(exchange.group, rank)[1] > 1

    def deliver(self, sender: int, send: Send, start: Seconds, cause: int) -> None:
        """Finish the receive that a message was for, and write its span."""
        role = send.exchange.group
        receiver, receipts = self._receiver(role, sender)
        number, now = receipts[role, send.tag], self.environment.now
        self.recorder.span((receiver, number, _RECEIVE, cause, start, start, start, now, 0.0, 0.0))
        self.ranks[receiver].finish(number)

    def _receiver(self, role: str, sender: int) -> tuple[int, Receipts]:
        """The simulated rank that stands for the one that a rank sends to, and its tasks that receive."""
        known = self._receivers.get((role, sender))
        if known is None:
            pair = self.program.groups[role].members[self.program.rows[role][sender]]
            receiver = int(self.classes.representative[pair[1]])
            known = self._receivers[role, sender] = receiver, self._receipts_of(receiver)
        return known

    def _group(self, role: str, rank: int) -> tuple[tuple[str, int], int]:
        """The rank's group, named by its colour, and how many simulated ranks stand for its members."""
        known = self._groups.get((role, rank))
        if known is None:
            row = self.program.rows[role][rank]
            name = role, int(self.classes.groups[role][row])
            if name not in self._members:
                members = self.program.groups[role].members[row]
                self._members[name] = len(np.unique(self.classes.colour[members]))
            known = self._groups[role, rank] = name, self._members[name]
        return known

    def _receipts_of(self, rank: int) -> Receipts:
        kind = int(self.program.kind[rank])
        known = self._receipts.get(kind)
        if known is None:
            known = self._receipts[kind] = {
                (task.exchange.group, task.tag): number
                for number, task in enumerate(self.program.programs[kind].tasks)
                if isinstance(task, Receive)
            }
        return known
