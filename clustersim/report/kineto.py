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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.cost.timing import ExchangeTiming
from clustersim.program.task import Block, Compute, Exchange, HostExchange, Receive, Stream
from clustersim.report.kineto_words import Called, ProcessGroup, called_exchange, called_host, called_kernel
from clustersim.report.operations import Inside, Operations
from clustersim.report.trace_ranks import TraceRank

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
_CALLS: Final = {b"kernel": (b"cudaLaunchKernel", 211), b"gpu_memcpy": (b"cudaMemcpyAsync", 41)}
"""The runtime's function for each category, and its number in CUPTI."""
_LAUNCH: Final = 600  # nanoseconds on the host
_MARGIN: Final = 100  # nanoseconds of the operator around its launch
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_kineto(result: "Answer", rank: TraceRank, file: IO[bytes], *, most: int | None = None) -> int:
    """Write one rank's file; return how many kernels it has. most: at most so many passes and messages of it."""
    kernels = _Kernels(result, rank)
    runs = kernels.runs(most)
    file.write(_head(result, rank, kernels).encode())
    for number, event in enumerate(_events(result, rank, runs)):
        file.write((b",\n" if number else b"") + event)
    file.write(b"\n]}\n")
    return len(runs.which)


@dataclass(frozen=True, slots=True)
class _Words:
    """What is written of a kernel apart from when: by the host, and by the GPU, on a stream.

    category: what the profiler calls its kind.
    """

    operator: bytes
    kernel: bytes
    stream: int
    category: bytes

    @property
    def hosted(self) -> bool:
        """Whether the host does it, and no GPU."""
        return self.category == b"cpu_op"


@dataclass(frozen=True, slots=True)
class _Runs:
    """Kernels in order of start. start, end: [n] nanoseconds; which: [n] index into words; step: [n]."""

    start: IntArray
    end: IntArray
    which: IntArray
    step: IntArray
    words: Sequence[_Words]


@dataclass(slots=True)
class _Lists:
    start: list[FloatArray] = field(default_factory=list)
    end: list[FloatArray] = field(default_factory=list)
    which: list[IntArray] = field(default_factory=list)
    step: list[IntArray] = field(default_factory=list)

    def add(self, start: FloatArray, end: FloatArray, which: IntArray, step: int) -> None:
        self.start.append(start)
        self.end.append(end)
        self.which.append(which)
        self.step.append(np.full(len(which), step))


@dataclass(frozen=True, slots=True)
class _BlockWords:
    """The kernels and exchanges of a block. place: [n] of their operations; which: [n] index into words.

    exposed: [n] seconds of the operation in which its exchange runs alone; taken: [n] seconds that its exchange takes,
    infinite where it is the whole operation, both on links of its own; exchange: [n] 1 where it is one.
    """

    place: IntArray
    which: IntArray
    exposed: FloatArray
    taken: FloatArray
    exchange: IntArray


class _Kernels:
    """What one rank runs; each kernel is put into words once."""

    def __init__(self, result: "Answer", rank: TraceRank) -> None:
        self.result, self.rank = result, rank
        self.program = result.program.programs[int(result.program.kind[rank.rank])]
        self.words: list[_Words] = []
        self._blocks: dict[Block, _BlockWords] = {}
        self._exchanges: dict[tuple[Exchange, int, bool], int] = {}

    def runs(self, most: int | None) -> _Runs:
        """Every kernel, in order of start."""
        trace, operations = self.result.trace, Operations(self.result, np.arange(len(self.result.trace)))
        step, lists = self.program.step_of(self.result.scenario.steps), _Lists()
        for row in trace.rows(self.rank.simulated)[:most].tolist():
            number = int(trace.task[row])
            task, inside = self.program.tasks[number], operations(row)
            if isinstance(task, Compute):
                if inside is not None:
                    lists.add(*self._inside(task.block, inside), int(step[number]))
                continue
            stream = _STREAMS[Stream(int(trace.stream[row]))]
            which = self._exchange(task.exchange, stream, received=isinstance(task, Receive))
            lists.add(trace.start[[row]], trace.end[[row]], np.array([which]), int(step[number]))
        return self._sorted(lists)

    def groups(self) -> Iterator[ProcessGroup]:
        """The groups that this rank communicates in."""
        between = (exchange for exchange in self.program.exchanges if not isinstance(exchange, HostExchange))
        for role in sorted({exchange.group for exchange in between}):
            for received in (False, True) if self.result.program.groups[role].ordered else (False,):
                if self._row(role, received=received) >= 0:
                    yield self._group(role, received=received)

    def _sorted(self, lists: _Lists) -> _Runs:
        if not lists.start:
            nothing = np.zeros(0, dtype=np.int64)
            return _Runs(nothing, nothing, nothing, nothing, self.words)
        start, end = (np.rint(np.concatenate(each) * 1e9).astype(np.int64) for each in (lists.start, lists.end))
        which, step = np.concatenate(lists.which), np.concatenate(lists.step)
        order = np.argsort(start, kind="stable")
        return _Runs(start[order], end[order], which[order], step[order], self.words)

    def _inside(self, block: Block, inside: Inside) -> tuple[FloatArray, FloatArray, IntArray]:
        words = self._blocks.get(block)
        if words is None:
            words = self._blocks[block] = self._block(block)
        begin, stop = inside.start[words.place], inside.end[words.place]
        taken, exposed = words.taken + inside.moved[words.place], words.exposed + inside.exposed[words.place]
        begins = np.where(words.exchange == 1, np.maximum(stop - taken, begin), begin)
        ends = np.where(words.exchange == 1, stop, np.maximum(stop - exposed, begin))
        return begins, ends, words.which

    def _block(self, block: Block) -> _BlockWords:
        timing = self.result.cost.block(self.rank.rank, block)
        rows: list[tuple[int, int, float, float, int]] = []
        for place, operation in enumerate(block.operations):
            both = timing.together.get(place)
            if operation.kernel is not None:
                exposed = float(timing.exposed[place]) if both else 0.0
                more = {"bound": timing.bound[place].value, "work": operation.work.value}
                called = called_kernel(operation.kernel)
                rows.append((place, self._worded(called, _STREAMS[Stream.COMPUTE], more), exposed, 0.0, 0))
            if operation.exchange is not None:
                taken = both.moves(float(timing.kernels[place]), both.exchange) if both else np.inf
                rows.append((place, self._exchange(operation.exchange, _INSIDE), 0.0, taken, 1))
        table = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        place, which, exchange = table[[0, 1, 4]].astype(np.int64)
        return _BlockWords(place, which, table[2], table[3], exchange)

    def _exchange(self, exchange: Exchange, stream: int, *, received: bool = False) -> int:
        key = (exchange, stream, received)
        if key not in self._exchanges:
            timing = self.result.cost.exchange_timing(exchange)
            called = self._called(exchange, timing, received=received)
            self._exchanges[key] = self._worded(called, stream, {"bound": timing.bound.value, "does": exchange.name})
        return self._exchanges[key]

    def _called(self, exchange: Exchange, timing: ExchangeTiming, *, received: bool) -> Called:
        if isinstance(exchange, HostExchange):
            return called_host(exchange)
        group, dtype = self._group(exchange.group, received=received), self.result.scenario.training.recipe.activations
        return called_exchange(exchange, timing, group, dtype, received=received)

    def _row(self, role: str, *, received: bool) -> int:
        """The group of a role that the rank is in (of pairs: sends in, or receives in), or -1."""
        groups = self.result.program.groups[role]
        return int(groups.row_of(self.result.ranks, place=int(received) if groups.ordered else None)[self.rank.rank])

    def _group(self, role: str, *, received: bool) -> ProcessGroup:
        row = self._row(role, received=received)
        return ProcessGroup(f"{role}_{row}", role, tuple(self.result.program.groups[role].members[row].tolist()))

    def _worded(self, called: Called, stream: int, more: dict[str, Any]) -> int:
        kernel = {"device": 0, "context": 1, "stream": stream, "queued": 0} | called.device | more
        operator = _encode({"name": called.operator, "args": called.arguments})[1:-2].encode()
        words = _encode({"name": called.kernel, "args": kernel})[1:-2].encode()
        operator += b"," if called.arguments else b""
        self.words.append(_Words(operator, words + b",", stream, called.category.encode()))
        return len(self.words) - 1


def _head(result: "Answer", rank: TraceRank, kernels: _Kernels) -> str:
    """What stands before the events; on lines of their own, because HTA looks for the rank line by line."""
    accelerators, kind = result.scenario.cluster.kinds()
    accelerator = accelerators[int(kind[rank.rank])]
    groups = [
        {
            "pg_name": group.name, "pg_desc": group.role, "backend_config": "cuda:nccl", "pg_size": len(group.ranks),
            "ranks": group.ranks,
        }
        for group in kernels.groups()
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
    rows = zip(launch.tolist(), (runs.start + _LEAD).tolist(), (runs.end - runs.start).tolist(), strict=True)
    for number, ((host, start, length), which) in enumerate(zip(rows, runs.which.tolist(), strict=True), start=1):
        yield _kernel(number, runs.words[which], host, start, length)


def _kernel(number: int, words: _Words, host: int, begin: int, lasting: int) -> bytes:
    """An operator, its launch, the kernel, and the arrow from one to the other; each has the kernel's number.

    host: when the launch begins; begin, lasting: of the kernel; nanoseconds.
    """
    if words.hosted:
        return _on_host(number, words, begin, lasting)
    call, identifier = _CALLS[words.category]
    inner, inner_end = divmod(host + _MARGIN, 1000), divmod(_LAUNCH - 2 * _MARGIN, 1000)
    start, length = divmod(begin, 1000), divmod(lasting, 1000)
    return b"".join(
        (
            b'{"ph":"X","cat":"cpu_op","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,'
            % (_HOST, _HOST, *divmod(host, 1000), *divmod(_LAUNCH, 1000)),
            words.operator,
            b'"External id":%d}},\n' % number,
            b'{"ph":"X","cat":"cuda_runtime","name":"%s","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,'
            % (call, _HOST, _HOST, *inner, *inner_end),
            b'"args":{"External id":%d,"cbid":%d,"correlation":%d}},\n' % (number, identifier, number),
            b'{"ph":"s","cat":"ac2g","name":"ac2g","id":%d,"pid":%d,"tid":%d,"ts":%d.%03d},\n'
            % (number, _HOST, _HOST, *inner),
            b'{"ph":"f","cat":"ac2g","name":"ac2g","bp":"e","id":%d,"pid":0,"tid":%d,"ts":%d.%03d},\n'
            % (number, words.stream, *start),
            b'{"ph":"X","cat":"%s","pid":0,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,'
            % (words.category, words.stream, *start, *length),
            words.kernel,
            b'"External id":%d,"correlation":%d}}' % (number, number),
        )
    )


def _on_host(number: int, words: _Words, begin: int, lasting: int) -> bytes:
    """What the host computes itself, on a thread of its own."""
    return b'{"ph":"X","cat":"cpu_op","pid":%d,"tid":%d,"ts":%d.%03d,"dur":%d.%03d,%s"External id":%d}}' % (
        _HOST, words.stream, *divmod(begin, 1000), *divmod(lasting, 1000), words.kernel, number,
    )  # fmt: skip


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
