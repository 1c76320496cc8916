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
from collections.abc import Iterator
from importlib.metadata import version
from string import Template
from typing import IO, Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.task import HostOp, Stream
from clustersim.report.export.kineto_kernels import Called, Group, called_exchange, called_kernel
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import Label
from clustersim.report.export.span_table import Spans, nanoseconds
from clustersim.results.simulation_result import SimulationResult

PRODUCER: Final = "clustersim"
_INSIDE: Final = len(Stream)  # what runs inside passes
_STREAMS: Final = {  # numbers as CUDA gives them: the first that PyTorch makes is 7
    Stream.COMPUTE: 7,
    Stream.DP: 28,
    Stream.SEND_NEXT: 32,
    Stream.SEND_PREVIOUS: 36,
    Stream.RECEIVE: 40,
    Stream.D2H: 44,
    Stream.H2D: 48,
    Stream.EP: 24,
    Stream.HOST: 1001,  # a thread of the host, which is where its own work is written
    _INSIDE: 20,
}
_HOST: Final = 1000  # process and thread of the host
_LEAD: Final = 1_000_000  # nanoseconds before the first kernel, in which the host launches it
_CALLS: Final = {"kernel": ("cudaLaunchKernel", 211), "gpu_memcpy": ("cudaMemcpyAsync", 41)}
"""The runtime's function for each category, and its number in CUPTI."""
_LAUNCH: Final = 600  # nanoseconds on the host
_MARGIN: Final = 100  # nanoseconds of the operator around its launch
_PLACES: Final = ("number", "launch", "inner", "start", "length")
"""What differs from run to run of a kernel: a number, and times."""
_SAME: Final = {
    "host": _HOST,
    "lasts": f"{_LAUNCH / 1000:.3f}",
    "within": f"{(_LAUNCH - 2 * _MARGIN) / 1000:.3f}",
    **{name: f"%({name})s" for name in _PLACES},
}
_ON_HOST: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$stream,"ts":$start,"dur":$length,$kernel,"External id":$number}}'
)
_LAUNCHED: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$host,"ts":$launch,"dur":$lasts,$operator"External id":$number}},\n'
    '{"ph":"X","cat":"cuda_runtime","name":"$call","pid":$host,"tid":$host,"ts":$inner,"dur":$within,'
    '"args":{"External id":$number,"cbid":$cbid,"correlation":$number}},\n'
    '{"ph":"s","cat":"ac2g","name":"ac2g","id":$number,"pid":$host,"tid":$host,"ts":$inner},\n'
    '{"ph":"f","cat":"ac2g","name":"ac2g","bp":"e","id":$number,"pid":0,"tid":$stream,"ts":$start},\n'
    '{"ph":"X","cat":"$category","pid":0,"tid":$stream,"ts":$start,"dur":$length,'
    '$kernel,"External id":$number,"correlation":$number}}'
)
"""The events of a kernel: its operator, its launch, the arrow from there, and itself; each has the kernel's number."""
_STEP: Final = (
    f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#%d","pid":{_HOST},"tid":{_HOST},'
    '"ts":%s,"dur":%s,"args":{}}'
)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_kineto(result: SimulationResult, rank: TraceRank, spans: Spans, file: IO[bytes]) -> None:
    """Write one rank's file."""
    said = _Said(result, rank)
    runs = _runs(said, spans)
    file.write(_head(said).encode())
    for number, event in enumerate(_events(said, runs)):
        file.write((",\n" * bool(number) + event).encode())
    file.write(b"\n]}\n")


class _Said:
    """What a rank runs, each kernel and exchange in words once.

    Of each label its kernel and its exchange: streams, and events but for `_PLACES`, empty for none.
    """

    def __init__(self, result: SimulationResult, rank: TraceRank) -> None:
        self.result, self.rank, self._dtype = result, rank, result.scenario.training.recipe.activations
        self.streams: list[int] = []
        self.events: list[str] = []

    def add(self, label: Label, stream: int) -> None:
        """Put a span's kernel and its exchange into words."""
        kernel = exchange = ""
        if label.kernel is not None:
            more = {"bound": label.bound, "work": label.work}
            kernel = _words(called_kernel(label.kernel), _STREAMS[Stream.COMPUTE], more)
        if label.exchange is not None:
            timing, received = self.result.cost.comm_timing_by_group(label.exchange), label.kind == "receive"
            group = self._group(label.exchange.comm_group, received=received)
            called = called_exchange(label.exchange, timing, group, self._dtype, received=received)
            exchange = _words(called, _STREAMS[stream], {"bound": timing.bottleneck.value, "does": label.exchange.name})
        self.events += kernel, exchange
        self.streams += _STREAMS[Stream.COMPUTE], _STREAMS[stream]

    def groups(self) -> list[Group]:
        """The groups that the rank communicates in."""
        program = self.result.program.programs[int(self.result.program.program_index[self.rank.rank])]
        roles = sorted({comm_op.comm_group for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)})
        found = (self._group(role, received=received) for role in roles for received in (False, True))
        return list({group["pg_name"]: group for group in found if group["ranks"]}.values())

    def _group(self, role: str, *, received: bool) -> Group:
        """The group of a role that the rank is in (of pairs: sends in, or receives in), without ranks for none."""
        groups, rank = self.result.program.groups[role], self.rank.rank
        row = int(
            groups.group_indices(self.result.rank_count, member_index=int(received) if groups.ordered else None)[rank]
        )
        ranks = groups.members[row].tolist() if row >= 0 else []
        group = {"pg_name": f"{role}_{row}", "pg_desc": role, "backend_config": "cuda:nccl", "pg_size": len(ranks)}
        return group | {"ranks": ranks}


def _runs(said: _Said, spans: Spans) -> IntArray:
    """Every kernel and exchange by start: start and end in nanoseconds, place in the words, step: [4, n].

    Of a span that is both, the kernel begins with it and the exchange ends with it.
    """
    stream = np.where(spans.alone, spans.stream, _INSIDE)
    key, place = np.unique(spans.label * len(_STREAMS) + stream, return_inverse=True)
    for label, number in (divmod(item, len(_STREAMS)) for item in key.tolist()):
        said.add(spans.labels[label], number)
    start, end = nanoseconds((spans.start, spans.moving)), nanoseconds((spans.computed, spans.end))
    which, step = 2 * place + np.array([[0], [1]]), spans.program.step_indices(said.result.scenario.steps)[spans.task]
    there = np.fromiter(map(bool, said.events), np.bool_)[which].T
    runs: IntArray = np.stack((start, end, which, np.broadcast_to(step, which.shape))).swapaxes(1, 2)[:, there]
    return runs[:, np.argsort(runs[0], kind="stable")]


def _head(said: _Said) -> str:
    """What stands before the events; on lines of their own, because HTA looks for the rank line by line."""
    result, rank, groups = said.result, said.rank.rank, said.groups()
    accelerators, kind = result.scenario.cluster.accelerator_kinds()
    accelerator = accelerators[int(kind[rank])]
    device = {"id": 0, "name": accelerator.name, "totalGlobalMem": int(accelerator.memory_bytes)}
    ranks = {
        "backend": "nccl",
        "rank": rank,
        "world_size": result.rank_count,
        "pg_count": len(groups),
        "pg_config": groups,
    }
    content = {
        "producer": f"{PRODUCER} {version(PRODUCER)}: {result.scenario.name}",
        "schemaVersion": 1,
        "deviceProperties": [device | {"numSms": accelerator.compute_units}],
        "distributedInfo": ranks,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join([*lines, '"traceEvents": [\n'])


def _events(said: _Said, runs: IntArray) -> Iterator[str]:
    words = f"{said.rank.stage}, {said.rank.name}"
    for process, name in ((_HOST, f"host of {words} (drawn, not simulated)"), (0, f"GPU of {words}")):
        named = {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": name}}
        yield _encode(named)
    if not runs.size:
        return
    start, end, which, _ = runs
    launch = _launches(start)
    bounds = np.array([0, *_begins(said, runs, launch), launch[-1] + _LAUNCH])
    for number, times in enumerate(zip(_written(bounds[:-1]), _written(np.diff(bounds)), strict=True)):
        yield _STEP % (number, *times)
    columns = map(_written, (launch, launch + _MARGIN, start + _LEAD, end - start))
    for place, *row in zip(which.tolist(), range(1, len(start) + 1), *columns, strict=True):
        yield said.events[place] % dict(zip(_PLACES, row, strict=True))


def _written(times: IntArray) -> list[str]:
    """Nanoseconds in microseconds."""
    return [f"{time // 1000}.{time % 1000:03d}" for time in times.tolist()]


def _words(called: Called, stream: int, more: dict[str, Any]) -> str:
    """What is written of a kernel, or of what the host computes itself, on a thread of its own, but for `_PLACES`."""
    said = {"device": 0, "context": 1, "stream": stream, "queued": 0} | called.device | more
    call, number = _CALLS.get(called.category, ("", 0))
    same = {
        "stream": stream, "category": called.category, "call": call, "cbid": number,
        "kernel": _encode({"name": called.kernel, "args": said})[1:-2],
        "operator": _encode({"name": called.operator, "args": called.arguments})[1:-2] + "," * bool(called.arguments),
    }  # fmt: skip
    escaped = {name: str(value).replace("%", "%%") for name, value in same.items()}
    return Template(_LAUNCHED if call else _ON_HOST).substitute(_SAME | escaped)


def _launches(start: IntArray) -> IntArray:
    """When the host begins to launch each kernel: just before it starts, one after the other: [n] nanoseconds."""
    place = np.arange(len(start)) * _LAUNCH
    latest = np.minimum.accumulate((start - place)[::-1])[::-1] + place
    launch: IntArray = np.maximum(latest + _LEAD - _LAUNCH, 0)
    return launch


def _begins(said: _Said, runs: IntArray, launch: IntArray) -> list[int]:
    """When the host's marks of steps but the first begin: when the first pass of the step is launched."""
    _, _, which, step = runs
    passes = np.array(said.streams)[which] == _STREAMS[Stream.COMPUTE]
    steps = range(1, said.result.scenario.steps)
    return [int(launch[passes & (step == item)].min(initial=int(launch[-1]))) for item in steps]
