"""How is a rank's timeline written as PyTorch's profiler (Kineto) writes one, for HTA and TraceLens to read?

One JSON file for each rank: what its GPU runs on which stream, each kernel with the operator that calls it and its
launch on the host. Read by Holistic Trace Analysis (`TraceAnalysis(trace_dir=...)`) and AMD's TraceLens.

Kernels last as they do in the simulation. Where a kernel and an exchange are one operation, the kernel begins with it
and the exchange ends with it. A communication kernel lasts as long as data moves: NCCL's own also spin while they wait
for other ranks, which is idle here, so that tools can tell one from the other. The host's side is drawn and not
simulated: every kernel is launched just before it starts. Times are whole nanoseconds, in microseconds; HTA cuts them
to microseconds unless HTA_DISABLE_NS_ROUNDING=1.
Reference: pytorch/kineto, libkineto/src/output_json.cpp; facebookresearch/HolisticTraceAnalysis, docs/source/intro
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from string import Template
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.arrays import IntArray
from clustersim.program.task import Exchange, HostExchange, Stream
from clustersim.report.export.kineto_words import Called, ProcessGroup, called_exchange, called_host, called_kernel
from clustersim.report.export.ranks import TraceRank
from clustersim.report.export.spans import Spans
from clustersim.report.export.words import Label

if TYPE_CHECKING:
    from clustersim.answer import Answer

PRODUCER: Final = "clustersim"
_STREAMS: Final = {  # numbers as CUDA gives them: the first that PyTorch makes is 7
    Stream.COMPUTE: 7,
    Stream.DATA: 28,
    Stream.SEND_NEXT: 32,
    Stream.SEND_PREVIOUS: 36,
    Stream.RECEIVE: 40,
    Stream.TO_HOST: 44,
    Stream.FROM_HOST: 48,
    Stream.EXPERTS: 24,
    Stream.HOST: 1001,  # a thread of the host, which is where its own work is written
}
_INSIDE: Final = 20  # the stream of exchanges inside passes
_HOST: Final = 1000  # process and thread of the host
_LEAD: Final = 1_000_000  # nanoseconds before the first kernel, in which the host launches it
_CALLS: Final = {"kernel": ("cudaLaunchKernel", 211), "gpu_memcpy": ("cudaMemcpyAsync", 41)}
"""The runtime's function for each category, and its number in CUPTI."""
_LAUNCH: Final = 600  # nanoseconds on the host
_MARGIN: Final = 100  # nanoseconds of the operator around its launch
_PLACES: Final = {"number": (0,), "launch": (1, 2), "inner": (3, 4), "start": (5, 6), "length": (7, 8)}
"""What differs from run to run, with its columns: a number, or times in microseconds and nanoseconds."""
_ON_HOST: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$stream,"ts":<start>,"dur":<length>,$kernel,"External id":<number>}}'
)
_LAUNCHED: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$host,"ts":<launch>,"dur":$lasts,$operator"External id":<number>}},\n'
    '{"ph":"X","cat":"cuda_runtime","name":"$call","pid":$host,"tid":$host,"ts":<inner>,"dur":$within,'
    '"args":{"External id":<number>,"cbid":$cbid,"correlation":<number>}},\n'
    '{"ph":"s","cat":"ac2g","name":"ac2g","id":<number>,"pid":$host,"tid":$host,"ts":<inner>},\n'
    '{"ph":"f","cat":"ac2g","name":"ac2g","bp":"e","id":<number>,"pid":0,"tid":$stream,"ts":<start>},\n'
    '{"ph":"X","cat":"$category","pid":0,"tid":$stream,"ts":<start>,"dur":<length>,'
    '$kernel,"External id":<number>,"correlation":<number>}}'
)
"""The events of a kernel: of its operator, its launch, the arrow from there, and itself; each has the kernel's number.

$name stands for what is the same wherever it runs, <name> for one of `_PLACES`.
"""
_PLACE: Final = re.compile("<([a-z]+)>")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_kineto(result: "Answer", rank: TraceRank, spans: Spans, file: IO[bytes]) -> None:
    """Write one rank's file."""
    said = _Said(result, rank)
    runs = _runs(said, spans)
    file.write(_head(result, rank, said).encode())
    for number, event in enumerate(_events(result, rank, runs)):
        file.write((b",\n" if number else b"") + event)
    file.write(b"\n]}\n")


@dataclass(frozen=True, slots=True)
class _Words:
    """What is written of a kernel apart from when: its events, the columns of their places, and on which stream."""

    events: bytes
    stream: int
    places: Callable[[list[int]], Any]


@dataclass(frozen=True, slots=True)
class _Runs:
    """Kernels in order of start. start, end: [n] nanoseconds; which: [n] index into words; step: [n]."""

    start: IntArray
    end: IntArray
    which: IntArray
    step: IntArray
    words: Sequence[_Words]


def _runs(said: "_Said", spans: Spans) -> _Runs:
    """Every kernel and exchange: of a span that is both, the kernel begins with it and the exchange ends with it."""
    stream = np.where(spans.alone, spans.stream, len(Stream))
    key, which = np.unique(spans.label * (len(Stream) + 1) + stream, return_inverse=True)
    pairs = [divmod(each, len(Stream) + 1) for each in key.tolist()]
    parts = [said.parts(spans.labels[label], number) for label, number in pairs]
    part = np.array(parts, dtype=np.int64).reshape(-1, 2)[which]
    there = part >= 0
    seconds = (np.stack(each, axis=1)[there] for each in ((spans.start, spans.moving), (spans.computed, spans.end)))
    start, end = (np.rint(each * 1e9).astype(np.int64) for each in seconds)
    step = spans.program.step_of(said.result.scenario.steps)[spans.task]
    order = np.argsort(start, kind="stable")
    step = np.stack((step, step), axis=1)[there]
    return _Runs(start[order], end[order], part[there][order], step[order], said.words)


class _Said:
    """What a rank runs, each kernel and exchange in words once."""

    def __init__(self, result: "Answer", rank: TraceRank) -> None:
        self.result, self.rank = result, rank
        self.words: list[_Words] = []

    def parts(self, label: Label, stream: int) -> tuple[int, int]:
        """The words of a span's kernel, and of its exchange; -1 for none. stream: none of the rank's inside a pass."""
        kernel = exchange = -1
        if label.kernel is not None and label.work is not None:
            more = {"bound": label.bound, "work": label.work.value}
            kernel = self._number(called_kernel(label.kernel), _STREAMS[Stream.COMPUTE], more)
        if label.exchange is not None:
            timing = self.result.cost.exchange_timing(label.exchange)
            called = self._called(label.exchange, received=label.kind == "receive")
            more = {"bound": timing.bound.value, "does": label.exchange.name}
            exchange = self._number(called, _STREAMS[Stream(stream)] if stream < len(Stream) else _INSIDE, more)
        return kernel, exchange

    def groups(self) -> Iterator[ProcessGroup]:
        """The groups that the rank communicates in."""
        program = self.result.program.programs[int(self.result.program.kind[self.rank.rank])]
        between = (exchange for exchange in program.exchanges if not isinstance(exchange, HostExchange))
        for role in sorted({exchange.group for exchange in between}):
            for received in (False, True) if self.result.program.groups[role].ordered else (False,):
                if self._row(role, received=received) >= 0:
                    yield self._group(role, received=received)

    def _called(self, exchange: Exchange, *, received: bool) -> Called:
        if isinstance(exchange, HostExchange):
            return called_host(exchange)
        group, dtype = self._group(exchange.group, received=received), self.result.scenario.training.recipe.activations
        return called_exchange(exchange, self.result.cost.exchange_timing(exchange), group, dtype, received=received)

    def _row(self, role: str, *, received: bool) -> int:
        """The group of a role that the rank is in (of pairs: sends in, or receives in), or -1."""
        groups = self.result.program.groups[role]
        return int(groups.row_of(self.result.ranks, place=int(received) if groups.ordered else None)[self.rank.rank])

    def _group(self, role: str, *, received: bool) -> ProcessGroup:
        row = self._row(role, received=received)
        return ProcessGroup(f"{role}_{row}", role, tuple(self.result.program.groups[role].members[row].tolist()))

    def _number(self, called: Called, stream: int, more: dict[str, Any]) -> int:
        self.words.append(_words(called, stream, more))
        return len(self.words) - 1


def _head(result: "Answer", rank: TraceRank, said: _Said) -> str:
    """What stands before the events; on lines of their own, because HTA looks for the rank line by line."""
    accelerators, kind = result.scenario.cluster.kinds()
    accelerator = accelerators[int(kind[rank.rank])]
    groups = [
        {
            "pg_name": group.name, "pg_desc": group.role, "backend_config": "cuda:nccl", "pg_size": len(group.ranks),
            "ranks": group.ranks,
        }
        for group in said.groups()
    ]  # fmt: skip
    content = {
        "producer": f"{PRODUCER} {version(PRODUCER)}: {result.scenario.name}",
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": accelerator.name, "totalGlobalMem": int(accelerator.memory_bytes),
             "numSms": accelerator.compute_units}
        ],
        "distributedInfo": {
            "backend": "nccl", "rank": rank.rank, "world_size": result.ranks, "pg_count": len(groups),
            "pg_config": groups,
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }  # fmt: skip
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join([*lines, '"traceEvents": [\n'])


def _events(result: "Answer", rank: TraceRank, runs: _Runs) -> Iterator[bytes]:
    words = f"{rank.stage}, {rank.name}"
    yield _meta("process_name", _HOST, {"name": f"host of {words} (drawn, not simulated)"})
    yield _meta("process_name", 0, {"name": f"GPU of {words}"})
    if not len(runs.which):
        return
    launch = _launches(runs.start)
    yield from _steps(result, runs, launch)
    times = (launch, launch + _MARGIN, runs.start + _LEAD, runs.end - runs.start)
    columns = (np.arange(1, len(launch) + 1), *(part for each in times for part in np.divmod(each, 1000)))
    for row, which in zip(np.stack(columns, axis=1).tolist(), runs.which.tolist(), strict=True):
        words = runs.words[which]
        yield words.events % words.places(row)


def _words(called: Called, stream: int, more: dict[str, Any]) -> _Words:
    """What is written of a kernel, or of what the host computes itself, on a thread of its own."""
    said = {"device": 0, "context": 1, "stream": stream, "queued": 0} | called.device | more
    same = {
        "host": _HOST, "stream": stream, "category": called.category,
        "lasts": f"{_LAUNCH / 1000:.3f}", "within": f"{(_LAUNCH - 2 * _MARGIN) / 1000:.3f}",
        "kernel": _encode({"name": called.kernel, "args": said})[1:-2],
        "operator": _encode({"name": called.operator, "args": called.arguments})[1:-2] + "," * bool(called.arguments),
    }  # fmt: skip
    if called.category in _CALLS:
        same["call"], same["cbid"] = _CALLS[called.category]
    events = _LAUNCHED if called.category in _CALLS else _ON_HOST
    columns = [column for name in _PLACE.findall(events) for column in _PLACES[name]]
    digits = _PLACE.sub(lambda found: "%d" if found[1] == "number" else "%d.%03d", events)
    escaped = {name: str(value).replace("%", "%%") for name, value in same.items()}
    return _Words(Template(digits).substitute(escaped).encode(), stream, itemgetter(*columns))


def _launches(start: IntArray) -> IntArray:
    """When the host begins to launch each kernel: just before it starts, one after the other: [n] nanoseconds."""
    place = np.arange(len(start)) * _LAUNCH
    latest = np.minimum.accumulate((start - place)[::-1])[::-1] + place
    launch: IntArray = np.maximum(latest + _LEAD - _LAUNCH, 0)
    return launch


def _steps(result: "Answer", runs: _Runs, launch: IntArray) -> Iterator[bytes]:
    """The host's marks of steps: each lasts until the first pass of the next one is launched."""
    steps, compute = result.scenario.steps, _STREAMS[Stream.COMPUTE]
    passes = np.array([words.stream == compute for words in runs.words])[runs.which]
    begins = [int(launch[passes & (runs.step == step)].min(initial=int(launch[-1]))) for step in range(1, steps)]
    bounds = [0, *begins, int(launch[-1]) + _LAUNCH]
    for number in range(steps):
        start, length = divmod(bounds[number], 1000), divmod(bounds[number + 1] - bounds[number], 1000)
        yield (
            b'{"ph":"X","cat":"user_annotation","name":"ProfilerStep#%d","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,'
            b'"args":{}}' % (number, _HOST, _HOST, *start, *length)
        )


def _meta(name: str, process: int, arguments: dict[str, object]) -> bytes:
    return _encode({"ph": "M", "name": name, "pid": process, "tid": 0, "ts": 0, "args": arguments}).encode()
