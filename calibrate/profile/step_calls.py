"""What did one rank's GPU do in a profiled step, call by call?

Kernels that one call of an operator launches (a matmul with the memset of its workspace, attention backward with
its conversions) are one call. A call's seconds are those from its start to that of the next where the GPU went from
one to the other without waiting: the gap between two kernels that were both launched in time is a cost of the
device. Where the host launched too late, or a collective was waited for, the gap is not of the call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from calibrate.profile.plan_kernels import PassKind
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.interop.kernel_launches import KernelLaunches
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import COMPUTE_KINDS, GPU_SPAN_KINDS, GpuSpanKind, GpuSpanLabel, RankSpans

MAX_QUEUE_GAP: Final = 10e-6  # seconds: gaps between queued kernels are 1 to 3 us; longer ones have other causes
_ANCHOR_KINDS: Final = (GpuSpanKind.ATTENTION, GpuSpanKind.MATMUL)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call on the GPU. name: of its longest kernel; operator, dims: of the host's operator, if known.

    matmul: (m, n, k, batch), m >= n, where known; start, end: seconds; seconds: kernels and gaps between queued ones;
    stall: seconds for which the GPU waited for the host before it; kernels: their number; sequence: of the forward
    operator around it; node: of the autograd node around it; transfer: elements of the largest tensor of the operator
    of FSDP2 or of a process group around it, 0 if there is none; update: whether an optimizer step launched it;
    launch_start, launch_end: of the host; overlapped: seconds for which a collective was in flight, and collective:
    which one, for the most part.
    """

    name: str
    kind: GpuSpanKind
    start: Seconds
    end: Seconds
    seconds: Seconds
    stall: Seconds = 0.0
    kernels: int = 1
    operator: str = ""
    dims: Any = None
    matmul: tuple[int, int, int, int] | None = None
    sequence: int = -1
    node: int = -1
    node_name: str = ""
    transfer: float = 0.0
    update: bool = False
    launch_start: Seconds = 0.0
    launch_end: Seconds = 0.0
    overlapped: Seconds = 0.0
    collective: str = ""

    @property
    def is_anchor(self) -> bool:
        """Whether it is a matmul or attention."""
        return self.kind in _ANCHOR_KINDS

    @property
    def elements(self) -> float:
        """Elements of the largest input, 0 if unknown."""
        return _largest(self.dims)

    @property
    def pass_kind(self) -> PassKind:
        """The pass that it belongs to, as far as its own launch tells."""
        if self.update:
            return PassKind.OPTIMIZER
        return PassKind.BACKWARD if self.node >= 0 or self.node_name else PassKind.FORWARD

    @property
    def is_recomputed(self) -> bool:
        """Whether it is a forward within a backward."""
        return bool(self.node_name) and self.sequence >= 0


@dataclass(frozen=True, slots=True)
class CallPass:
    """Calls of a pass, in order."""

    kind: PassKind
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class StepCalls:
    """Calls of one step on the compute stream. elsewhere: seconds of computing kernels on other streams.

    has_nodes: whether the trace says which autograd node launched what.
    """

    number: int
    calls: tuple[Call, ...]
    elsewhere: Seconds
    has_nodes: bool

    @property
    def seconds(self) -> Seconds:
        """Seconds from its first call to the end of its last one."""
        return self.calls[-1].end - self.calls[0].start if self.calls else 0.0

    @property
    def passes(self) -> tuple[CallPass, ...]:
        """The passes of the step: forward, backward, and what is after the last backward."""
        last_backward = max((i for i, call in enumerate(self.calls) if call.pass_kind is PassKind.BACKWARD), default=-1)
        passes: list[CallPass] = []
        current: list[Call] = []
        kind = PassKind.FORWARD
        for index, call in enumerate(self.calls):
            call_kind = PassKind.OPTIMIZER if index > last_backward else call.pass_kind
            if call_kind is not kind and current:
                passes.append(CallPass(kind, tuple(current)))
                current = []
            kind = call_kind
            current.append(call)
        return (*passes, CallPass(kind, tuple(current)))


def read_step(spans: RankSpans, launches: KernelLaunches, step_index: int) -> StepCalls:
    """The calls of one step of a rank."""
    in_step = spans.step_index == step_index
    is_compute = in_step & (spans.kind < len(COMPUTE_KINDS))
    busy = spans.end - spans.start
    streams = np.unique(spans.stream[is_compute])
    totals = [float(busy[is_compute & (spans.stream == stream)].sum()) for stream in streams.tolist()]
    main = int(streams[int(np.argmax(totals))]) if len(streams) else 0
    selected = np.flatnonzero(is_compute & (spans.stream == main))
    is_host_copy = spans.kind == GPU_SPAN_KINDS.index(GpuSpanKind.HOST)
    others = np.flatnonzero(in_step & ~is_host_copy & ~(is_compute & (spans.stream == main)))
    slows = np.array([_slows_kernels(label) for label in spans.labels])[spans.label_index]
    communication = np.flatnonzero((spans.kind == GPU_SPAN_KINDS.index(GpuSpanKind.COMMUNICATION)) & slows)
    overlap = _CollectiveOverlap.from_spans(spans, communication[spans.stream[communication] != main])
    calls = tuple(map(overlap.of_call, _calls(spans, launches, selected, others)))
    return StepCalls(
        spans.step_numbers[step_index],
        calls,
        sum(totals) - max(totals, default=0.0),
        bool((launches.node_name[selected] >= 0).any()),
    )


@dataclass(frozen=True, slots=True)
class _CollectiveOverlap:
    """Collectives of a rank, merged where they overlap each other: start, end and name of each interval."""

    start: FloatArray
    end: FloatArray
    names: tuple[str, ...]

    @classmethod
    def from_spans(cls, spans: RankSpans, indices: IntArray) -> "_CollectiveOverlap":
        """From the spans of collectives, by start."""
        bounds: list[list[float]] = []
        names: list[str] = []
        for index in indices.tolist():
            start, end = float(spans.start[index]), float(spans.end[index])
            collective = spans.labels[int(spans.label_index[index])].collective
            if bounds and start < bounds[-1][1]:
                bounds[-1][1] = max(bounds[-1][1], end)
            else:
                bounds.append([start, end])
                names.append("" if collective is None else collective.name)
        array = np.array(bounds).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1], tuple(names))

    def of_call(self, call: Call) -> Call:
        """The call with its overlap."""
        first, last = np.searchsorted(self.end, call.start, "right"), np.searchsorted(self.start, call.end, "left")
        if first >= last:
            return call
        lengths = np.minimum(self.end[first:last], call.end) - np.maximum(self.start[first:last], call.start)
        longest = self.names[int(first + np.argmax(lengths))]
        return replace(call, overlapped=min(float(lengths.sum()), call.end - call.start), collective=longest)


def _slows_kernels(label: GpuSpanLabel) -> bool:
    """Whether kernels are taken to be slowed by it: a message to one neighbour needs few SMs and little bandwidth."""
    return label.collective is None or label.collective.name != CollectiveType.SEND_RECV.value


def _calls(spans: RankSpans, launches: KernelLaunches, selected: IntArray, others: IntArray) -> Iterator[Call]:
    """Kernels of the compute stream, merged by the operator's call."""
    other_start, other_end = spans.start[others], spans.end[others]
    previous_end: float | None = None
    pending: Call | None = None
    pending_call, longest = -1, 0.0
    clock = launches.queue_start - spans.start
    for index in selected.tolist():
        start, end = float(spans.start[index]), float(spans.end[index])
        launch_start, launch_end = (
            float(times[index] - clock[index]) for times in (launches.launch_start, launches.launch_end)
        )
        gap = 0.0 if previous_end is None else max(0.0, start - previous_end)
        was_queued = previous_end is not None and launch_end <= previous_end
        is_overlapped = bool(((other_start < start) & (other_end > start - gap)).any()) if gap > 0.0 else False
        own_gap = gap if was_queued and gap <= MAX_QUEUE_GAP else 0.0
        stall = 0.0 if own_gap or is_overlapped else gap
        call_number = int(launches.call[index])
        if pending is not None and call_number >= 0 and call_number == pending_call:
            is_longest = end - start > longest
            label = spans.labels[int(spans.label_index[index])]
            pending = replace(
                pending, end=end, seconds=pending.seconds + end - start + own_gap, stall=pending.stall + stall,
                kernels=pending.kernels + 1, launch_end=launch_end,
                name=label.name if is_longest else pending.name,
                kind=_merged_kind(pending.kind, label.kind, is_longest=is_longest),
                matmul=pending.matmul or label.matmul_shape,
            )  # fmt: skip
            longest = max(longest, end - start)
        else:
            if pending is not None:
                yield replace(pending, seconds=pending.seconds + own_gap)
                own_gap = 0.0
            pending = _new_call(spans, launches, index, stall, (launch_start, launch_end))
            pending_call, longest = call_number, end - start
        previous_end = end if previous_end is None else max(previous_end, end)
    if pending is not None:
        yield pending


def _new_call(
    spans: RankSpans, launches: KernelLaunches, index: int, stall: Seconds, launch: tuple[Seconds, Seconds]
) -> Call:
    label = spans.labels[int(spans.label_index[index])]
    operator, dims = _operator(launches, int(launches.operator[index]))
    node_name, _ = _operator(launches, int(launches.node_name[index]))
    _, transferred = _operator(launches, int(launches.transfer[index]))
    start, end = float(spans.start[index]), float(spans.end[index])
    return Call(
        label.name, GPU_SPAN_KINDS[int(spans.kind[index])], start, end, end - start, stall, 1, operator, dims,
        label.matmul_shape, int(launches.sequence[index]), int(launches.node[index]), node_name,
        _largest(transferred), bool(launches.in_update[index]), *launch,
    )  # fmt: skip


def _operator(launches: KernelLaunches, index: int) -> tuple[str, Any]:
    return launches.operators[index] if index >= 0 else ("", None)


def _merged_kind(first: GpuSpanKind, second: GpuSpanKind, *, is_longest: bool) -> GpuSpanKind:
    """The kind of a call of two kernels: attention, else a matmul, else that of the longer one."""
    for kind in _ANCHOR_KINDS:
        if kind in (first, second):
            return kind
    return second if is_longest else first


def _largest(dims: Any) -> float:
    """Elements of the largest tensor among an operator's inputs, 0 if unknown."""
    return max((float(np.prod(shape)) for shape in _tensors(dims)), default=0.0)


def _tensors(dims: Any) -> Iterator[Sequence[int]]:
    """Shapes of the tensors among an operator's inputs, those in lists too."""
    for entry in dims if isinstance(dims, list) else ():
        if isinstance(entry, list) and entry:
            if all(isinstance(size, int) for size in entry):
                yield entry
            else:
                yield from _tensors(entry)
