"""By which algorithm does each collective of a step travel?"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from clustersim.common.units import Bytes, Seconds
from clustersim.cost.timing import CommTiming
from clustersim.program.program import Program
from clustersim.program.task import CommOp, HostOp


@dataclass(frozen=True, slots=True)
class Taken:
    """A collective of a step, and what it takes alone in its slowest group.

    group: the role whose groups do it; payload: bytes; algorithm: with its protocol.
    """

    group: str
    collective: str
    ranks: int
    payload: Bytes
    algorithm: str
    seconds: Seconds
    provenance: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        named = {"payload": "payload_bytes", "seconds": "alone_s"}
        return {named.get(key, key): value for key, value in asdict(self).items()}


def taken(program: Program, timing: Callable[[CommOp], CommTiming]) -> tuple[Taken, ...]:
    """Every distinct collective and message between ranks of a step."""
    found: list[Taken] = []
    for exchange in (comm_op for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)):
        groups, how = program.groups[exchange.comm_group].members, timing(exchange)
        if groups.size and groups.shape[1] > 1:
            of = exchange.comm_group, exchange.collective.value, groups.shape[1], exchange.payload
            found.append(Taken(*of, how.algorithm, float(how.seconds.max()), how.provenance.value))
    return tuple(found)
