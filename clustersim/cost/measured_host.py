"""How long does a host need for a launch, as it was measured?

Rows of a record's host stand for its own accelerator's host, for frameworks that launch in the same way
(`Framework.recorded`), and where they were measured: those of published and derived records are of other machines. The
usual pace is that of eager modules, or of compiled ones. Sharded parameters come with hooks, tensor parallelism with
DTensor's dispatch; each adds what its own row is longer than the eager one. Compiled layers have no such dispatch left.
Assumed: what they add does not depend on each other.

A GPU's host runs ahead of it (`cost.host_launch`). On a CPU it is the thread that computes, so only what kernels timed by
themselves do not contain is left to add (`HostRow.alone`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import HostRow, HostState, Origin, Record
from clustersim.cost.host_launch import Host, Launching, SameThread
from clustersim.model.framework import Captured, Framework, Recorded
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for a launch of forward and of backward."""

    forward: Seconds
    backward: Seconds

    @classmethod
    def of(cls, row: HostRow, *, beyond: bool = False) -> "Pace":
        """A row's; beyond: without what is in kernels that are timed by themselves."""
        alone = row.alone if beyond else (0.0, 0.0)
        return cls(max(0.0, row.forward - alone[0]), max(0.0, row.backward - alone[1]))

    def plus(self, longer: "Pace", base: "Pace") -> "Pace":
        """The pace, and what a longer one takes more than its base."""
        return Pace(
            self.forward + max(0.0, longer.forward - base.forward),
            self.backward + max(0.0, longer.backward - base.backward),
        )


def host_rows(record: Record | None) -> Mapping[HostState, HostRow]:
    """What a record says of its own machine's host; nothing without an eager row, to which the others are compared."""
    if record is None or record.origin is not Origin.MEASURED:
        return {}
    rows = {row.state: row for row in record.host}
    return rows if HostState.EAGER in rows else {}


def computes(record: Record) -> bool:
    """Whether the host is what computes: a CPU has threads of its own."""
    return record.device.threads > 0


def host_of(record: Record | None, framework: Framework, layout: Layout) -> Host:
    """What launches a rank's kernels: the framework's own constants, or the measured host where it stands for them."""
    graph, parts = framework.graph if framework.cuda_graphs else None, framework.captured is Captured.OUTSIDE_EXPERTS
    paces = framework.launch, framework.backward_launch, framework.collective, framework.call
    own = Launching(*paces, graph, outside_experts=parts)
    rows = host_rows(record)
    if record is None or not rows or framework.recorded is Recorded.NOTHING:
        return own
    if computes(record):
        pace = _pace(rows, framework, layout, beyond=True)
        return SameThread(pace.forward, pace.backward)
    pace = _pace(rows, framework, layout, beyond=False)
    captured = rows.get(HostState.GRAPH)
    if framework.cuda_graphs and captured is not None:
        own = replace(own, graph=(captured.forward + captured.backward) / 2.0)
    return replace(own, forward=pace.forward, backward=pace.backward)


def states_of(framework: Framework, layout: Layout) -> tuple[HostState, ...]:
    """The states that say what a step's launches take: that of its layers, and what is added to them."""
    if framework.recorded is Recorded.NOTHING:
        return ()
    own = framework.recorded is Recorded.TORCH
    there = {
        HostState.EAGER: True,
        HostState.COMPILED: own and framework.compiled,
        HostState.DTENSOR: own and layout.tp > 1 and not framework.compiled,
        HostState.FSDP: own and layout.dp * layout.cp > 1 and isinstance(layout.data, FullyShard),
        HostState.GRAPH: framework.cuda_graphs,
    }
    return tuple(state for state, needed in there.items() if needed)


def _pace(rows: Mapping[HostState, HostRow], framework: Framework, layout: Layout, *, beyond: bool) -> Pace:
    """What launches take; what was not measured adds nothing."""
    known = replace(framework, compiled=framework.compiled and HostState.COMPILED in rows)
    paces = {state: Pace.of(rows[state], beyond=beyond) for state in states_of(known, layout) if state in rows}
    eager = paces[HostState.EAGER]
    found = paces.get(HostState.COMPILED, eager)
    for state in (HostState.DTENSOR, HostState.FSDP):
        found = found.plus(paces.get(state, eager), eager)
    return found
