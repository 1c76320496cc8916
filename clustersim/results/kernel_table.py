"""Which kernels does a step run, how often, and how long do they take?"""

from collections.abc import Iterable
from math import nan
from typing import Any, Final

from clustersim.common.table import Column, ColumnType, Schema, Table
from clustersim.model.kernels import Kernel, format_kernel_shape
from clustersim.program.task import CommOp, CommOverlap
from clustersim.results.provenance import BusyTimeItem

KERNEL_COLUMNS: Final[Schema] = {
    "name": Column(ColumnType.TEXT, "name"),
    "kind": Column(ColumnType.TEXT, "kernel family"),
    "dtype": Column(ColumnType.TEXT, "compute format"),
    "shape": Column(ColumnType.TEXT, "its shape; empty if unknown"),
    "collective": Column(ColumnType.TEXT, "the collective or ring that it is pipelined with; empty: none"),
    "runs": Column(ColumnType.INTEGER, "executions on all ranks in all simulated steps"),
    "seconds": Column(ColumnType.NUMBER, "seconds of all executions, of the longer of both where pipelined"),
    "flop": Column(ColumnType.NUMBER, "FLOP of one execution, as executed"),
    "memory_bytes": Column(ColumnType.NUMBER, "read and written in device memory by one execution"),
    "provenance": Column(ColumnType.TEXT, "provenance of its duration"),
    "expected_error": Column(ColumnType.NUMBER, "expected relative error of its duration; NaN if nothing was measured"),
}


def kernel_table(items: Iterable[BusyTimeItem]) -> Table:
    """A row for every distinct kernel and provenance among the items, in their order."""
    return Table.from_rows(
        KERNEL_COLUMNS, (_kernel_row(item, item.body) for item in items if not isinstance(item.body, CommOp))
    )


def _kernel_row(item: BusyTimeItem, body: Kernel | CommOverlap) -> tuple[Any, ...]:
    kernel, collective = (body.kernel, body.comm_op.name) if isinstance(body, CommOverlap) else (body, "")
    return (
        kernel.name,
        kernel.kind.value,
        kernel.dtype.value,
        format_kernel_shape(kernel.shape),
        collective,
        item.runs,
        item.seconds,
        float(kernel.flops),
        float(kernel.bytes),
        item.provenance.value,
        nan if item.error is None else item.error,
    )
