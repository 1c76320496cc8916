"""Attribution of profiler events to operator labels.

Events are nested: an operator belongs to the label around it; a backward operator to that of the forward
operator with the same sequence number (numbers are per thread, and a GPU's backward has a thread of its own,
in which a forward may be recomputed). Additions by autograd, where a formula uses a tensor twice, belong to
their node; but the last addition at a norm before the gradient reaches the next residual is the sum of
gradients where the residual stream forked (the norm's nodes are the later ones, by their sequence numbers).
AccumulateGrad accumulates; the sum of a matmul's gradient is that of its bias. Events without a label
(views, framework internals) are ignored, and so are collectives, in which a CPU waits for others.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from calibrate.check.operator_labels import ACCUMULATE, BIAS_GRADIENT, GRADIENT_SUM, MATMUL, OperatorLabel, parse_label
from clustersim.common.units import Seconds
from clustersim.model.kernels import KernelKind

_AUTOGRAD_NODE: Final = "autograd::engine::evaluate_function: "
_STEP: Final = "ProfilerStep"
_ADD_OPS: Final = ("aten::add", "aten::add_")
_SUM_OPS: Final = ("aten::sum",)
_ACCUMULATE_GRAD: Final = "AccumulateGrad"
_IGNORED_PREFIXES: Final = ("_c10d_functional", "c10d", "gloo:", "nccl:", "DistributedDataParallel", "FSDP")
_FORK_BOUNDARIES: Final = (KernelKind.RESIDUAL, KernelKind.LOSS, KernelKind.EMBEDDING)
_RUNTIME: Final = re.compile("(cu|cuda|hip)[A-Z]")
_MICROSECOND: Final = 1e-6

ForwardLabels = Mapping[tuple[int | None, int], OperatorLabel]
"""Labels of forward operators, by thread and sequence number."""


class OperatorTimer(Protocol):
    """Exclusive time of a profiled operator, without nested operators."""

    def operator_seconds(self, event: Any) -> Seconds:
        """Seconds of one operator."""


@dataclass(frozen=True, slots=True)
class HostTimer:
    """CPU: self time. The profiler's overhead of recording an operator is part of the enclosing operator's time.

    event_overhead: seconds per nested operator; label_overhead: seconds of the label itself.
    """

    event_overhead: Seconds = 0.0
    label_overhead: Seconds = 0.0

    def operator_seconds(self, event: Any) -> Seconds:
        """Seconds of one operator."""
        profiler_overhead = self.event_overhead * len(event.cpu_children) + self.label_overhead * (
            parse_label(event.name) is not None
        )
        return max(0.0, float(event.self_cpu_time_total) * _MICROSECOND - profiler_overhead)


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """GPU: time of the kernels that an operator launched. kernel_gap: seconds between queued kernels."""

    kernel_gap: Seconds = 0.0

    def operator_seconds(self, event: Any) -> Seconds:
        """Seconds of one operator."""
        if of_runtime(event):
            return 0.0
        return float(sum(kernel.duration for kernel in event.kernels)) * _MICROSECOND + self.kernel_gap * len(
            event.kernels
        )


def of_runtime(event: Any) -> bool:
    """Whether it is a call of the runtime's or the driver's own, such as cudaLaunchKernel.

    Calls have numbers of their own, which are some operator's, too; PyTorch 2.11 gives them its kernels, 2.13 does not.
    """
    return _RUNTIME.match(event.name) is not None


def seconds_by_label(events: Any, timer: OperatorTimer) -> dict[OperatorLabel, Seconds]:
    """Seconds of all events with a label, by label."""
    forward_labels, gradient_sums, seconds = (
        _forward_labels(events),
        _ForkGradientSums(),
        dict[OperatorLabel, Seconds](),
    )
    for root in sorted(filter(_is_root, events), key=lambda event: event.time_range.start):
        gradient_sums.visit_node(root, _operator_label(root, None, forward_labels))
        for event, label in _walk_labelled(root, None, forward_labels):
            if label is not None:
                seconds[label] = seconds.get(label, 0.0) + timer.operator_seconds(event)
    for addition, norm in gradient_sums.additions():
        addition_seconds = sum(
            timer.operator_seconds(event) for event, _ in _walk_labelled(addition, norm, forward_labels)
        )
        seconds[norm] -= addition_seconds
        seconds[GRADIENT_SUM] = seconds.get(GRADIENT_SUM, 0.0) + addition_seconds
    return seconds


def _is_root(event: Any) -> bool:
    """Whether nothing is around it but the profiler's own mark of a step, which is none."""
    marked = event.cpu_parent is not None and event.cpu_parent.name.startswith(_STEP)
    return marked or (event.cpu_parent is None and not event.name.startswith(_STEP))


@dataclass(slots=True)
class _ForkGradientSums:
    """Gradient additions at forks of the residual stream, each with the label of the adjacent norm."""

    _additions: list[tuple[Any, OperatorLabel]] = field(default_factory=list)
    _candidate: tuple[Any, OperatorLabel] | None = None
    _is_in_branch: bool = False

    def visit_node(self, node: Any, label: OperatorLabel | None) -> None:
        """Visit the next node of backward."""
        if label is None or not node.name.startswith(_AUTOGRAD_NODE):
            return
        if label.kind in _FORK_BOUNDARIES:
            self._commit()
            self._is_in_branch = label.kind is KernelKind.RESIDUAL
        elif label.kind is KernelKind.NORM:
            additions = [child for child in node.cpu_children if child.name in _ADD_OPS]
            self._candidate = (additions[-1], label) if additions else self._candidate

    def additions(self) -> list[tuple[Any, OperatorLabel]]:
        """All additions that were seen."""
        self._commit()
        return self._additions

    def _commit(self) -> None:
        if self._is_in_branch and self._candidate is not None:
            self._additions.append(self._candidate)
        self._candidate = None


def _forward_labels(events: Any) -> ForwardLabels:
    """Labels of forward operators that created autograd nodes: the last one with a sequence number."""
    labels: dict[tuple[int | None, int], OperatorLabel] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        label = _enclosing_label(event)
        if label is not None and event.sequence_nr >= 0 and not event.name.startswith(_AUTOGRAD_NODE):
            labels[event.thread, event.sequence_nr] = label
    return labels


def _enclosing_label(event: Any) -> OperatorLabel | None:
    """The innermost label around a forward operator."""
    while event is not None:
        label = parse_label(event.name)
        if label is not None:
            return label
        event = event.cpu_parent
    return None


def _walk_labelled(
    event: Any, enclosing: OperatorLabel | None, forward_labels: ForwardLabels
) -> Iterator[tuple[Any, OperatorLabel | None]]:
    """An operator and its nested ones, with their labels."""
    label = _operator_label(event, enclosing, forward_labels)
    yield event, label
    for child in event.cpu_children:
        yield from _walk_labelled(child, label, forward_labels)


def _operator_label(event: Any, enclosing: OperatorLabel | None, forward_labels: ForwardLabels) -> OperatorLabel | None:
    name = event.name
    if name.startswith(_IGNORED_PREFIXES):
        return None
    if name.startswith(_AUTOGRAD_NODE):
        return _backward_label(name, forward_labels.get((event.fwd_thread, event.sequence_nr)))
    is_in_node = event.cpu_parent is not None and event.cpu_parent.name.startswith(_AUTOGRAD_NODE)
    return parse_label(name) or (_engine_label(name, enclosing) if is_in_node else enclosing)


def _backward_label(name: str, forward: OperatorLabel | None) -> OperatorLabel | None:
    """The label of a backward node, from that of its forward operator."""
    if _ACCUMULATE_GRAD in name:
        return ACCUMULATE
    return None if forward is None else forward.backward_label


def _engine_label(name: str, node_label: OperatorLabel | None) -> OperatorLabel | None:
    """The label of an operator run by an autograd node: the node's, or a bias gradient."""
    return BIAS_GRADIENT if name in _SUM_OPS and node_label == MATMUL else node_label
