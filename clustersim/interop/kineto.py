"""What did PyTorch's profiler record? Reader of its traces, one per rank.

Traces are written by `export_chrome_trace` or `tensorboard_trace_handler`. GPU events (categories kernel,
gpu_memcpy, gpu_memset) have a stream and times. A kernel belongs to the step (`ProfilerStep#N`, a host
annotation) in which the host launched it, according to its correlation id; kernels of a CUDA graph share
the launch of the graph. A trace without such marks has steps that end with the optimizer, which PyTorch
annotates by itself (`Optimizer.step#AdamW.step`). Matmul sizes are the input shapes of the operator that
launched the kernel, if the profiler recorded shapes. Times are microseconds with fractions; what a float
cannot resolve (a quarter of a microsecond in times since 1970, which older versions write) is lost.
Reference: pytorch/kineto, libkineto/src/output_json.cpp
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, format_value
from clustersim.common.input_files import MAX_TRACE_BYTES, expand_gzip, parse_json, read_bytes
from clustersim.interop.kernel_names import make_span_label
from clustersim.results.profiled_step import GpuSpanLabel, RankSpans

TRACE_SUFFIXES: Final = (".json", ".json.gz")
_SCHEMA_VERSION: Final = 1
_HEADER_BYTES: Final = 2**20  # bytes within which `traceEvents` must begin
_GPU_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCH_CATEGORIES: Final = ("cuda_runtime", "cuda_driver", "runtime", "driver", "privateuse1_runtime")
_STEP_MARKER: Final = "ProfilerStep#"
_OPTIMIZER_MARKER: Final = "Optimizer.step#"
TraceEvent = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProfilerTraces:
    """Traces of one run. ranks: ascending, with equal step numbers; world_size: number of ranks.

    device_name: the GPU's own name, empty if no trace states it; has_shapes: whether input shapes were
    recorded.
    """

    source: str
    ranks: tuple[RankSpans, ...]
    world_size: int
    device_name: str
    has_shapes: bool


def is_trace_path(path: Path) -> bool:
    """Whether a path holds traces: a directory, a compressed file, or JSON that begins like a trace."""
    if path.is_dir() or path.suffix == ".gz":
        return True
    if path.suffix != ".json" or not path.is_file():  # a pipe is read once
        return False
    try:
        with path.open("rb") as file:
            return b'"traceEvents"' in file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # reported when the file is read
        return False


def read_traces(path: Path) -> ProfilerTraces:
    """Read a trace, or all traces of a directory; raises InputError that names the file and the problem."""
    files = _trace_files(path)
    return parse_traces(str(path), ((file, _load_json(file)) for file in files))


def parse_traces(source: str, contents: Iterable[tuple[Path, Any]]) -> ProfilerTraces:
    """Traces from the parsed JSON content of files."""
    rank_traces = sorted(
        (_RankTrace.from_json(file, content) for file, content in contents), key=lambda trace: trace.rank
    )
    for previous, following in pairwise(rank_traces):
        if previous.rank == following.rank:
            raise InputError(
                f"{following.file}: is of rank {following.rank}, as {previous.file} is; keep one trace of each rank"
            )
        if previous.world_size != following.world_size:
            raise InputError(
                f"{following.file}: is of {following.world_size} ranks, {previous.file} of {previous.world_size}; "
                "keep the traces of one run"
            )
    step_numbers = tuple(sorted(set.intersection(*(trace.step_numbers() for trace in rank_traces))))
    if not step_numbers:
        raise InputError(
            f"{source}: no {_STEP_MARKER} with kernels is in the traces of all ranks; profile the same on each"
        )
    origin = min(trace.first_step_ns for trace in rank_traces)
    ranks = tuple(trace.rank_spans(step_numbers, origin) for trace in rank_traces)
    device = next((trace.device_name for trace in rank_traces if trace.device_name), "")
    shapes = any(label.matmul_shape is not None for trace in ranks for label in trace.labels)
    return ProfilerTraces(source, ranks, rank_traces[0].world_size, device, shapes)


def _trace_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(TRACE_SUFFIXES))
    if not files:
        raise InputError(f"{path}: has no trace; their names end in {' or '.join(TRACE_SUFFIXES)}")
    return files


def _load_json(file: Path) -> Any:
    """Parse a trace file; control characters, which the profiler leaves in names, are accepted."""
    data = read_bytes(file, MAX_TRACE_BYTES)
    data = expand_gzip(data, str(file)) if file.suffix == ".gz" else data
    try:
        return parse_json(data, strict=False, max_depth=None)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


@dataclass(frozen=True, slots=True)
class _RankTrace:
    """Trace of one rank. Times are microseconds.

    base_ns: origin of all times in nanoseconds; step_intervals: begin and end of each step on the host, by step
    number; events: GPU events; launch_times: host launch time by correlation id; operator_dims: input shapes by
    external id; process_groups: ranks of each process group.
    """

    file: Path
    rank: int
    world_size: int
    device_name: str
    base_ns: int
    step_intervals: Mapping[int, tuple[float, float]]
    events: Sequence[TraceEvent]
    launch_times: Mapping[int | str | None, float]
    operator_dims: Mapping[int | str | None, Any]
    process_groups: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_json(cls, file: Path, content: Any) -> "_RankTrace":
        events = _trace_events(file, content)
        info = content.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        launch_times: dict[int | str | None, float] = {
            correlation: _microseconds(file, event, "ts")
            for event in events
            if _category(event) in _LAUNCH_CATEGORIES and (correlation := _event_id(event, "correlation")) is not None
        }
        trace = cls(
            file=file,
            rank=_non_negative_int(file, info, "rank", 0),
            world_size=_non_negative_int(file, info, "world_size", 1),
            device_name=_device_name(content),
            base_ns=_non_negative_int(file, content, "baseTimeNanoseconds", 0),
            step_intervals=_step_intervals(file, events) or _optimizer_intervals(file, events, launch_times.values()),
            events=[event for event in events if _category(event) in _GPU_CATEGORIES],
            launch_times=launch_times,
            operator_dims=dict(_operator_dims(events)),
            process_groups=dict(_process_groups(info)),
        )
        trace.require_valid()
        return trace

    def require_valid(self) -> None:
        """Raise InputError if the trace cannot be used."""
        if not self.step_intervals:
            raise InputError(
                f"{self.file}: marks no steps ({_STEP_MARKER}N), and has no {_OPTIMIZER_MARKER}; call profiler.step() "
                "after each, as its schedule needs"
            )
        if not self.events:
            raise InputError(f"{self.file}: nothing ran on a GPU in it; profile with ProfilerActivity.CUDA")
        if self.rank >= self.world_size:
            raise InputError(f"{self.file}: rank: {self.rank} is not below world_size, which is {self.world_size}")

    @property
    def first_step_ns(self) -> int:
        """Begin of the trace's first step: nanoseconds since 1970, or on the clock that the machines share."""
        return self.base_ns + round(1000 * min(begin for begin, _ in self.step_intervals.values()))

    def step_numbers(self) -> set[int]:
        """Steps in which kernels were launched; a schedule's last marker has none."""
        marked_steps = sorted(self.step_intervals)
        step_index = self._step_indices(marked_steps)
        return {marked_steps[index] for index in np.unique(step_index[step_index >= 0]).tolist()}

    def rank_spans(self, step_numbers: Sequence[int], origin_ns: int) -> RankSpans:
        """GPU spans, sorted by start. step_numbers: the steps to use; origin_ns: origin of the returned times."""
        offset = (origin_ns - self.base_ns) / 1000
        start = (self._times("ts") - offset) * 1e-6
        stream = np.array([_stream_id(event) for event in self.events], dtype=np.int64)
        label, labels = self._span_labels()
        order = np.argsort(start, kind="stable")
        return RankSpans(
            rank=self.rank,
            start=start[order],
            end=(start + self._times("dur") * 1e-6)[order],
            stream=stream[order],
            label_index=label[order],
            step_index=self._step_indices(step_numbers)[order],
            labels=labels,
            step_numbers=tuple(step_numbers),
        )

    def _step_indices(self, step_numbers: Sequence[int]) -> IntArray:
        """Index among the given steps of the step in which each event was launched; -1: none."""
        host_times = (self.launch_times.get(_event_id(event, "correlation")) for event in self.events)
        event_times = self._times("ts").tolist()
        times = np.array(
            [
                start if launch_time is None else launch_time
                for launch_time, start in zip(host_times, event_times, strict=True)
            ]
        )
        bounds = np.array([self.step_intervals[step_number] for step_number in step_numbers])
        step = np.searchsorted(bounds[:, 0], times, side="right") - 1
        return np.where((step >= 0) & (times < bounds[step, 1]), step, -1)

    def _times(self, key: str) -> FloatArray:
        return np.array([_microseconds(self.file, event, key) for event in self.events])

    def _span_labels(self) -> tuple[IntArray, tuple[GpuSpanLabel, ...]]:
        label_ids: dict[GpuSpanLabel, int] = {}
        event_labels = [label_ids.setdefault(label, len(label_ids)) for label in map(self._span_label, self.events)]
        return np.array(event_labels, dtype=np.int64), tuple(label_ids)

    def _span_label(self, event: TraceEvent) -> GpuSpanLabel:
        arguments = _arguments(event)
        dims = self.operator_dims.get(_event_id(event, "External id"))
        return make_span_label(str(event.get("name", "")), _category(event), arguments, dims, self.process_groups)


def _trace_events(file: Path, content: Any) -> list[TraceEvent]:
    keys = content.keys() if isinstance(content, dict) else ()
    if "traceEvents" not in keys or not isinstance(content["traceEvents"], list):
        raise InputError(f"{file}: is no trace of PyTorch's profiler: traceEvents is missing")
    version = content.get("schemaVersion")
    if version != _SCHEMA_VERSION:
        raise InputError(
            f"{file}: schemaVersion: {format_value(version)} is not {_SCHEMA_VERSION}, which PyTorch's profiler "
            "writes and this "
            "program reads; another tool wrote the trace, or another version of it"
        )
    return [event for event in content["traceEvents"] if isinstance(event, dict)]


def _step_intervals(file: Path, events: Iterable[TraceEvent]) -> dict[int, tuple[float, float]]:
    """Steps on the host; annotations on the GPU are skipped, and of threads that repeat them the first is used."""
    intervals: dict[int, tuple[float, float]] = {}
    for event in events:
        step_text = str(event.get("name", "")).removeprefix(_STEP_MARKER)
        if len(step_text) < len(str(event.get("name", ""))) and step_text.isdecimal() and event.get("ph") == "X":
            if _category(event).startswith("gpu"):
                continue
            begin = _microseconds(file, event, "ts")
            intervals.setdefault(int(step_text), (begin, begin + _microseconds(file, event, "dur")))
    return intervals


def _optimizer_intervals(
    file: Path, events: Iterable[TraceEvent], launches: Iterable[float]
) -> dict[int, tuple[float, float]]:
    """Steps from the end of one optimizer step to that of the next, by number; the first begins with the first launch.

    Optimizers of one step, between which nothing is launched, are one.
    """
    updates = sorted(
        (begin := _microseconds(file, event, "ts"), begin + _microseconds(file, event, "dur"))
        for event in events
        if str(event.get("name", "")).startswith(_OPTIMIZER_MARKER) and _category(event) == "user_annotation"
    )
    launch_times = np.sort(np.array(list(launches)))
    ends = [
        end
        for index, (_, end) in enumerate(updates)
        if index + 1 == len(updates) or np.diff(np.searchsorted(launch_times, (end, updates[index + 1][0])))[0] > 0
    ]
    return dict(enumerate(pairwise((*launch_times[:1].tolist(), *ends)))) if launch_times.size else {}


def _operator_dims(events: Iterable[TraceEvent]) -> Iterator[tuple[int | str, Any]]:
    for event in events:
        arguments, external_id = _arguments(event), _event_id(event, "External id")
        if "Input Dims" in arguments and external_id is not None:
            yield external_id, arguments["Input Dims"]


def _process_groups(info: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    configs = info.get("pg_config")
    for config in configs if isinstance(configs, list) else ():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and ranks:
            yield str(config.get("pg_name", "")), tuple(ranks)


def _device_name(content: Mapping[str, Any]) -> str:
    devices = content.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _arguments(event: TraceEvent) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _event_id(event: TraceEvent, key: str) -> int | str | None:
    """An id that links events; None if missing."""
    value = _arguments(event).get(key)
    return value if isinstance(value, int | str) else None


def _category(event: TraceEvent) -> str:
    return str(event.get("cat", "")).lower()


def _stream_id(event: TraceEvent) -> int:
    stream = _arguments(event).get("stream", event.get("tid", 0))
    return stream if isinstance(stream, int) else 0


def _non_negative_int(file: Path, mapping: Mapping[str, Any], key: str, default: int) -> int:
    value = mapping.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{file}: {key}: {format_value(value)} is not a whole number")
    return value


def _microseconds(file: Path, event: TraceEvent, key: str) -> float:
    """A time of an event in microseconds."""
    value = event.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(
            f"{file}: {key} of {format_value(event.get('name'))}: {format_value(value)} is no number of microseconds"
        )
    if key == "dur" and value < 0:
        raise InputError(f"{file}: dur of {format_value(event.get('name'))}: {format_value(value)} is below zero")
    return float(value)
