"""What does a calibration record hold?

What one machine was measured to do: kernels by shape, collectives by payload, copies, kernels beside other work; how,
when and with which versions; and the constants of the cost models that were fitted to these rows, with their residuals.
`cost.record_file` reads and writes it, `cost.measured_kernels` and `cost.measured_collectives` answer from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds
from clustersim.cost.interference import Interference, KernelClass, Parts, class_of
from clustersim.hardware.efficiency import Efficiency
from clustersim.model.kernels import Kernel, KernelKind, Routine, Shape, StreamShape
from clustersim.model.training import Attention
from clustersim.program.task import CollectiveType, CommOp

VERSION: Final = 2
READABLE: Final = (1, VERSION)
"""Versions that can be read. 2 adds the device under load, chain factors, the host, what collectives lose, steps."""

COPY: Final = "copy"
"""What is beside a kernel where it is no collective: copies in the device's memory."""
_COLLECTIVES: Final = {kind.value: kind for kind in CollectiveType}


class Origin(Enum):
    """Where the rows come from."""

    MEASURED = "measured"  # on the machine that the record names
    PUBLISHED = "published"  # by others, each row with its source
    DERIVED = "derived"  # from the record of another accelerator, as `derivation` says


class Outcome(Enum):
    """What became of a row that was to be measured."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"  # the device or the library has no such kernel
    NO_COMPILER = "no_compiler"  # there is no such kernel until Triton and a C compiler are installed
    FAILED = "failed"  # it left the device unusable, and ended the session


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing: median seconds, percentiles, how many were kept and how many dropped."""

    seconds: Seconds
    p5: Seconds
    p95: Seconds
    repetitions: int
    dropped: int = 0

    @property
    def dispersion(self) -> float | None:
        """Half of what lies between p5 and p95, as a part of the median; None where there is one repetition alone."""
        return (self.p95 - self.p5) / 2.0 / self.seconds if self.repetitions > 1 else None


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """A device while it works: means over what was sampled meanwhile, 0 where it does not say.

    throttled: what kept its clocks down, as the driver calls it (`sw_power_cap`, `hw_thermal_slowdown`).
    """

    sm_clock_mhz: float = 0.0
    memory_clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """The device so many seconds after a session of measuring began, in a part of it (`soak`, `kernels`, `chain`)."""

    seconds: Seconds
    part: str
    state: UnderLoad


@dataclass(frozen=True, slots=True)
class Signature:
    """What makes two kernels the same measurement; their names do not."""

    kind: KernelKind
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel. flops, bytes, launches: as `model` counts them; time: None unless it was measured.

    under: the device while it was measured, None where it does not say.
    """

    name: str
    kind: KernelKind
    dtype: DType
    shape: Shape
    flops: Flop
    bytes: Bytes
    launches: int
    time: Spread | None
    outcome: Outcome = Outcome.MEASURED
    source: str = ""
    under: UnderLoad | None = None

    @property
    def signature(self) -> Signature:
        """What was measured."""
        return Signature(self.kind, self.dtype, self.shape)

    @property
    def kernel(self) -> Kernel:
        """The kernel that was measured."""
        return Kernel(self.name, self.kind, self.dtype, self.flops, self.bytes, self.shape, self.launches)


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of `ranks` ranks on `nodes` nodes, as many on each; payload: as `program.task.Collective` says.

    format: that a reduction sums in; what only moves bytes has none of its own, and stands as FP32; shares: of an
    all-to-all, what each rank gets, relative to an even part; none: all get as much.
    """

    collective: CollectiveType
    payload: Bytes
    ranks: int
    nodes: int
    format: DType = DType.FP32
    shares: tuple[float, ...] = ()

    @property
    def hottest(self) -> float:
        """The largest share."""
        return max(self.shares, default=1.0)


def summed_in(exchange: CommOp) -> DType:
    """The format of an exchange as records name it (see `Call`); TF32 is a way of multiplying, and summed as FP32."""
    known = exchange.reduce_dtype
    if known is None or known is DType.TF32 or not exchange.collective.is_reduction:
        return DType.FP32
    return known


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective, run by all groups of that size at the same time, as a layout's groups do."""

    call: Call
    time: Spread
    source: str = ""


@dataclass(frozen=True, slots=True)
class UnevenRow:
    """Products of experts whose groups have different numbers of rows, beside the same with as many in each.

    kernel: with even groups; rows: of each group, about as many together; time: with these.
    """

    kernel: KernelRow
    rows: tuple[int, ...]
    time: Spread

    @property
    def hottest(self) -> float:
        """Rows of the fullest group over their mean."""
        return max(self.rows) * len(self.rows) / sum(self.rows)

    @property
    def slowing(self) -> float:
        """The part by which uneven groups take longer (below zero: less long)."""
        even = self.kernel.time
        return 0.0 if even is None else self.time.seconds / even.seconds - 1.0


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One copy of so many bytes (each read once and written once): device memory, or between host and device."""

    route: str
    bytes: Bytes
    time: Spread


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One kernel alone, and while something else runs on the same device (`beside`: a copy, a collective).

    call: the collective, None: a copy; call_alone, call_together: what it takes by itself, and beside such kernels.
    """

    kernel: KernelRow
    beside: str
    together: Spread
    call: Call | None = None
    call_alone: Spread | None = None
    call_together: Spread | None = None

    @property
    def slowing(self) -> float:
        """The part by which the kernel took longer."""
        return 0.0 if self.kernel.time is None else _part(self.kernel.time, self.together)

    @property
    def hindrance(self) -> float:
        """The part by which the collective took longer; 0 where that was not measured."""
        alone, together = self.call_alone, self.call_together
        return 0.0 if alone is None or together is None else _part(alone, together)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """Kernels of a family in a real layer: seconds of all of them by themselves, and one after the other in it."""

    family: str
    kernels: int
    isolated: Seconds
    in_chain: Seconds

    @property
    def factor(self) -> float:
        """Times that they take in the chain what they take alone."""
        return self.in_chain / self.isolated


class HostState(Enum):
    """How the host launches what a step computes."""

    EAGER = "eager"  # Python and autograd, operator by operator
    FSDP = "fsdp"  # the same with the hooks of `fully_shard`
    DTENSOR = "dtensor"  # the same with distributed tensors
    COMPILED = "compiled"  # `torch.compile`
    GRAPH = "cuda_graph"  # captured once, launched as a whole


@dataclass(frozen=True, slots=True)
class HostRow:
    """Seconds that the host needs for each launch of a step in a state; of a graph, for each graph.

    launches: of forward and of backward that were counted; alone: what of those seconds, forward's and backward's, is
    in kernels timed by themselves, on a host that computes what it launches (a CPU); none elsewhere.
    """

    state: HostState
    forward: Seconds
    backward: Seconds
    launches: tuple[int, int]
    alone: tuple[Seconds, Seconds] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A real step that the record was not measured for, and what it predicts.

    what: such as `4 layers, 2 microbatches of 1`; of_rows: by what part errors of the record's own rows, all of one
    sign, would have it differ; kinds: what it was like (`uncertainty.step_features`).
    """

    what: str
    predicted: Seconds
    measured: Seconds
    of_rows: float = 0.0
    kinds: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of the node, beside the others: a product under load. place: its number or its own name."""

    place: str
    time: Spread
    under: UnderLoad | None = None


@dataclass(frozen=True, slots=True)
class Residual:
    """How well a model meets its rows: mean absolute errors; left_out: of each row from the fit to the others."""

    rows: int
    error: float
    left_out: float


@dataclass(frozen=True, slots=True)
class KernelFit:
    """The kernel model of `cost.roofline` fitted to the rows.

    peak, memory_bandwidth, compute_units: what stands for the datasheet's inside the model; factors: what a family of
    kernels (see `family`) takes relative to the model, 1 where it is not named; residuals: by family, factors included.
    """

    peak: Mapping[DType, FlopPerSecond]
    memory_bandwidth: BytesPerSecond
    compute_units: int
    efficiency: Efficiency
    factors: Mapping[str, float]
    residuals: Mapping[str, Residual]


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Seconds = alpha + payload / beta, for one collective, number of ranks and of nodes, and format (see `Call`)."""

    collective: CollectiveType
    ranks: int
    nodes: int
    alpha: Seconds
    beta: BytesPerSecond
    residual: Residual
    format: DType = DType.FP32


@dataclass(frozen=True, slots=True)
class Device:
    """The machine. accelerator: its name in clustersim; name: its own; empty or 0: unknown.

    collectives: library and version (`nccl 2.27.5`, `gloo`); threads: of the CPU that each process computes with;
    attention: backends of SDPA that are allowed; host: its processor; power_limit_w: that the driver enforces; ecc,
    mig: None: unknown; environment: variables that change what libraries do (`NCCL_ALGO`).
    """

    accelerator: str
    name: str
    memory_bytes: Bytes = 0.0
    compute_units: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    collectives: str = ""
    threads: int = 0
    cudnn: str = ""
    cublas: str = ""
    attention: str = ""
    host: str = ""
    power_limit_w: float = 0.0
    ecc: bool | None = None
    mig: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the rows were measured. processes: that measured at the same time on this machine.

    before, after: clocks and temperature as the device gives them, empty where it does not.
    """

    date: str
    command: str
    method: str
    processes: int = 1
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """A calibration record. derivation: how a derived or published one came about.

    uneven: products of experts with uneven groups; moments: the device over the time of measuring; chain: what a real
    layer does to kernels, by family; host: what launching takes; gpus: how far GPUs of a node differ; steps: real ones,
    as the rest predicts them.
    """

    device: Device
    conditions: Conditions
    kernels: tuple[KernelRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    beside: tuple[BesideRow, ...] = ()
    uneven: tuple[UnevenRow, ...] = ()
    launch_interval: Seconds | None = None
    kernel_fit: KernelFit | None = None
    collective_fits: tuple[CollectiveFit, ...] = ()
    moments: tuple[Moment, ...] = ()
    chain: tuple[ChainRow, ...] = ()
    host: tuple[HostRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    origin: Origin = Origin.MEASURED
    derivation: str = ""
    version: int = VERSION

    @property
    def interference(self) -> Interference | None:
        """By which parts kernels and collectives took longer beside each other; None: not measured.

        A copy within the device's memory takes far more of its bandwidth than a collective does, and says nothing here.
        """
        measured = slowed(self.beside)
        return Interference.of(measured, hindered(self.beside)) if measured else None

    @property
    def attention(self) -> Attention:
        """The flash attention that the rows are of: PyTorch's (FlashAttention-2 since 2.2), or the fastest there is."""
        return Attention.FLASH2 if self.device.torch else Attention.FLASH


def _part(alone: Spread, together: Spread) -> float:
    return max(0.0, together.seconds / alone.seconds - 1.0)


def slowed(rows: Iterable[BesideRow]) -> Parts:
    """By which part kernels took longer beside collectives, of each pair that was measured all rows together."""
    return _parts((row, row.together, row.slowing) for row in rows if row.kernel.time is not None)


def hindered(rows: Iterable[BesideRow]) -> Parts:
    """The same of the collectives."""
    return _parts((row, row.call_together, row.hindrance) for row in rows if row.call_together is not None)


def _parts(measured: Iterable[tuple[BesideRow, Spread, float]]) -> Parts:
    pairs: dict[tuple[CollectiveType, KernelClass], list[tuple[Seconds, Seconds]]] = {}
    for row, together, part in measured:
        if row.beside in _COLLECTIVES:
            times = together.seconds, together.seconds / (1.0 + part)
            pairs.setdefault((_COLLECTIVES[row.beside], class_of(row.kernel.kind)), []).append(times)
    return {
        pair: sum(item[0] for item in some) / sum(element[1] for element in some) - 1.0 for pair, some in pairs.items()
    }


def signature(kernel: Kernel) -> Signature | None:
    """What a kernel is looked up by; None where nothing says what it computes."""
    return None if kernel.shape is None else Signature(kernel.kind, kernel.dtype, kernel.shape)


def family(signature: Signature) -> str:
    """Kernels whose measurements tell about each other: by kind (and routine), number format and direction.

    Such as `matmul bf16`, `attention_backward bf16`, `rmsnorm backward fused bf16`, `quantize fused bf16 mxfp8`.
    """
    shape = signature.shape
    if isinstance(shape, StreamShape):
        words = (shape.routine.value, "backward" * shape.backward, "fused" * shape.fused)
        made = shape.formats[:1] if shape.routine is Routine.QUANTIZE else ()
        return " ".join((*filter(None, words), signature.dtype.value, *(d_type.value for d_type in made)))
    return f"{signature.kind.value} {signature.dtype.value}"


def merged(first: Record, second: Record) -> Record:
    """Rows of both, the second's where both have measured the same.

    Without fits, and without steps that were predicted: they belong to the rows before.

    Raise InputError where the records are of different devices, origins or numbers of processes.
    """
    conditions = second.conditions
    _require_equal("origin", first.origin.value, second.origin.value)
    _require_equal("processes", first.conditions.processes, conditions.processes)
    kernels = {row.signature: row for row in first.kernels}
    kernels |= {row.signature: row for row in second.kernels if row.time is not None or not _timed(kernels, row)}
    collectives = {row.call: row for row in (*first.collectives, *second.collectives)}
    copies = {(row.route, row.bytes): row for row in (*first.copies, *second.copies)}
    beside = {(row.kernel.signature, row.beside, row.call): row for row in (*first.beside, *second.beside)}
    uneven = {(row.kernel.signature, row.rows): row for row in (*first.uneven, *second.uneven)}
    interval = first.launch_interval if second.launch_interval is None else second.launch_interval
    return replace(
        second,
        device=_same(first.device, second.device),
        conditions=replace(conditions, before=first.conditions.before or conditions.before),
        kernels=tuple(kernels.values()),
        collectives=tuple(collectives.values()),
        copies=tuple(copies.values()),
        beside=tuple(beside.values()),
        uneven=tuple(uneven.values()),
        moments=first.moments + second.moments,
        chain=second.chain or first.chain,
        host=tuple({row.state: row for row in (*first.host, *second.host)}.values()),
        gpus=second.gpus or first.gpus,
        steps=second.steps,
        launch_interval=interval,
        derivation=second.derivation or first.derivation,
        kernel_fit=None,
        collective_fits=(),
    )


def _timed(known: Mapping[Signature, KernelRow], row: KernelRow) -> bool:
    """Whether the same kernel has a time among those."""
    there = known.get(row.signature)
    return there is not None and there.time is not None


def _same(first: Device, second: Device) -> Device:
    """The device that both describe; what one of them does not know is the other's."""
    known: dict[str, Any] = {}
    for dataclass_field in fields(Device):
        mine, other = getattr(first, dataclass_field.name), getattr(second, dataclass_field.name)
        if isinstance(mine, Mapping):
            known[dataclass_field.name] = _environment(mine, other)
            continue
        if mine and other:
            _require_equal(dataclass_field.name, mine, other)
        known[dataclass_field.name] = mine if mine or other is None else other
    return Device(**known)


def _environment(first: Mapping[str, str], second: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of both; a starter such as torchrun sets some, so one may have what the other has not."""
    for name in sorted(first.keys() & second.keys()):
        _require_equal(name, first[name], second[name])
    return {**first, **second}


def _require_equal(what: str, first: object, second: object) -> None:
    if first == second:
        return
    threads = "; on a CPU, OMP_NUM_THREADS sets both (torchrun sets it to 1)" * (what in ("compute_units", "threads"))
    raise InputError(
        f"records of {what} {first} and of {what} {second} cannot be merged; keep a record for each of them{threads}"
    )
