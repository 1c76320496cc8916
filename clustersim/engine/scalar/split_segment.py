"""Where is a block cut that is not one event, and what is known of its pieces before they run?

Ranks meet before pieces only. What a piece asks of other ranks and of the network is the same whenever the block runs,
so it is worked out once.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from clustersim.engine.scalar.fast_path import Course
from clustersim.engine.scalar.fluid_action import Paces
from clustersim.engine.scalar.shared_state import World
from clustersim.engine.scalar.sub_segment import Piece, Transfer
from clustersim.program.task import Block, Exchange, Operation


@dataclass(slots=True)
class Cuts:
    """Cuts the blocks of one rank."""

    rank: int
    world: World
    _known: dict[tuple[Block, bool], list[Piece]] = field(default_factory=dict)
    _exchanges: dict[tuple[int, bool], tuple[bool, bool]] = field(default_factory=dict)
    _courses: dict[tuple[Block, int], Course | None] = field(default_factory=dict)

    def of(self, block: Block, whole: Paces, *, quiet: bool) -> list[Piece]:
        """The pieces of a block. whole: its paces; quiet: nothing can be beside it."""
        known = self._known.get((block, quiet))
        if known is None:
            pieces = pairwise(self._places(block, quiet=quiet))
            known = self._known[block, quiet] = [self._piece(block, whole, *piece, quiet=quiet) for piece in pieces]
        return known

    def course(self, block: Block, whole: Paces, piece: int) -> Course | None:
        """What a block can do as one event from a piece on where nothing can be beside it, if links are free."""
        key = block, piece
        if key not in self._courses:
            self._courses[key] = Course.of(self.of(block, whole, quiet=True)[piece:], whole)
        return self._courses[key]

    def _places(self, block: Block, *, quiet: bool) -> list[int]:
        """Where pieces begin, and the end."""
        places = range(len(block.operations) + 1)
        if not self.world.coalesce:
            return list(places)
        told = [self._told(operation, quiet=quiet) for operation in block.operations]
        return [0, *(n for n in places[1:-1] if any(told[n]) or told[n - 1][1]), len(block.operations)]

    def _piece(self, block: Block, whole: Paces, begin: int, end: int, *, quiet: bool) -> Piece:
        exchange = block.operations[begin].exchange
        meets, shares = self._told(block.operations[begin], quiet=quiet)
        transfer = self._transfer(block, begin, exchange) if exchange is not None and shares else None
        paces = whole.between(begin, end) if self.world.jitter is None else None
        return Piece(begin, end, exchange if meets else None, transfer, paces)

    def _told(self, operation: Operation, *, quiet: bool) -> tuple[bool, bool]:
        """Whether others take part in an operation's exchange, and whether it shares links."""
        exchange = operation.exchange
        if exchange is None:
            return False, False
        key = id(exchange), quiet  # blocks keep their exchanges, which take longer to hash
        if key not in self._exchanges:
            meets = self.world.meets(self.rank, exchange)
            self._exchanges[key] = meets, self.world.shares(self.rank, exchange, calm=quiet)
        return self._exchanges[key]

    def _transfer(self, block: Block, place: int, exchange: Exchange) -> Transfer:
        world, timing = self.world, self.world.cost.block(self.rank, block)
        alone = world.cost.exchange(self.rank, exchange).seconds
        begin, asks = world.transfers.ready(self.rank, exchange), world.transfers.asks(self.rank, exchange)
        return Transfer(begin, *asks, alone, timing.together.get(place), float(timing.exposed[place]))
