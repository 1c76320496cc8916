"""Can this record have been measured?

Times, sizes and rates are positive, a median lies between its percentiles, measured samples and only those
have a time, ranks are spread evenly over nodes, and nothing is measured twice.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from typing import Final

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.cost.calibration_record import (
    COPY,
    CalibrationRecord,
    CollectiveCall,
    DeviceTelemetry,
    ImbalancedGemmSample,
    InterferenceSample,
    KernelFit,
    KernelSample,
    ProfileAnchor,
    TimeStatistics,
)
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model.kernels import KernelShape, MatmulShape
from clustersim.program.task import CollectiveType

_ROUNDING: Final = 1e-6  # tolerance on a sum of shares
_MAY_BE_ZERO: Final = frozenset({"table"})  # sizes of a shape


def validate_record(record: CalibrationRecord) -> None:
    """Raise InputError that names key and value of anything that cannot have been measured or fitted."""
    for key, value in _positive_values(record):
        if value <= 0:
            raise InputError(f"{key}: {value!r} is not above zero")
    for key, value in _nonnegative_values(record):
        if value < 0:
            raise InputError(f"{key}: {value!r} is below zero")
    for key, time in _time_statistics(record):
        if not time.p5 <= time.seconds <= time.p95:
            raise InputError(f"{key}: the median {time.seconds!r} is not between p5 {time.p5!r} and p95 {time.p95!r}")
    for key, sample in _kernel_samples(record):
        _require_time_if_measured(key, sample)
    for key, call in _collective_calls(record):
        _validate_call(key, call)
    _validate_interference(record.interference)
    _validate_group_counts(record.imbalanced_gemms)
    for key, identities in _identities(record).items():
        _require_unique(key, identities)


def _require_time_if_measured(key: str, sample: KernelSample) -> None:
    if (sample.outcome is MeasurementOutcome.MEASURED) != (sample.time is not None):
        problem = "has no time" if sample.time is None else "has a time"
        raise InputError(f"{key}.outcome: {sample.outcome.value} {problem}; only what was measured has one")


def _validate_call(key: str, call: CollectiveCall) -> None:
    if call.ranks % call.nodes:
        raise InputError(f"{key}.nodes: {call.ranks} ranks cannot lie on {call.nodes} nodes, as many on each")
    if call.shares and (len(call.shares) != call.ranks or abs(sum(call.shares) - call.ranks) > _ROUNDING):
        raise InputError(
            f"{key}.shares: {format_value(list(call.shares))} are no shares of {call.ranks} ranks, 1 on average"
        )


def _validate_group_counts(samples: Sequence[ImbalancedGemmSample]) -> None:
    """Imbalanced samples give tokens for each group of the kernel."""
    for index, sample in enumerate(samples):
        groups = sample.kernel.shape.batch if isinstance(sample.kernel.shape, MatmulShape) else 0
        if len(sample.tokens_per_group) != groups:
            raise InputError(
                f"imbalanced_gemms[{index}].tokens_per_group: {len(sample.tokens_per_group)} groups, and the kernel "
                f"has {groups}"
            )


def _validate_interference(samples: Sequence[InterferenceSample]) -> None:
    """A kernel overlaps a copy, or a collective of the same type as the sample's call."""
    for index, sample in enumerate(samples):
        _validate_interference_sample(f"interference[{index}]", sample)


def _validate_interference_sample(key: str, sample: InterferenceSample) -> None:
    labels = [COPY, *(kind.value for kind in CollectiveType)]
    if sample.overlapped_with not in labels:
        raise InputError(
            f"{key}.overlapped_with: {format_value(sample.overlapped_with)} is unknown; "
            f"{suggest_nearest(sample.overlapped_with, labels)}"
        )
    if sample.call is not None and sample.call.collective.value != sample.overlapped_with:
        raise InputError(
            f"{key}.overlapped_with: {sample.overlapped_with} is not what its call is, {sample.call.collective.value}"
        )
    if sample.overlapped_call_time is not None and sample.isolated_call_time is None:
        raise InputError(f"{key}.call_together: is there, but call_alone is not, which it is compared with")


def _require_unique(key: str, identities: Sequence[Hashable]) -> None:
    duplicate = next((identity for identity, count in Counter(identities).items() if count > 1), None)
    if duplicate is not None:
        first, second = [index for index, identity in enumerate(identities) if identity == duplicate][:2]
        raise InputError(f"{key}[{second}] is the same measurement as {key}[{first}]; keep one of them")


def _identities(record: CalibrationRecord) -> dict[str, Sequence[Hashable]]:
    """Identities that must be unique in a record, by list."""
    return {
        "kernels": [sample.signature for sample in record.kernels],
        "collectives": [sample.call for sample in record.collectives],
        "copies": [(copy.route, copy.bytes) for copy in record.copies],
        "imbalanced_gemms": [(sample.kernel.signature, sample.tokens_per_group) for sample in record.imbalanced_gemms],
        "interference": [(entry.kernel.signature, entry.overlapped_with, entry.call) for entry in record.interference],
        "collective_fits": [(fit.collective, fit.ranks, fit.nodes, fit.dtype) for fit in record.collective_fits],
        "in_situ": [sample.family for sample in record.in_situ],
        "host_launches": [sample.mode for sample in record.host_launches],
        "gpus": [sample.device for sample in record.gpus],
        "holdout_steps": [sample.description for sample in record.holdout_steps],
    }


def _kernel_samples(record: CalibrationRecord) -> Iterator[tuple[str, KernelSample]]:
    yield from ((f"kernels[{index}]", sample) for index, sample in enumerate(record.kernels))
    yield from ((f"interference[{index}].kernel", sample.kernel) for index, sample in enumerate(record.interference))
    yield from (
        (f"imbalanced_gemms[{index}].kernel", entry.kernel) for index, entry in enumerate(record.imbalanced_gemms)
    )


def _collective_calls(record: CalibrationRecord) -> Iterator[tuple[str, CollectiveCall]]:
    yield from ((f"collectives[{index}].call", sample.call) for index, sample in enumerate(record.collectives))
    yield from (
        (f"interference[{index}].call", sample.call)
        for index, sample in enumerate(record.interference)
        if sample.call is not None
    )


def _time_statistics(record: CalibrationRecord) -> Iterator[tuple[str, TimeStatistics]]:
    for key, sample in _kernel_samples(record):
        if sample.time is not None:
            yield f"{key}.time", sample.time
    yield from ((f"collectives[{index}].time", sample.time) for index, sample in enumerate(record.collectives))
    yield from ((f"copies[{index}].time", copy.time) for index, copy in enumerate(record.copies))
    for index, interference in enumerate(record.interference):
        times = {
            "overlapped_time": interference.overlapped_time,
            "isolated_call_time": interference.isolated_call_time,
            "overlapped_call_time": interference.overlapped_call_time,
        }
        yield from ((f"interference[{index}].{name}", time) for name, time in times.items() if time is not None)
    yield from (
        (f"imbalanced_gemms[{index}].time", sample.time) for index, sample in enumerate(record.imbalanced_gemms)
    )
    yield from ((f"gpus[{index}].time", sample.time) for index, sample in enumerate(record.gpus))


def _telemetry(record: CalibrationRecord) -> Iterator[tuple[str, DeviceTelemetry]]:
    """All telemetry under load."""
    yield from (
        (f"{key}.telemetry", sample.telemetry)
        for key, sample in _kernel_samples(record)
        if sample.telemetry is not None
    )
    yield from (
        (f"gpus[{index}].telemetry", sample.telemetry)
        for index, sample in enumerate(record.gpus)
        if sample.telemetry is not None
    )
    yield from ((f"telemetry[{index}].state", telemetry.state) for index, telemetry in enumerate(record.telemetry))


def _positive_values(record: CalibrationRecord) -> Iterator[tuple[str, float]]:
    for key, time in _time_statistics(record):
        yield from _named_values(key, time, "seconds", "p5", "p95", "repetitions")
    for key, sample in _kernel_samples(record):
        yield f"{key}.launches", sample.launches
        yield from _shape_sizes(f"{key}.shape", sample.shape)
    for key, call in _collective_calls(record):
        yield from _named_values(key, call, "payload", "ranks", "nodes")
    for index, copy in enumerate(record.copies):
        yield f"copies[{index}].bytes", copy.bytes
    for index, fit in enumerate(record.collective_fits):
        yield from _named_values(f"collective_fits[{index}]", fit, "beta", "ranks", "nodes")
    for index, chain in enumerate(record.in_situ):
        yield from _named_values(f"in_situ[{index}]", chain, "kernels", "isolated", "in_situ")
    for index, step in enumerate(record.holdout_steps):
        yield from _named_values(f"holdout_steps[{index}]", step, "predicted", "measured")
    if record.kernel_fit is not None:
        yield from _fit_rates(record.kernel_fit)
    yield from _positive_profile_values(record.profile)
    yield "conditions.processes", record.conditions.processes


def _positive_profile_values(profile: ProfileAnchor | None) -> Iterator[tuple[str, float]]:
    if profile is not None:
        yield from _named_values("profile", profile, "ranks", "steps", "step_time", "busy", "kernel_scale")
        if profile.memory is not None:
            sizes = "allocated", "reserved", "modelled", "layers", "tokens"
            yield from _named_values("profile.memory", profile.memory, *sizes)


def _nonnegative_profile_values(profile: ProfileAnchor | None) -> Iterator[tuple[str, float]]:
    if profile is not None:
        yield from _named_values("profile", profile, "matched", "host_scale")
        for index, call in enumerate(profile.unmatched):
            yield from _named_values(f"profile.unmatched[{index}]", call, "count", "seconds")


def _nonnegative_values(record: CalibrationRecord) -> Iterator[tuple[str, float]]:
    for key, time in _time_statistics(record):
        yield f"{key}.dropped", time.dropped
    for key, sample in _kernel_samples(record):
        yield from _named_values(key, sample, "flops", "bytes")
    for key, call in _collective_calls(record):
        yield from ((f"{key}.shares[{position}]", share) for position, share in enumerate(call.shares))
    for index, imbalanced in enumerate(record.imbalanced_gemms):
        yield from (
            (f"imbalanced_gemms[{index}].tokens_per_group[{position}]", samples)
            for position, samples in enumerate(imbalanced.tokens_per_group)
        )
    for index, fit in enumerate(record.collective_fits):
        yield f"collective_fits[{index}].alpha", fit.alpha
        yield from _named_values(f"collective_fits[{index}].residual", fit.residual, "error", "leave_one_out_error")
    for index, host in enumerate(record.host_launches):
        yield from _named_values(f"host_launches[{index}]", host, "forward", "backward")
        yield from (
            (f"host_launches[{index}].launches[{position}]", count) for position, count in enumerate(host.launches)
        )
        yield from (
            (f"host_launches[{index}].in_kernel_times[{position}]", seconds)
            for position, seconds in enumerate(host.in_kernel_times)
        )
    yield from (
        (f"holdout_steps[{index}].propagated_error", step.propagated_error)
        for index, step in enumerate(record.holdout_steps)
    )
    yield from _nonnegative_profile_values(record.profile)
    for key, state in _telemetry(record):
        yield from _named_values(key, state, "sm_clock_mhz", "memory_clock_mhz", "power_w")
    yield from ((f"telemetry[{index}].seconds", sample.seconds) for index, sample in enumerate(record.telemetry))
    yield from _named_values("device", record.device, "memory_bytes", "compute_units", "threads", "power_limit_w")
    yield "launch_interval", record.launch_interval or 0.0
    if record.kernel_fit is not None:
        for name, residual in record.kernel_fit.residuals.items():
            yield from _named_values(f"kernel_fit.residuals.{name}", residual, "error", "leave_one_out_error")


def _fit_rates(fit: KernelFit) -> Iterator[tuple[str, float]]:
    yield from ((f"kernel_fit.peak.{dtype.value}", rate) for dtype, rate in fit.peak.items())
    yield from _named_values("kernel_fit", fit, "memory_bandwidth", "compute_units")
    yield "kernel_fit.efficiency.memory", fit.efficiency.memory_bandwidth_fraction
    ratios = "operator_bandwidth_ratio", "quantization_bandwidth_ratio"
    yield from _named_values("kernel_fit.efficiency", fit.efficiency, *ratios)
    yield from ((f"kernel_fit.factors.{name}", factor) for name, factor in fit.factors.items())


def _shape_sizes(key: str, shape: KernelShape) -> Iterator[tuple[str, float]]:
    """The sizes of a shape that must be above zero."""
    sizes = (field.name for field in fields(shape) if field.type is int and field.name not in _MAY_BE_ZERO)
    return _named_values(key, shape, *sizes)


def _named_values(key: str, owner: object, *names: str) -> Iterator[tuple[str, float]]:
    return ((f"{key}.{name}", getattr(owner, name)) for name in names)
