"""A layer's operations as text: one line each, kernels by name, collectives with group and bytes, `||` for overlap."""

import math
from collections.abc import Iterable
from pathlib import Path

from clustersim.program.task import Exchange, Operation, Overlap

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"


def golden(name: str) -> str:
    """The listing that a file holds, without its comments."""
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def listing(operations: Iterable[Operation]) -> str:
    return "\n".join(map(_line, operations))


def _line(operation: Operation) -> str:
    does = operation.does
    marked = f"  ({operation.gradients} gradients)" if operation.gradients else ""
    if isinstance(does, Exchange):
        what = _exchange(does)
    elif isinstance(does, Overlap):
        chunks = "freely" if math.isinf(does.chunks) else f"in {does.chunks:g} chunks"
        what = f"{does.kernel.name}  ||  {_exchange(does.exchange)} {chunks}"
    else:
        what = does.name
    return f"{operation.work.value}: {what}{marked}"


def _exchange(exchange: Exchange) -> str:
    return f"{exchange.collective.value} over {exchange.group} of {exchange.payload:g} B"
