"""What of a profile belongs to which label?

Operators are nested: an operator belongs to the label around it; one of backward to that of the forward operator whose
sequence number it has (numbers are each thread's own, and a GPU's backward has a thread of its own, in which a forward
may be run again). What autograd adds is its node's, where a formula uses a tensor twice; but the last addition
beside a norm before the gradient reaches the next residual is the sum of gradients where the residual stream forked
(the norm's nodes are the later ones, by their sequence numbers). AccumulateGrad accumulates, the sum of a product's
gradient is its bias's. What has no label (views, the framework's own) is left out, and so are collectives, in which a
CPU waits for others.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from calibrate.check.operator_labels import ACCUMULATE, BIAS_GRADIENT, GRADIENT_SUM, PRODUCT, Label, named
from clustersim.common.units import Seconds
from clustersim.model.kernels import KernelKind

_NODE: Final = "autograd::engine::evaluate_function: "
_STEP: Final = "ProfilerStep"
_ADDITIONS: Final = ("aten::add", "aten::add_")
_SUMS: Final = ("aten::sum",)
_ACCUMULATE: Final = "AccumulateGrad"
_COLLECTIVES: Final = ("_c10d_functional", "c10d", "gloo:", "nccl:", "DistributedDataParallel", "FSDP")
_BETWEEN_FORKS: Final = (KernelKind.RESIDUAL, KernelKind.LOSS, KernelKind.EMBEDDING)
_RUNTIME: Final = re.compile("(cu|cuda|hip)[A-Z]")
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
        return max(0.0, float(event.self_cpu_time_total) * _MICRO - written)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """On a GPU: that of the kernels which it launched. turnover: from one kernel in a queue to the next."""

    turnover: Seconds = 0.0

    def of(self, event: Any) -> Seconds:
        """Seconds of one operator."""
        if of_runtime(event):
            return 0.0
        return float(sum(kernel.duration for kernel in event.kernels)) * _MICRO + self.turnover * len(event.kernels)


def of_runtime(event: Any) -> bool:
    """Whether it is a call of the runtime's or the driver's own, such as cudaLaunchKernel.

    Calls have numbers of their own, which are some operator's, too; PyTorch 2.11 gives them its kernels, 2.13 does not.
    """
    return _RUNTIME.match(event.name) is not None


def folded(events: Any, times: Times) -> dict[Label, Seconds]:
    """Seconds of everything that has a label."""
    made, sums, seconds = _forward(events), _GradientSums(), dict[Label, Seconds]()
    for root in sorted(filter(_is_root, events), key=lambda event: event.time_range.start):
        sums.follow(root, _label(root, None, made))
        for event, label in _walk(root, None, made):
            if label is not None:
                seconds[label] = seconds.get(label, 0.0) + times.of(event)
    for addition, norm in sums.found():
        spent = sum(times.of(event) for event, _ in _walk(addition, norm, made))
        seconds[norm] -= spent
        seconds[GRADIENT_SUM] = seconds.get(GRADIENT_SUM, 0.0) + spent
    return seconds


def _is_root(event: Any) -> bool:
    """Whether nothing is around it but the profiler's own mark of a step, which is none."""
    marked = event.cpu_parent is not None and event.cpu_parent.name.startswith(_STEP)
    return marked or (event.cpu_parent is None and not event.name.startswith(_STEP))


@dataclass(slots=True)
class _GradientSums:
    """Additions where the residual stream forked, each with the label of the norm beside which it is."""

    _found: list[tuple[Any, Label]] = field(default_factory=list)
    _last: tuple[Any, Label] | None = None
    _forked: bool = False

    def follow(self, node: Any, label: Label | None) -> None:
        """The next node of backward."""
        if label is None or not node.name.startswith(_NODE):
            return
        if label.kind in _BETWEEN_FORKS:
            self._settle()
            self._forked = label.kind is KernelKind.RESIDUAL
        elif label.kind is KernelKind.NORM:
            additions = [inner for inner in node.cpu_children if inner.name in _ADDITIONS]
            self._last = (additions[-1], label) if additions else self._last

    def found(self) -> list[tuple[Any, Label]]:
        """All that were followed."""
        self._settle()
        return self._found

    def _settle(self) -> None:
        if self._forked and self._last is not None:
            self._found.append(self._last)
        self._last = None


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
    return BIAS_GRADIENT if name in _SUMS and node == PRODUCT else node
