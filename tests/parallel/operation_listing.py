"""Operations of a layer as text: one line each, kernels by name, collectives with group and bytes, `||` for overlap."""

import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from clustersim.program.task import CommOp, CommOverlap, Operation

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"


def golden_listing(name: str) -> str:
    """The listing that a file holds, without its comments."""
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def comparable_operations(operations: Iterable[Operation]) -> list[tuple[object, ...]]:
    """The fields of operations, which are themselves compared by identity."""
    return [tuple(getattr(operation, field.name) for field in fields(operation)) for operation in operations]


def format_operations(operations: Iterable[Operation]) -> str:
    return "\n".join(map(_format_operation, operations))


def _format_operation(operation: Operation) -> str:
    body = operation.body
    gradient_note = f"  ({operation.gradient_count} gradients)" if operation.gradient_count else ""
    if isinstance(body, CommOp):
        label = _format_comm_op(body)
    elif isinstance(body, CommOverlap):
        chunks = "freely" if math.isinf(body.chunk_count) else f"in {body.chunk_count:g} chunks"
        label = f"{body.kernel.name}  ||  {_format_comm_op(body.comm_op)} {chunks}"
    else:
        label = body.name
    return f"{operation.work_type.value}: {label}{gradient_note}"


def _format_comm_op(comm_op: CommOp) -> str:
    return f"{comm_op.collective.value} over {comm_op.comm_group} of {comm_op.payload:g} B"
