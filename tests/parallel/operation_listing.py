"""A layer's operations as text: one line each, kernels by name, collectives with group and bytes, `||` for overlap."""

import math
from collections.abc import Iterable
from pathlib import Path

from clustersim.program.task import CommOp, CommOverlap, Operation

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"


def golden(name: str) -> str:
    """The listing that a file holds, without its comments."""
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def listing(operations: Iterable[Operation]) -> str:
    return "\n".join(map(_line, operations))


def _line(operation: Operation) -> str:
    does = operation.body
    marked = f"  ({operation.gradient_count} gradients)" if operation.gradient_count else ""
    if isinstance(does, CommOp):
        what = _exchange(does)
    elif isinstance(does, CommOverlap):
        chunks = "freely" if math.isinf(does.chunk_count) else f"in {does.chunk_count:g} chunks"
        what = f"{does.kernel.name}  ||  {_exchange(does.comm_op)} {chunks}"
    else:
        what = does.name
    return f"{operation.work_type.value}: {what}{marked}"


def _exchange(exchange: CommOp) -> str:
    return f"{exchange.collective.value} over {exchange.comm_group} of {exchange.payload:g} B"
