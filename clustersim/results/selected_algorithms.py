"""Algorithms selected for the collectives of a step."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from clustersim.common.table import Column, ColumnType, Schema, Table
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.timing import CommTiming
from clustersim.program.program import Program
from clustersim.program.task import CommOp, HostOp

COLLECTIVE_COLUMNS: Final[Schema] = {
    "group": Column(ColumnType.TEXT, "process-group kind"),
    "collective": Column(ColumnType.TEXT, "collective, or message"),
    "ranks": Column(ColumnType.INTEGER, "size of a group"),
    "payload_bytes": Column(ColumnType.NUMBER, "payload in bytes, as nccl-tests count it"),
    "algorithm": Column(ColumnType.TEXT, "algorithm and protocol"),
    "uncontended_s": Column(ColumnType.NUMBER, "seconds in its slowest group, in isolation"),
    "provenance": Column(ColumnType.TEXT, "provenance of its duration"),
}


@dataclass(frozen=True, slots=True)
class SelectedAlgorithm:
    """A collective of a step and its uncontended duration in its slowest group.

    group: process-group kind; payload: bytes; algorithm: including the protocol.
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
        json_names = {"payload": "payload_bytes", "seconds": "uncontended_s"}
        return {json_names.get(key, key): value for key, value in asdict(self).items()}


def collective_table(selected: Iterable[SelectedAlgorithm]) -> Table:
    """A row for each of them; columns are the keys of its JSON."""
    rows = (algorithm.to_json() for algorithm in selected)
    return Table.from_rows(COLLECTIVE_COLUMNS, (tuple(row[name] for name in COLLECTIVE_COLUMNS) for row in rows))


def selected_algorithms(
    program: Program, time_comm_op: Callable[[CommOp], CommTiming]
) -> tuple[SelectedAlgorithm, ...]:
    """Every distinct collective and message between ranks in a step."""
    selected: list[SelectedAlgorithm] = []
    for comm_op in (op for op in program.comm_ops if not isinstance(op, HostOp)):
        groups, timing = program.groups[comm_op.comm_group].members, time_comm_op(comm_op)
        if groups.size and groups.shape[1] > 1:
            identity = comm_op.comm_group, comm_op.collective.value, groups.shape[1], comm_op.payload
            selected.append(
                SelectedAlgorithm(*identity, timing.algorithm, float(timing.seconds.max()), timing.provenance.value)
            )
    return tuple(selected)
