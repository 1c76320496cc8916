"""How is a rank's timeline exported in the format of PyTorch's profiler (Kineto), for HTA and TraceLens?

One JSON file for each rank: the kernels of each GPU stream, each with the operator that calls it and its
launch on the host. Readable by Holistic Trace Analysis (`TraceAnalysis(trace_dir=...)`) and AMD's
TraceLens.

Kernel durations are simulated; while the GPU waits for the host's launch, nothing runs. If a kernel and a
comm op are one operation, the kernel begins with it and the comm op ends with it. A communication kernel
lasts as long as data is transferred: NCCL's own kernels also spin while they wait for other ranks, which is
idle time here, so that tools can distinguish both. The host's side is drawn and not simulated: every kernel
is launched just before it starts. Times are integer nanoseconds, written in microseconds; HTA truncates
them to microseconds unless HTA_DISABLE_NS_ROUNDING=1.
Reference: pytorch/kineto, libkineto/src/output_json.cpp; facebookresearch/HolisticTraceAnalysis,
docs/source/intro
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from string import Template
from typing import IO, Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.task import HostOp, Stream
from clustersim.report.export.kineto_kernels import KinetoKernel, ProcessGroupInfo, to_kineto_comm, to_kineto_kernel
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import SpanDescription
from clustersim.report.export.span_table import SpanTable, to_nanoseconds
from clustersim.results.simulation_result import SimulationResult

PRODUCER: Final = "clustersim"
_OPERATION_STREAM: Final = len(Stream)  # operations inside passes
_STREAM_IDS: Final = {  # numbers as CUDA gives them: the first that PyTorch makes is 7
    Stream.COMPUTE: 7,
    Stream.DP: 28,
    Stream.SEND_NEXT: 32,
    Stream.SEND_PREVIOUS: 36,
    Stream.RECEIVE: 40,
    Stream.D2H: 44,
    Stream.H2D: 48,
    Stream.EP: 24,
    Stream.IMAGES: 52,
    Stream.HOST: 1001,  # threads of the host, which is where its own work is written
    Stream.LAUNCH: 1002,
    _OPERATION_STREAM: 20,
}
_HOST_PID: Final = 1000  # process and thread of the host
_LEAD_NS: Final = 1_000_000  # nanoseconds before the first kernel for its launch on the host
_RUNTIME_CALLS: Final = {"kernel": ("cudaLaunchKernel", 211), "gpu_memcpy": ("cudaMemcpyAsync", 41)}
"""The runtime function of each event category, and its CUPTI callback id."""
_LAUNCH_NS: Final = 600  # nanoseconds on the host
_MARGIN_NS: Final = 100  # nanoseconds of the operator around its launch
_VARIABLE_FIELDS: Final = ("number", "launch", "inner", "start", "length")
"""Fields that differ between runs of a kernel: an id, and times."""
_CONSTANT_FIELDS: Final = {
    "host": _HOST_PID,
    "lasts": f"{_LAUNCH_NS / 1000:.3f}",
    "within": f"{(_LAUNCH_NS - 2 * _MARGIN_NS) / 1000:.3f}",
    **{name: f"%({name})s" for name in _VARIABLE_FIELDS},
}
_HOST_EVENT: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$stream,"ts":$start,"dur":$length,$kernel,"External id":$number}}'
)
_KERNEL_EVENTS: Final = (
    '{"ph":"X","cat":"cpu_op","pid":$host,"tid":$host,"ts":$launch,"dur":$lasts,$operator"External id":$number}},\n'
    '{"ph":"X","cat":"cuda_runtime","name":"$call","pid":$host,"tid":$host,"ts":$inner,"dur":$within,'
    '"args":{"External id":$number,"cbid":$cbid,"correlation":$number}},\n'
    '{"ph":"s","cat":"ac2g","name":"ac2g","id":$number,"pid":$host,"tid":$host,"ts":$inner},\n'
    '{"ph":"f","cat":"ac2g","name":"ac2g","bp":"e","id":$number,"pid":0,"tid":$stream,"ts":$start},\n'
    '{"ph":"X","cat":"$category","pid":0,"tid":$stream,"ts":$start,"dur":$length,'
    '$kernel,"External id":$number,"correlation":$number}}'
)
"""Events of a kernel: its operator, its launch, the arrow from there, and itself; all carry the kernel's id."""
_STEP_EVENT: Final = (
    f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#%d","pid":{_HOST_PID},"tid":{_HOST_PID},'
    '"ts":%s,"dur":%s,"args":{}}'
)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_kineto(result: SimulationResult, rank: TraceRank, spans: SpanTable, file: IO[bytes]) -> None:
    """Write one rank's file."""
    templates = _EventTemplates(result, rank)
    runs = _kernel_runs(templates, spans)
    file.write(_file_header(templates).encode())
    for index, event in enumerate(_trace_events(templates, runs)):
        file.write((",\n" * bool(index) + event).encode())
    file.write(b"\n]}\n")


class _EventTemplates:
    """Event templates of a rank, one for each distinct kernel and comm op.

    Each description has two entries, for its kernel and its comm op: stream_ids, and templates (JSON text with
    `_VARIABLE_FIELDS` left open), empty for none.
    """

    def __init__(self, result: SimulationResult, rank: TraceRank) -> None:
        self.result, self.rank, self._dtype = result, rank, result.scenario.training.recipe.activations
        self.stream_ids: list[int] = []
        self.templates: list[str] = []

    def add(self, description: SpanDescription, stream: int) -> None:
        """Add the templates of a description's kernel and comm op."""
        kernel = comm = ""
        if description.kernel is not None:
            kernel_arguments = {"bottleneck": description.bottleneck, "work": description.work}
            kernel = _render_template(
                to_kineto_kernel(description.kernel), _STREAM_IDS[Stream.COMPUTE], kernel_arguments
            )
        if description.comm_op is not None:
            timing, is_receive = (
                self.result.cost.comm_timing_by_group(description.comm_op),
                description.kind == "receive",
            )
            group = self._process_group(description.comm_op.comm_group, received=is_receive)
            comm_kernel = to_kineto_comm(description.comm_op, timing, group, self._dtype, is_receive=is_receive)
            comm = _render_template(
                comm_kernel,
                _STREAM_IDS[stream],
                {"bottleneck": timing.bottleneck.value, "does": description.comm_op.name},
            )
        self.templates += kernel, comm
        self.stream_ids += _STREAM_IDS[Stream.COMPUTE], _STREAM_IDS[stream]

    def process_groups(self) -> list[ProcessGroupInfo]:
        """Process groups that the rank communicates in."""
        program = self.result.program.programs[int(self.result.program.program_index[self.rank.rank])]
        comm_groups = sorted({comm_op.comm_group for comm_op in program.comm_ops if not isinstance(comm_op, HostOp)})
        candidates = (
            self._process_group(comm_group, received=received)
            for comm_group in comm_groups
            for received in (False, True)
        )
        return list({group["pg_name"]: group for group in candidates if group["ranks"]}.values())

    def _process_group(self, comm_group: str, *, received: bool) -> ProcessGroupInfo:
        """The rank's process group of a comm group (for p2p pairs: sends in, or receives in).

        No ranks if it is in none.
        """
        groups, rank = self.result.program.groups[comm_group], self.rank.rank
        group_index = int(
            groups.group_indices(self.result.rank_count, member_index=int(received) if groups.ordered else None)[rank]
        )
        ranks = groups.members[group_index].tolist() if group_index >= 0 else []
        group = {
            "pg_name": f"{comm_group}_{group_index}",
            "pg_desc": comm_group,
            "backend_config": "cuda:nccl",
            "pg_size": len(ranks),
        }
        return group | {"ranks": ranks}


def _kernel_runs(templates: _EventTemplates, spans: SpanTable) -> IntArray:
    """Every kernel and comm op by start: start and end in nanoseconds, template index, step: [4, n].

    In a span with both, the comm op ends with it.
    """
    stream = np.where(spans.is_task, spans.stream, _OPERATION_STREAM)
    key, label_index = np.unique(spans.description * len(_STREAM_IDS) + stream, return_inverse=True)
    for description, stream_index in (divmod(run_key, len(_STREAM_IDS)) for run_key in key.tolist()):
        templates.add(spans.descriptions[description], stream_index)
    start, end = (
        to_nanoseconds((spans.kernel_start, spans.transfer_start)),
        to_nanoseconds((spans.kernel_end, spans.end)),
    )
    template_index, step = (
        2 * label_index + np.array([[0], [1]]),
        spans.program.step_indices(templates.result.scenario.steps)[spans.task],
    )
    is_present = np.fromiter(map(bool, templates.templates), np.bool_)[template_index].T
    runs: IntArray = np.stack((start, end, template_index, np.broadcast_to(step, template_index.shape))).swapaxes(1, 2)[
        :, is_present
    ]
    return runs[:, np.argsort(runs[0], kind="stable")]


def _file_header(templates: _EventTemplates) -> str:
    """Text before the events; one key a line, because HTA searches for the rank line by line."""
    result, rank, groups = templates.result, templates.rank.rank, templates.process_groups()
    accelerators, kind = result.scenario.cluster.accelerator_kinds()
    accelerator = accelerators[int(kind[rank])]
    device = {"id": 0, "name": accelerator.name, "totalGlobalMem": int(accelerator.memory_bytes)}
    distributed_info = {
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
        "distributedInfo": distributed_info,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join([*lines, '"traceEvents": [\n'])


def _trace_events(templates: _EventTemplates, runs: IntArray) -> Iterator[str]:
    rank_label = f"{templates.rank.stage}, {templates.rank.name}"
    for process, name in ((_HOST_PID, f"host of {rank_label} (drawn, not simulated)"), (0, f"GPU of {rank_label}")):
        metadata = {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": name}}
        yield _encode(metadata)
    if not runs.size:
        return
    start, end, template_index, _ = runs
    launch = _launch_times(start)
    bounds = np.array([0, *_step_begins(templates, runs, launch), launch[-1] + _LAUNCH_NS])
    for step_index, times in enumerate(
        zip(_format_microseconds(bounds[:-1]), _format_microseconds(np.diff(bounds)), strict=True)
    ):
        yield _STEP_EVENT % (step_index, *times)
    columns = map(_format_microseconds, (launch, launch + _MARGIN_NS, start + _LEAD_NS, end - start))
    for template, *values in zip(template_index.tolist(), range(1, len(start) + 1), *columns, strict=True):
        yield templates.templates[template] % dict(zip(_VARIABLE_FIELDS, values, strict=True))


def _format_microseconds(times: IntArray) -> list[str]:
    """Nanoseconds as text in microseconds."""
    return [f"{time // 1000}.{time % 1000:03d}" for time in times.tolist()]


def _render_template(launch: KinetoKernel, stream: int, extra: dict[str, Any]) -> str:
    """Event template of a kernel or of host work (on its own thread), with `_VARIABLE_FIELDS` open."""
    arguments = {"device": 0, "context": 1, "stream": stream, "queued": 0} | launch.device_arguments | extra
    call, cbid = _RUNTIME_CALLS.get(launch.category, ("", 0))
    fields = {
        "stream": stream, "category": launch.category, "call": call, "cbid": cbid,
        "kernel": _encode({"name": launch.kernel, "args": arguments})[1:-2],
        "operator": _encode({"name": launch.operator, "args": launch.arguments})[1:-2] + "," * bool(launch.arguments),
    }  # fmt: skip
    escaped = {name: str(value).replace("%", "%%") for name, value in fields.items()}
    return Template(_KERNEL_EVENTS if call else _HOST_EVENT).substitute(_CONSTANT_FIELDS | escaped)


def _launch_times(start: IntArray) -> IntArray:
    """[n] nanoseconds of each kernel's launch on the host: just before it starts, without overlaps."""
    earliest_offset = np.arange(len(start)) * _LAUNCH_NS
    latest = np.minimum.accumulate((start - earliest_offset)[::-1])[::-1] + earliest_offset
    launch: IntArray = np.maximum(latest + _LEAD_NS - _LAUNCH_NS, 0)
    return launch


def _step_begins(templates: _EventTemplates, runs: IntArray, launch: IntArray) -> list[int]:
    """Begin of the host's step annotations except the first: launch of the step's first compute kernel."""
    _, _, template_index, step = runs
    is_compute = np.array(templates.stream_ids)[template_index] == _STREAM_IDS[Stream.COMPUTE]
    steps = range(1, templates.result.scenario.steps)
    return [int(launch[is_compute & (step == step_index)].min(initial=int(launch[-1]))) for step_index in steps]
