"""What of a profile belongs to which label?

Operators are nested: an operator belongs to the label around it; one of backward to that of the forward operator whose
sequence number it has (numbers are each thread's own, and a GPU's backward has a thread of its own, in which a forward
may be run again). What autograd adds where the residual forked is a residual's gradient sum, AccumulateGrad
accumulates, the sum of a product's gradient is its bias's. What has no label (views, the framework's own) is left out,
and so are collectives, in which a CPU waits for others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from calibrate.check.labels import ACCUMULATE, BIAS_GRADIENT, GRADIENT_SUM, PRODUCT, Label, named
from clustersim.units import Seconds

_NODE: Final = "autograd::engine::evaluate_function: "
_ADDITIONS: Final = ("aten::add", "aten::add_")
_SUMS: Final = ("aten::sum",)
_ACCUMULATE: Final = "AccumulateGrad"
_COLLECTIVES: Final = ("_c10d_functional", "c10d", "gloo:", "nccl:", "DistributedDataParallel", "FSDP")
_MICRO: Final = 1e-6

Forward = Mapping[tuple[int | None, int], Label]
"""Labels of forward operators, by their thread and sequence number."""


class Times(Protocol):
    """How long an operator of a profile takes by itself, without those inside it."""

    def of(self, event: Any) -> Seconds:
        """Seconds of one operator."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """On a CPU: its own time. What the profiler needs to write an operator down lies in the one around it.

    event: that is needed for each operator inside; label: for the label itself.
    """

    event: Seconds = 0.0
    label: Seconds = 0.0

    def of(self, event: Any) -> Seconds:
        """Seconds of one operator."""
        written = self.event * len(event.cpu_children) + self.label * (named(event.name) is not None)
        return float(event.self_cpu_time_total) * _MICRO - written


@dataclass(frozen=True, slots=True)
class OnDevice:
    """On a GPU: that of the kernels which it launched. turnover: from one kernel in a queue to the next."""

    turnover: Seconds = 0.0

    def of(self, event: Any) -> Seconds:
        """Seconds of one operator."""
        return float(sum(kernel.duration for kernel in event.kernels)) * _MICRO + self.turnover * len(event.kernels)


def folded(events: Any, times: Times) -> dict[Label, Seconds]:
    """Seconds of everything that has a label."""
    made = _forward(events)
    seconds: dict[Label, Seconds] = {}
    for root in (event for event in events if event.cpu_parent is None):
        for event, label in _walk(root, None, made):
            if label is not None:
                seconds[label] = seconds.get(label, 0.0) + times.of(event)
    return seconds


def _forward(events: Any) -> Forward:
    """Labels of the forward operators that made nodes of the graph: the last one that saw a number made its node."""
    made: dict[tuple[int | None, int], Label] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        label = _around(event)
        if label is not None and event.sequence_nr >= 0 and not event.name.startswith(_NODE):
            made[event.thread, event.sequence_nr] = label
    return made


def _around(event: Any) -> Label | None:
    """The nearest label around an operator of the forward."""
    while event is not None:
        label = named(event.name)
        if label is not None:
            return label
        event = event.cpu_parent
    return None


def _walk(event: Any, outer: Label | None, made: Forward) -> Iterator[tuple[Any, Label | None]]:
    """An operator and those inside it, with their labels."""
    label = _label(event, outer, made)
    yield event, label
    for inner in event.cpu_children:
        yield from _walk(inner, label, made)


def _label(event: Any, outer: Label | None, made: Forward) -> Label | None:
    name = event.name
    if name.startswith(_COLLECTIVES):
        return None
    if name.startswith(_NODE):
        return _of_node(name, made.get((event.fwd_thread, event.sequence_nr)))
    beside_node = event.cpu_parent is not None and event.cpu_parent.name.startswith(_NODE)
    return named(name) or (_of_engine(name, outer) if beside_node else outer)


def _of_node(name: str, forward: Label | None) -> Label | None:
    """The label of a node of backward, by that of its forward operator."""
    if _ACCUMULATE in name:
        return ACCUMULATE
    return None if forward is None else forward.gradient


def _of_engine(name: str, node: Label | None) -> Label | None:
    """The label of what runs in a node's place: the node itself, or what the engine does with its result."""
    if name in _ADDITIONS and node != ACCUMULATE:
        return GRADIENT_SUM
    return BIAS_GRADIENT if name in _SUMS and node == PRODUCT else node
