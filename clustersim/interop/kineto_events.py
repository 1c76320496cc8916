"""What does one rank's trace of PyTorch's profiler contain, in columns?

Events are read one after the other and kept as numbers, so that a trace of gigabytes needs a small part of its
size: GPU events, the host's launches, its operators (with input shapes and autograd sequence numbers) and
marks of steps. Everything else (Python frames, arrows, counters) is passed over.

Reference: pytorch/kineto, libkineto/src/output_json.cpp
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeGuard

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, format_value

GPU_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
LAUNCH_CATEGORIES: Final = ("cuda_runtime", "cuda_driver", "runtime", "driver", "privateuse1_runtime")
STEP_MARKER: Final = "ProfilerStep#"
OPTIMIZER_MARKER: Final = "Optimizer.step#"
GLOO_PREFIX: Final = "gloo:"
_BARRIER: Final = "gloo:barrier"
_LARGEST_TIME: Final = 1e300  # far beyond any time, and far below what a float cannot hold
NO_ID: Final = -1
"""An id that an event lacks."""
TraceEvent = Mapping[str, Any]
_GPU: Final = frozenset(GPU_CATEGORIES)
_LAUNCH: Final = frozenset(LAUNCH_CATEGORIES)
_COMMUNICATION_KEYS: Final = (
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "bytes",
)  # fmt: skip


@dataclass(slots=True)
class _Interner:
    """Numbers of distinct values, in order of first use."""

    index: dict[Any, int] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    def add(self, key: Any, value: Any) -> int:
        """The number of a value; key: hashable, equal for equal values."""
        number = self.index.get(key)
        if number is None:
            number = self.index[key] = len(self.values)
            self.values.append(value)
        return number


class Columns:
    """Columns of numbers that grow together, by name."""

    def __init__(self, floats: Iterable[str], integers: Iterable[str]) -> None:
        self._arrays: dict[str, array[Any]] = {name: array("d") for name in floats}
        self._arrays |= {name: array("q") for name in integers}

    def append(self, *row: float) -> None:
        """Add one row, in the order of the columns."""
        for column, value in zip(self._arrays.values(), row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def floats(self, name: str) -> FloatArray:
        """A column of floats."""
        return np.array(self._arrays[name], dtype=np.float64)

    def integers(self, name: str) -> IntArray:
        """A column of integers."""
        return np.array(self._arrays[name], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HostCollective:
    """A collective that the host ran: begin and end; elements: of its input; dtype: as PyTorch names it."""

    name: str
    interval: tuple[float, float]
    thread: int
    elements: int
    dtype: str


class RankEvents:
    """The events of one trace; times are microseconds.

    gpu: GPU events (name, arguments and category are indices into `labels`); launches: of the host, by
    correlation id; operators: of the host (name, dims: indices into `names` and `dims`; thread into `threads`);
    marks: begin and end of annotated steps by their number; updates: begin and end of optimizer steps;
    host_collectives: those of Gloo.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.gpu = Columns(("start", "duration"), ("stream", "correlation", "operator", "label"))
        self.launches = Columns(("start", "duration"), ("correlation", "thread"))
        self.operators = Columns(("start", "duration"), ("thread", "name", "dims", "sequence", "id"))
        self.marks: dict[int, tuple[float, float]] = {}
        self.updates: list[tuple[float, float]] = []
        self.host_collectives: list[HostCollective] = []
        self._labels, self._names, self._dims = _Interner(), _Interner(), _Interner()
        self._threads, self._ids = _Interner(), _Interner()
        self._categories: dict[Any, str] = {}

    @property
    def labels(self) -> list[tuple[str, str, TraceEvent]]:
        """Name, category and arguments of distinct GPU events."""
        return self._labels.values

    @property
    def names(self) -> list[str]:
        """Distinct names of operators."""
        return self._names.values

    @property
    def dims(self) -> list[Any]:
        """Distinct input shapes of operators."""
        return self._dims.values

    def add(self, event: Any) -> None:
        """Add one event of a trace."""
        if not isinstance(event, dict):
            return
        raw = event.get("cat")
        category = self._categories.get(raw) if isinstance(raw, str) else str(raw).lower()
        if category is None:
            category = self._categories[raw] = str(raw).lower()
        if category == "cpu_op":
            self._add_operator(event)
        elif category in _GPU:
            self._add_gpu_event(event, category)
        elif category in _LAUNCH:
            self._add_launch(event)
        else:
            self._add_annotation(event, category)

    def add_host_kernel(
        self,
        name: str,
        interval: tuple[float, float],
        ids: tuple[int, int, int],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a kernel that the host ran itself: start and duration; thread, correlation id and operator's id."""
        (start, duration), (thread, correlation, operator) = interval, ids
        label = self._labels.add((name, "kernel", str(arguments)), (name, "kernel", arguments))
        self.gpu.append(start, duration, thread, correlation, operator, label)
        self.launches.append(start, 0.0, correlation, thread)

    def _add_gpu_event(self, event: TraceEvent, category: str) -> None:
        arguments, name = event_arguments(event), str(event.get("name", ""))
        details = {key: arguments[key] for key in _COMMUNICATION_KEYS if key in arguments}
        label = self._labels.add((name, category, str(details) if details else ""), (name, category, details))
        stream = arguments.get("stream", event.get("tid", 0))
        self.gpu.append(
            read_microseconds(self.file, event, "ts"),
            read_microseconds(self.file, event, "dur"),
            _int64(stream, 0),
            self._id(arguments.get("correlation")),
            self._id(arguments.get("External id")),
            label,
        )

    def _add_launch(self, event: TraceEvent) -> None:
        correlation = self._id(event_arguments(event).get("correlation"))
        if correlation != NO_ID:
            duration = event.get("dur", 0.0)
            self.launches.append(
                read_microseconds(self.file, event, "ts"),
                duration if _is_finite(duration) else 0.0,
                correlation,
                self._thread(event),
            )

    def _add_operator(self, event: TraceEvent) -> None:
        arguments, name = event_arguments(event), str(event.get("name", ""))
        start, duration = event.get("ts"), event.get("dur", 0.0)
        if not (_is_finite(start) and _is_finite(duration)):
            return
        dims = arguments.get("Input Dims")
        self.operators.append(
            start,
            duration,
            self._thread(event),
            self._names.add(name, name),
            NO_ID if dims is None else self._dims.add(str(dims), dims),
            _int64(arguments.get("Sequence number", NO_ID), NO_ID),
            self._id(arguments.get("External id")),
        )

    def _add_annotation(self, event: TraceEvent, category: str) -> None:
        name = event.get("name")
        if not isinstance(name, str) or event.get("ph") != "X" or category.startswith("gpu"):
            return
        if name.startswith(STEP_MARKER) and name.removeprefix(STEP_MARKER).isdecimal():
            self.marks.setdefault(int(name.removeprefix(STEP_MARKER)), self._interval(event))
        elif name.startswith(OPTIMIZER_MARKER) and category == "user_annotation":
            self.updates.append(self._interval(event))
        elif name.startswith(GLOO_PREFIX) and name != _BARRIER:
            self._add_host_collective(event, name.removeprefix(GLOO_PREFIX))

    def _add_host_collective(self, event: TraceEvent, name: str) -> None:
        arguments = event_arguments(event)
        dims, types = arguments.get("Input Dims"), arguments.get("Input type")
        shapes = dims if isinstance(dims, list) else []
        sizes = [math.prod(shape) for shape in shapes if isinstance(shape, list) and _is_shape(shape)]
        dtype = str(types[0]) if isinstance(types, list) and types else ""
        collective = HostCollective(name, self._interval(event), self._thread(event), sum(sizes), dtype)
        self.host_collectives.append(collective)

    def _interval(self, event: TraceEvent) -> tuple[float, float]:
        begin = read_microseconds(self.file, event, "ts")
        return begin, begin + read_microseconds(self.file, event, "dur")

    def _thread(self, event: TraceEvent) -> int:
        key = str(event.get("pid")), str(event.get("tid"))
        return self._threads.add(key, key)

    def _id(self, value: Any) -> int:
        """An id that links events, as a number: text ids are numbered below -1."""
        if type(value) is int:
            return _int64(value, NO_ID)
        return -2 - self._ids.add(value, value) if isinstance(value, str) else NO_ID


def _is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -_LARGEST_TIME < value < _LARGEST_TIME


def _int64(value: Any, default: int) -> int:
    """A whole number that fits into 64 bits; PyTorch writes the largest one where it has no sequence number."""
    return value if type(value) is int and -(2**63) <= value < 2**63 else default


def event_arguments(event: TraceEvent) -> TraceEvent:
    """Arguments of an event; empty if it has none."""
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def read_microseconds(file: Path, event: TraceEvent, key: str) -> float:
    """A time of an event in microseconds."""
    value = event.get(key)
    if not _is_finite(value):
        raise InputError(
            f"{file}: {key} of {format_value(event.get('name'))}: {format_value(value)} is no number of microseconds"
        )
    if key == "dur" and value < 0:
        raise InputError(f"{file}: dur of {format_value(event.get('name'))}: {format_value(value)} is below zero")
    return float(value)


def _is_shape(value: Any) -> bool:
    return all(type(size) is int for size in value)


def lookup(keys: IntArray, values: FloatArray | IntArray, wanted: IntArray) -> tuple[Any, Any]:
    """For each wanted key the value of its last occurrence among keys, and whether it is there."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.asarray(values).dtype), np.zeros(len(wanted), dtype=np.bool_)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    position = np.searchsorted(ordered, wanted, side="right") - 1
    is_found = (position >= 0) & (ordered[np.maximum(position, 0)] == wanted) & (wanted != NO_ID)
    return np.asarray(values)[order][np.maximum(position, 0)], is_found
