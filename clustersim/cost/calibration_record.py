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
from clustersim.cost.interference import Interference, KernelClass, SlowdownTable, kernel_class_of
from clustersim.hardware.efficiency import KernelEfficiency
from clustersim.model.kernels import Kernel, KernelKind, KernelShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import AttentionBackend
from clustersim.program.task import CollectiveType, CommOp

FORMAT_VERSION: Final = 2
READABLE_VERSIONS: Final = (1, FORMAT_VERSION)
"""Versions that can be read. 2 adds the device under load, chain factors, the host, what collectives lose, steps."""

COPY: Final = "copy"
"""What is beside a kernel where it is no collective: copies in the device's memory."""
_COLLECTIVE_BY_LABEL: Final = {kind.value: kind for kind in CollectiveType}


class RecordOrigin(Enum):
    """Where the rows come from."""

    MEASURED = "measured"  # on the machine that the record names
    PUBLISHED = "published"  # by others, each row with its source
    DERIVED = "derived"  # from the record of another accelerator, as `derivation` says


class MeasurementOutcome(Enum):
    """What became of a row that was to be measured."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"  # the device or the library has no such kernel
    NO_COMPILER = "no_compiler"  # there is no such kernel until Triton and a C compiler are installed
    FAILED = "failed"  # it left the device unusable, and ended the session


@dataclass(frozen=True, slots=True)
class TimeStatistics:
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
class DeviceTelemetry:
    """A device while it works: means over what was sampled meanwhile, 0 where it does not say.

    throttled: what kept its clocks down, as the driver calls it (`sw_power_cap`, `hw_thermal_slowdown`).
    """

    sm_clock_mhz: float = 0.0
    memory_clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TelemetrySample:
    """The device so many seconds after a session of measuring began, in a part of it (`burn_in`, `kernels`, `chain`)."""

    seconds: Seconds
    part: str
    state: DeviceTelemetry


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """What makes two kernels the same measurement; their names do not."""

    kind: KernelKind
    dtype: DType
    shape: KernelShape


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One kernel. flops, bytes, launches: as `model` counts them; time: None unless it was measured.

    under: the device while it was measured, None where it does not say.
    """

    name: str
    kind: KernelKind
    dtype: DType
    shape: KernelShape
    flops: Flop
    bytes: Bytes
    launches: int
    time: TimeStatistics | None
    outcome: MeasurementOutcome = MeasurementOutcome.MEASURED
    source: str = ""
    under: DeviceTelemetry | None = None

    @property
    def signature(self) -> KernelSignature:
        """What was measured."""
        return KernelSignature(self.kind, self.dtype, self.shape)

    @property
    def kernel(self) -> Kernel:
        """The kernel that was measured."""
        return Kernel(self.name, self.kind, self.dtype, self.flops, self.bytes, self.shape, self.launches)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
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
    def max_share(self) -> float:
        """The largest share."""
        return max(self.shares, default=1.0)


def reduction_dtype(comm_op: CommOp) -> DType:
    """The format of an exchange as records name it (see `CollectiveCall`); TF32 is a way of multiplying, and summed as FP32."""
    dtype = comm_op.reduce_dtype
    if dtype is None or dtype is DType.TF32 or not comm_op.collective.is_reduction:
        return DType.FP32
    return dtype


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One collective, run by all groups of that size at the same time, as a layout's groups do."""

    call: CollectiveCall
    time: TimeStatistics
    source: str = ""


@dataclass(frozen=True, slots=True)
class ImbalancedGemmSample:
    """Products of experts whose groups have different numbers of rows, beside the same with as many in each.

    kernel: with even groups; rows: of each group, about as many together; time: with these.
    """

    kernel: KernelSample
    rows: tuple[int, ...]
    time: TimeStatistics

    @property
    def imbalance(self) -> float:
        """Rows of the fullest group over their mean."""
        return max(self.rows) * len(self.rows) / sum(self.rows)

    @property
    def slowdown(self) -> float:
        """The part by which uneven groups take longer (below zero: less long)."""
        balanced = self.kernel.time
        return 0.0 if balanced is None else self.time.seconds / balanced.seconds - 1.0


@dataclass(frozen=True, slots=True)
class CopySample:
    """One copy of so many bytes (each read once and written once): device memory, or between host and device."""

    route: str
    bytes: Bytes
    time: TimeStatistics


@dataclass(frozen=True, slots=True)
class InterferenceSample:
    """One kernel alone, and while something else runs on the same device (`beside`: a copy, a collective).

    call: the collective, None: a copy; call_alone, call_together: what it takes by itself, and beside such kernels.
    """

    kernel: KernelSample
    beside: str
    together: TimeStatistics
    call: CollectiveCall | None = None
    call_alone: TimeStatistics | None = None
    call_together: TimeStatistics | None = None

    @property
    def kernel_slowdown(self) -> float:
        """The part by which the kernel took longer."""
        return 0.0 if self.kernel.time is None else _slowdown_ratio(self.kernel.time, self.together)

    @property
    def comm_slowdown(self) -> float:
        """The part by which the collective took longer; 0 where that was not measured."""
        isolated, overlapped = self.call_alone, self.call_together
        return 0.0 if isolated is None or overlapped is None else _slowdown_ratio(isolated, overlapped)


@dataclass(frozen=True, slots=True)
class InSituSample:
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
class HostLaunchSample:
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
class HoldoutStep:
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
class GpuSample:
    """One GPU of the node, beside the others: a product under load. place: its number or its own name."""

    place: str
    time: TimeStatistics
    under: DeviceTelemetry | None = None


@dataclass(frozen=True, slots=True)
class FitResidual:
    """How well a model meets its rows: mean absolute errors; left_out: of each row from the fit to the others."""

    rows: int
    error: float
    left_out: float


@dataclass(frozen=True, slots=True)
class KernelFit:
    """The kernel model of `cost.roofline` fitted to the rows.

    peak, memory_bandwidth, compute_units: what stands for the datasheet's inside the model; factors: what a family of
    kernels (see `family_of`) takes relative to the model, 1 where it is not named; residuals: by family, factors included.
    """

    peak: Mapping[DType, FlopPerSecond]
    memory_bandwidth: BytesPerSecond
    compute_units: int
    efficiency: KernelEfficiency
    factors: Mapping[str, float]
    residuals: Mapping[str, FitResidual]


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Seconds = alpha + payload / beta, for one collective, number of ranks and of nodes, and format (see `CollectiveCall`)."""

    collective: CollectiveType
    ranks: int
    nodes: int
    alpha: Seconds
    beta: BytesPerSecond
    residual: FitResidual
    format: DType = DType.FP32


@dataclass(frozen=True, slots=True)
class DeviceInfo:
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
class MeasurementConditions:
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
class CalibrationRecord:
    """A calibration record. derivation: how a derived or published one came about.

    uneven: products of experts with uneven groups; moments: the device over the time of measuring; chain: what a real
    layer does to kernels, by family; host: what launching takes; gpus: how far GPUs of a node differ; steps: real ones,
    as the rest predicts them.
    """

    device: DeviceInfo
    conditions: MeasurementConditions
    kernels: tuple[KernelSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    beside: tuple[InterferenceSample, ...] = ()
    uneven: tuple[ImbalancedGemmSample, ...] = ()
    launch_interval: Seconds | None = None
    kernel_fit: KernelFit | None = None
    collective_fits: tuple[CollectiveFit, ...] = ()
    moments: tuple[TelemetrySample, ...] = ()
    chain: tuple[InSituSample, ...] = ()
    host: tuple[HostLaunchSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    steps: tuple[HoldoutStep, ...] = ()
    origin: RecordOrigin = RecordOrigin.MEASURED
    derivation: str = ""
    version: int = FORMAT_VERSION

    @property
    def interference(self) -> Interference | None:
        """By which parts kernels and collectives took longer beside each other; None: not measured.

        A copy within the device's memory takes far more of its bandwidth than a collective does, and says nothing here.
        """
        slowdowns = kernel_slowdowns(self.beside)
        return Interference.from_measurements(slowdowns, comm_slowdowns(self.beside)) if slowdowns else None

    @property
    def attention_library(self) -> AttentionBackend:
        """The flash attention that the rows are of: PyTorch's (FlashAttention-2 since 2.2), or the fastest there is."""
        return AttentionBackend.FLASH2 if self.device.torch else AttentionBackend.FLASH


def _slowdown_ratio(isolated: TimeStatistics, overlapped: TimeStatistics) -> float:
    return max(0.0, overlapped.seconds / isolated.seconds - 1.0)


def kernel_slowdowns(samples: Iterable[InterferenceSample]) -> SlowdownTable:
    """By which part kernels took longer beside collectives, of each pair that was measured all rows together."""
    return _slowdowns_by_pair(
        (sample, sample.together, sample.kernel_slowdown) for sample in samples if sample.kernel.time is not None
    )


def comm_slowdowns(samples: Iterable[InterferenceSample]) -> SlowdownTable:
    """The same of the collectives."""
    return _slowdowns_by_pair(
        (sample, sample.call_together, sample.comm_slowdown) for sample in samples if sample.call_together is not None
    )


def _slowdowns_by_pair(measured: Iterable[tuple[InterferenceSample, TimeStatistics, float]]) -> SlowdownTable:
    pairs: dict[tuple[CollectiveType, KernelClass], list[tuple[Seconds, Seconds]]] = {}
    for sample, overlapped, slowdown in measured:
        if sample.beside in _COLLECTIVE_BY_LABEL:
            times = overlapped.seconds, overlapped.seconds / (1.0 + slowdown)
            pairs.setdefault((_COLLECTIVE_BY_LABEL[sample.beside], kernel_class_of(sample.kernel.kind)), []).append(
                times
            )
    return {
        pair: sum(seconds[0] for seconds in pair_times) / sum(seconds[1] for seconds in pair_times) - 1.0
        for pair, pair_times in pairs.items()
    }


def signature_of(kernel: Kernel) -> KernelSignature | None:
    """What a kernel is looked up by; None where nothing says what it computes."""
    return None if kernel.shape is None else KernelSignature(kernel.kind, kernel.dtype, kernel.shape)


def family_of(signature: KernelSignature) -> str:
    """Kernels whose measurements tell about each other: by kind (and routine), number format and direction.

    Such as `matmul bf16`, `attention_backward bf16`, `rmsnorm backward fused bf16`, `quantize fused bf16 mxfp8`.
    """
    shape = signature.shape
    if isinstance(shape, MemoryBoundShape):
        labels = (shape.routine.value, "backward" * shape.backward, "fused" * shape.fused)
        output_formats = shape.formats[:1] if shape.routine is MemoryBoundOp.QUANTIZE else ()
        return " ".join(
            (*filter(None, labels), signature.dtype.value, *(output_format.value for output_format in output_formats))
        )
    return f"{signature.kind.value} {signature.dtype.value}"


def merge_records(first: CalibrationRecord, second: CalibrationRecord) -> CalibrationRecord:
    """Rows of both, the second's where both have measured the same.

    Without fits, and without steps that were predicted: they belong to the rows before.

    Raise InputError where the records are of different devices, origins or numbers of processes.
    """
    conditions = second.conditions
    _require_equal("origin", first.origin.value, second.origin.value)
    _require_equal("processes", first.conditions.processes, conditions.processes)
    kernels = {sample.signature: sample for sample in first.kernels}
    kernels |= {
        sample.signature: sample
        for sample in second.kernels
        if sample.time is not None or not _has_time(kernels, sample)
    }
    collectives = {sample.call: sample for sample in (*first.collectives, *second.collectives)}
    copies = {(sample.route, sample.bytes): sample for sample in (*first.copies, *second.copies)}
    interference = {
        (sample.kernel.signature, sample.beside, sample.call): sample for sample in (*first.beside, *second.beside)
    }
    imbalanced = {(sample.kernel.signature, sample.rows): sample for sample in (*first.uneven, *second.uneven)}
    interval = first.launch_interval if second.launch_interval is None else second.launch_interval
    return replace(
        second,
        device=_merged_device(first.device, second.device),
        conditions=replace(conditions, before=first.conditions.before or conditions.before),
        kernels=tuple(kernels.values()),
        collectives=tuple(collectives.values()),
        copies=tuple(copies.values()),
        beside=tuple(interference.values()),
        uneven=tuple(imbalanced.values()),
        moments=first.moments + second.moments,
        chain=second.chain or first.chain,
        host=tuple({sample.state: sample for sample in (*first.host, *second.host)}.values()),
        gpus=second.gpus or first.gpus,
        steps=second.steps,
        launch_interval=interval,
        derivation=second.derivation or first.derivation,
        kernel_fit=None,
        collective_fits=(),
    )


def _has_time(samples: Mapping[KernelSignature, KernelSample], sample: KernelSample) -> bool:
    """Whether the same kernel has a time among those."""
    other = samples.get(sample.signature)
    return other is not None and other.time is not None


def _merged_device(first: DeviceInfo, second: DeviceInfo) -> DeviceInfo:
    """The device that both describe; what one of them does not know is the other's."""
    values: dict[str, Any] = {}
    for device_field in fields(DeviceInfo):
        value, other = getattr(first, device_field.name), getattr(second, device_field.name)
        if isinstance(value, Mapping):
            values[device_field.name] = _merged_environment(value, other)
            continue
        if value and other:
            _require_equal(device_field.name, value, other)
        values[device_field.name] = value if value or other is None else other
    return DeviceInfo(**values)


def _merged_environment(first: Mapping[str, str], second: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of both; a starter such as torchrun sets some, so one may have what the other has not."""
    for name in sorted(first.keys() & second.keys()):
        _require_equal(name, first[name], second[name])
    return {**first, **second}


def _require_equal(label: str, first: object, second: object) -> None:
    if first == second:
        return
    hint = "; on a CPU, OMP_NUM_THREADS sets both (torchrun sets it to 1)" * (label in ("compute_units", "threads"))
    raise InputError(
        f"records of {label} {first} and of {label} {second} cannot be merged; keep a record for each of them{hint}"
    )
