"""What does a calibration record hold?

What one machine was measured to do: kernels by shape, collectives by payload, copies, kernels overlapping
other work; how, when and with which versions; and the constants of the cost models that were fitted to
these samples, with their residuals. `cost.record_file` reads and writes it; `cost.measured_kernels` and
`cost.measured_collectives` predict from it.

Field names of the dataclasses are the keys of the JSON file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds
from clustersim.cost.interference import Interference, KernelClass, SlowdownTable, kernel_class_of
from clustersim.cost.record_kinds import LaunchMode, MeasurementOutcome, RecordOrigin
from clustersim.hardware.efficiency import KernelEfficiency
from clustersim.model.kernels import Kernel, KernelKind, KernelShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import AttentionBackend
from clustersim.model.unattributed import PASS_OVERHEAD, STEP_OVERHEAD, UnattributedWork
from clustersim.program.task import CollectiveType, CommOp

FORMAT_VERSION: Final = 3
"""The version that is written, and the only one that is read: 3 renamed keys of version 2."""

COPY: Final = "copy"
"""What a kernel overlaps if it is not a collective: copies within device memory."""
_COLLECTIVE_BY_LABEL: Final = {kind.value: kind for kind in CollectiveType}


@dataclass(frozen=True, slots=True)
class TimeStatistics:
    """Repeated measurements of one quantity: median seconds, percentiles, counts of kept and dropped repetitions."""

    seconds: Seconds
    p5: Seconds
    p95: Seconds
    repetitions: int
    dropped: int = 0

    @property
    def dispersion(self) -> float | None:
        """Half the range between p5 and p95, relative to the median; None with a single repetition."""
        return (self.p95 - self.p5) / 2.0 / self.seconds if self.repetitions > 1 else None

    def scaled(self, factor: float) -> "TimeStatistics":
        """The statistics of a quantity that takes a multiple of this time."""
        return replace(self, seconds=self.seconds * factor, p5=self.p5 * factor, p95=self.p95 * factor)


@dataclass(frozen=True, slots=True)
class DeviceTelemetry:
    """Telemetry of a device under load: means over the samples taken, 0 where it is not reported.

    throttled: clock throttle reasons as the driver names them (`sw_power_cap`, `hw_thermal_slowdown`).
    """

    sm_clock_mhz: float = 0.0
    memory_clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TelemetrySample:
    """Device telemetry at a time since the start of a measurement session.

    seconds: time since the start; stage: of the session (`burn_in`, `kernels`, `in_situ`).
    """

    seconds: Seconds
    stage: str
    state: DeviceTelemetry


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """Identity of a kernel measurement; kernel names are not part of it."""

    kind: KernelKind
    dtype: DType
    shape: KernelShape


@dataclass(frozen=True, slots=True)
class KernelSample:
    """Measurement of one kernel. flops, bytes, launches: as `model` counts them; time: None unless it was measured.

    telemetry: during the measurement, None where it is not reported.
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
    telemetry: DeviceTelemetry | None = None

    @classmethod
    def of_kernel(
        cls,
        kernel: Kernel,
        time: TimeStatistics | None,
        outcome: MeasurementOutcome = MeasurementOutcome.MEASURED,
        source: str = "",
    ) -> "KernelSample":
        """A sample of a kernel that has a shape; raises ValueError for one without."""
        if kernel.shape is None:
            raise ValueError(f"{kernel.name} has no shape, by which records identify kernels")
        return cls(
            kernel.name,
            *(kernel.kind, kernel.dtype, kernel.shape),
            *(kernel.flops, kernel.bytes, kernel.launches),
            time=time,
            outcome=outcome,
            source=source,
        )

    @property
    def signature(self) -> KernelSignature:
        """Identity of the measured kernel."""
        return KernelSignature(self.kind, self.dtype, self.shape)

    @property
    def kernel(self) -> Kernel:
        """The kernel that was measured."""
        return Kernel(self.name, self.kind, self.dtype, self.flops, self.bytes, self.shape, self.launches)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of `ranks` ranks, spread evenly over `nodes` nodes.

    payload: as in `program.task.CollectiveType`; dtype: data type of a reduction; collectives that only move
    bytes have FP32 here; shares: of an all-to-all, bytes that each rank receives relative to an even split;
    empty: even.
    """

    collective: CollectiveType
    payload: Bytes
    ranks: int
    nodes: int
    dtype: DType = DType.FP32
    shares: tuple[float, ...] = ()

    @property
    def max_share(self) -> float:
        """The largest share."""
        return max(self.shares, default=1.0)


def reduction_dtype(comm_op: CommOp) -> DType:
    """Reduction data type of a communication op as records name it (see `CollectiveCall`); TF32 is summed as FP32."""
    dtype = comm_op.reduce_dtype
    if dtype is None or dtype is DType.TF32 or not comm_op.collective.is_reduction:
        return DType.FP32
    return dtype


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """Measurement of one collective, run by all groups of that size at the same time, as a layout's groups do."""

    call: CollectiveCall
    time: TimeStatistics
    source: str = ""


@dataclass(frozen=True, slots=True)
class ImbalancedGemmSample:
    """Measurement of a grouped GEMM with imbalanced groups, compared with the balanced one.

    kernel: the balanced one; tokens_per_group: with about the same sum; time: with these.
    """

    kernel: KernelSample
    tokens_per_group: tuple[int, ...]
    time: TimeStatistics

    @property
    def imbalance(self) -> float:
        """Tokens of the most loaded group over the mean."""
        return max(self.tokens_per_group) * len(self.tokens_per_group) / sum(self.tokens_per_group)

    @property
    def slowdown(self) -> float:
        """Relative extra time of the imbalanced groups (negative: faster)."""
        balanced = self.kernel.time
        return 0.0 if balanced is None else self.time.seconds / balanced.seconds - 1.0


@dataclass(frozen=True, slots=True)
class CopySample:
    """Measurement of one copy (each byte read and written once): in device memory, or between host and device."""

    route: str
    bytes: Bytes
    time: TimeStatistics


@dataclass(frozen=True, slots=True)
class InterferenceSample:
    """Measurement of one kernel in isolation, and while something else runs on the same device.

    overlapped_with: what runs concurrently, a copy or a collective; overlapped_time: the kernel's time then; call:
    the collective, None for a copy; isolated_call_time, overlapped_call_time: time of the collective in isolation,
    and while such kernels run.
    """

    kernel: KernelSample
    overlapped_with: str
    overlapped_time: TimeStatistics
    call: CollectiveCall | None = None
    isolated_call_time: TimeStatistics | None = None
    overlapped_call_time: TimeStatistics | None = None

    @property
    def kernel_slowdown(self) -> float:
        """Fraction by which the kernel took longer."""
        return 0.0 if self.kernel.time is None else _slowdown_ratio(self.kernel.time, self.overlapped_time)

    @property
    def comm_slowdown(self) -> float:
        """Fraction by which the collective took longer; 0 where that was not measured."""
        isolated, overlapped = self.isolated_call_time, self.overlapped_call_time
        return 0.0 if isolated is None or overlapped is None else _slowdown_ratio(isolated, overlapped)


@dataclass(frozen=True, slots=True)
class InSituSample:
    """Total seconds of a family's kernels in isolation, and back to back in a real layer."""

    family: str
    kernels: int
    isolated: Seconds
    in_situ: Seconds

    @property
    def factor(self) -> float:
        """In-situ over isolated seconds."""
        return self.in_situ / self.isolated


@dataclass(frozen=True, slots=True)
class HostLaunchSample:
    """Host seconds for each launch of a step in one launch mode; for a graph, for each graph launch.

    launches: launches of forward and of backward that were counted; in_kernel_times: seconds of (forward, backward)
    that isolated kernel times contain already, on a host that computes the kernels itself (a CPU); zero elsewhere.
    """

    mode: LaunchMode
    forward: Seconds
    backward: Seconds
    launches: tuple[int, int]
    in_kernel_times: tuple[Seconds, Seconds] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class HoldoutStep:
    """A real step that was not used for the calibration, and the record's prediction of it.

    description: such as `4 layers, 2 microbatches of 1`; propagated_error: relative error of the prediction if all
    errors of the record's own samples had one sign; categories: of the step (`uncertainty.step_features`).
    """

    description: str
    predicted: Seconds
    measured: Seconds
    propagated_error: float = 0.0
    categories: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class UnmatchedCall:
    """A call of a profiled step that ran no operator of the plan. seconds: of all of them in a step, on one rank.

    phase: `forward`, `backward` or `optimizer`.
    """

    name: str
    phase: str
    count: float
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class MemoryAnchor:
    """Memory of a rank as its allocator recorded it, and as the memory model has it: bytes.

    allocated, reserved: at the peak; modelled: tensors at the peak; layers: transformer layers of the rank; tokens: of
    a microbatch on the rank.
    """

    allocated: Bytes
    reserved: Bytes
    modelled: Bytes
    layers: int
    tokens: int

    @property
    def residual(self) -> Bytes:
        """Bytes of the allocator that the model does not have; 0 where the model has too much, which is kept."""
        return max(0.0, self.allocated - self.modelled)

    @property
    def fragmentation(self) -> float:
        """Reserved bytes over those that the model has, the residual included; at least 1."""
        return max(1.0, self.reserved / (self.modelled + self.residual))

    def residual_of(self, layers: int, tokens: int) -> Bytes:
        """The residual of a rank with as many layers and tokens: in proportion where it has more, else as measured."""
        return self.residual * max(1.0, layers / self.layers) * max(1.0, tokens / self.tokens)


@dataclass(frozen=True, slots=True)
class ProfileAnchor:
    """The profiled step that a record was made of. Its kernels are measured in a step, not in isolation.

    traces: where it was read; ranks: of the job; steps: profiled steps that the samples are means of; step_time: of
    the profiled step, or of the same step without a profiler, as its user measured it; busy, matched: seconds of
    kernels of one rank's compute stream, and of those that ran an operator of the plan; attention: what the plan asked
    for, which is what was timed; unmatched: the calls that ran none; host_scale: the host's time, and waiting for it,
    without a profiler, over that in the trace; kernel_scale: the same of kernels and collectives, where they are slowed
    with the host, on a CPU.
    """

    traces: str
    ranks: int
    steps: int
    step_time: Seconds
    busy: Seconds
    matched: Seconds
    attention: AttentionBackend
    unmatched: tuple[UnmatchedCall, ...] = ()
    memory: MemoryAnchor | None = None
    host_scale: float = 1.0
    kernel_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A matmul under load on one GPU of the node, measured with the others. device: its name (`cuda:0`)."""

    device: str
    time: TimeStatistics
    telemetry: DeviceTelemetry | None = None


@dataclass(frozen=True, slots=True)
class FitResidual:
    """Mean absolute relative errors of a fit, on its samples and by leave-one-out cross-validation."""

    samples: int
    error: float
    leave_one_out_error: float


@dataclass(frozen=True, slots=True)
class KernelFit:
    """The kernel model of `cost.roofline` fitted to the samples.

    peak, memory_bandwidth, compute_units: effective values that replace the datasheet's in the model; factors:
    time of a kernel family (see `kernel_family`) relative to the model, 1 where it is not listed; residuals: by
    family, factors included.
    """

    peak: Mapping[DType, FlopPerSecond]
    memory_bandwidth: BytesPerSecond
    compute_units: int
    efficiency: KernelEfficiency
    factors: Mapping[str, float]
    residuals: Mapping[str, FitResidual]


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Seconds = alpha + payload / beta, by collective, rank count, node count, data type (see `CollectiveCall`)."""

    collective: CollectiveType
    ranks: int
    nodes: int
    alpha: Seconds
    beta: BytesPerSecond
    residual: FitResidual
    dtype: DType = DType.FP32


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The measured machine; empty or 0: unknown.

    accelerator: its name in clustersim; name: as the driver reports it; collectives: library and version (`nccl
    2.27.5`, `gloo`); threads: CPU threads that each process computes with; attention: allowed SDPA backends;
    host: its processor; power_limit_w: limit that the driver enforces; ecc, mig: None: unknown; environment:
    variables that change what libraries do (`NCCL_ALGO`).
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
    """How the samples were measured. processes: number that measured at the same time on this machine.

    before, after: clocks and temperature as the device reports them, empty where it does not.
    """

    date: str
    command: str
    method: str
    processes: int = 1
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A calibration record. derivation: how a derived or published one was obtained.

    interference: kernels overlapping other work; imbalanced_gemms: grouped GEMMs with imbalanced groups; telemetry:
    over the session; in_situ: kernel families in real layers; host_launches: launch times; gpus: spread over the
    GPUs of a node; holdout_steps: real ones, as predicted from the other samples; profile: the profiled step that the
    samples are of, None: of isolated kernels.
    """

    device: DeviceInfo
    conditions: MeasurementConditions
    kernels: tuple[KernelSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    interference: tuple[InterferenceSample, ...] = ()
    imbalanced_gemms: tuple[ImbalancedGemmSample, ...] = ()
    launch_interval: Seconds | None = None
    kernel_fit: KernelFit | None = None
    collective_fits: tuple[CollectiveFit, ...] = ()
    telemetry: tuple[TelemetrySample, ...] = ()
    in_situ: tuple[InSituSample, ...] = ()
    host_launches: tuple[HostLaunchSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    holdout_steps: tuple[HoldoutStep, ...] = ()
    profile: ProfileAnchor | None = None
    origin: RecordOrigin = RecordOrigin.MEASURED
    derivation: str = ""
    version: int = FORMAT_VERSION

    @property
    def is_in_step(self) -> bool:
        """Whether its kernel times are those within a step."""
        return bool(self.in_situ) or self.profile is not None

    @property
    def unattributed_work(self) -> UnattributedWork:
        """The work of no operator that was measured."""
        signatures = {sample.signature for sample in self.kernels if sample.time is not None}
        return UnattributedWork(signature_of(PASS_OVERHEAD) in signatures, signature_of(STEP_OVERHEAD) in signatures)

    @property
    def measured_interference(self) -> Interference | None:
        """Mutual slowdowns of kernels and collectives; None: not measured.

        A copy within device memory takes far more of its bandwidth than a collective does, so copies are not used
        here.
        """
        slowdowns = kernel_slowdowns(self.interference)
        return Interference.from_measurements(slowdowns, comm_slowdowns(self.interference)) if slowdowns else None

    @property
    def attention_library(self) -> AttentionBackend:
        """The flash attention that was measured: PyTorch's, or the fastest available.

        PyTorch takes FlashAttention-2 since 2.2, and what `AttentionBackend.SDPA` stands for with cuDNN newer than
        9.15 (`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
        """
        if self.profile is not None:
            return self.profile.attention
        if not self.device.torch:
            return AttentionBackend.FLASH
        return AttentionBackend.SDPA if _version_numbers(self.device.cudnn) > (9, 15, 0) else AttentionBackend.FLASH2


def _version_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version, before a local label.

    >>> _version_numbers("9.19.0"), _version_numbers("")
    ((9, 19, 0), ())
    """
    return tuple(map(int, re.findall(r"\d+", text.split("+")[0])))


def _slowdown_ratio(isolated: TimeStatistics, overlapped: TimeStatistics) -> float:
    return max(0.0, overlapped.seconds / isolated.seconds - 1.0)


def kernel_slowdowns(samples: Iterable[InterferenceSample]) -> SlowdownTable:
    """Slowdown of kernels by overlapping collectives, for each measured pair, pooled over its samples."""
    return _slowdowns_by_pair(
        (sample, sample.overlapped_time, sample.kernel_slowdown) for sample in samples if sample.kernel.time is not None
    )


def comm_slowdowns(samples: Iterable[InterferenceSample]) -> SlowdownTable:
    """Slowdown of collectives by overlapping kernels, likewise."""
    return _slowdowns_by_pair(
        (sample, sample.overlapped_call_time, sample.comm_slowdown)
        for sample in samples
        if sample.overlapped_call_time is not None
    )


def _slowdowns_by_pair(measured: Iterable[tuple[InterferenceSample, TimeStatistics, float]]) -> SlowdownTable:
    pairs: dict[tuple[CollectiveType, KernelClass], list[tuple[Seconds, Seconds]]] = {}
    for sample, overlapped, slowdown in measured:
        if sample.overlapped_with in _COLLECTIVE_BY_LABEL:
            times = overlapped.seconds, overlapped.seconds / (1.0 + slowdown)
            pairs.setdefault(
                (_COLLECTIVE_BY_LABEL[sample.overlapped_with], kernel_class_of(sample.kernel.kind)), []
            ).append(times)
    return {
        pair: sum(seconds[0] for seconds in pair_times) / sum(seconds[1] for seconds in pair_times) - 1.0
        for pair, pair_times in pairs.items()
    }


def signature_of(kernel: Kernel) -> KernelSignature | None:
    """The signature by which a kernel is looked up; None for a kernel without a shape."""
    return None if kernel.shape is None else KernelSignature(kernel.kind, kernel.dtype, kernel.shape)


def family_of(signature: KernelSignature) -> str:
    """Kernel family, whose members predict each other: by kind (and routine), number format and direction.

    Such as `matmul bf16`, `attention_backward bf16`, `rmsnorm backward fused bf16`, `quantize fused bf16
    mxfp8`.
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
    """Samples of both records, the second's where both measured the same.

    Without fits and without predicted steps, which belong to the earlier samples.

    Raises InputError where the records are of different devices, origins or numbers of processes.
    """
    conditions = second.conditions
    _require_equal("origin", first.origin.value, second.origin.value)
    _require_equal("processes", first.conditions.processes, conditions.processes)
    if first.kernels and second.kernels:
        _require_equal("profile", first.profile is not None, second.profile is not None)
    kernels = {sample.signature: sample for sample in first.kernels}
    kernels |= {
        sample.signature: sample
        for sample in second.kernels
        if sample.time is not None or not _has_time(kernels, sample)
    }
    collectives = {sample.call: sample for sample in (*first.collectives, *second.collectives)}
    copies = {(sample.route, sample.bytes): sample for sample in (*first.copies, *second.copies)}
    interference = {
        (sample.kernel.signature, sample.overlapped_with, sample.call): sample
        for sample in (*first.interference, *second.interference)
    }
    imbalanced = {
        (sample.kernel.signature, sample.tokens_per_group): sample
        for sample in (*first.imbalanced_gemms, *second.imbalanced_gemms)
    }
    interval = first.launch_interval if second.launch_interval is None else second.launch_interval
    return replace(
        second,
        device=_merged_device(first.device, second.device),
        conditions=replace(conditions, before=first.conditions.before or conditions.before),
        kernels=tuple(kernels.values()),
        collectives=tuple(collectives.values()),
        copies=tuple(copies.values()),
        interference=tuple(interference.values()),
        imbalanced_gemms=tuple(imbalanced.values()),
        telemetry=first.telemetry + second.telemetry,
        in_situ=second.in_situ or first.in_situ,
        host_launches=tuple({sample.mode: sample for sample in (*first.host_launches, *second.host_launches)}.values()),
        gpus=second.gpus or first.gpus,
        holdout_steps=second.holdout_steps,
        profile=second.profile or first.profile,
        launch_interval=interval,
        derivation=second.derivation or first.derivation,
        kernel_fit=None,
        collective_fits=(),
    )


def _has_time(samples: Mapping[KernelSignature, KernelSample], sample: KernelSample) -> bool:
    """Whether the same kernel has a time among those samples."""
    other = samples.get(sample.signature)
    return other is not None and other.time is not None


def _merged_device(first: DeviceInfo, second: DeviceInfo) -> DeviceInfo:
    """The device that both describe; fields unknown to one are taken from the other."""
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
    """The variables of both; a launcher such as torchrun sets some, so that one may lack what the other has."""
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
