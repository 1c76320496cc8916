"""Can a record have been measured?

Times, sizes and rates are above zero, a median lies between its percentiles, what was measured has a time and nothing
else has, ranks lie on nodes evenly, and nothing is measured twice.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from typing import Final

from clustersim.common.errors import InputError, nearest, shown
from clustersim.cost.calibration_record import (
    COPY,
    BesideRow,
    Call,
    KernelFit,
    KernelRow,
    Outcome,
    Record,
    Spread,
    UnderLoad,
    UnevenRow,
)
from clustersim.model.kernels import MatmulShape, Shape
from clustersim.program.task import CollectiveType

_ROUNDING: Final = 1e-6  # of a sum of shares
_MAY_BE_ZERO: Final = frozenset({"table"})  # of the sizes of a shape


def require_measured(record: Record) -> None:
    """Raise InputError that names key and value of what cannot have been measured, or fitted to measurements."""
    for key, number in _positive(record):
        if number <= 0:
            raise InputError(f"{key}: {number!r} is not above zero")
    for key, number in _not_negative(record):
        if number < 0:
            raise InputError(f"{key}: {number!r} is below zero")
    for key, time in _times(record):
        if not time.p5 <= time.seconds <= time.p95:
            raise InputError(f"{key}: the median {time.seconds!r} is not between p5 {time.p5!r} and p95 {time.p95!r}")
    for key, row in _kernels(record):
        _require_time_if_measured(key, row)
    for key, call in _calls(record):
        _require_even(key, call)
    _require_collectives(record.beside)
    _require_groups(record.uneven)
    for key, what in _measured_things(record).items():
        _require_different(key, what)


def _require_time_if_measured(key: str, row: KernelRow) -> None:
    if (row.outcome is Outcome.MEASURED) != (row.time is not None):
        found = "has no time" if row.time is None else "has a time"
        raise InputError(f"{key}.outcome: {row.outcome.value} {found}; only what was measured has one")


def _require_even(key: str, call: Call) -> None:
    if call.ranks % call.nodes:
        raise InputError(f"{key}.nodes: {call.ranks} ranks cannot lie on {call.nodes} nodes, as many on each")
    if call.shares and (len(call.shares) != call.ranks or abs(sum(call.shares) - call.ranks) > _ROUNDING):
        raise InputError(f"{key}.shares: {shown(list(call.shares))} are no shares of {call.ranks} ranks, 1 on average")


def _require_groups(rows: Sequence[UnevenRow]) -> None:
    """Rows of each group that the product has."""
    for at, row in enumerate(rows):
        groups = row.kernel.shape.batch if isinstance(row.kernel.shape, MatmulShape) else 0
        if len(row.rows) != groups:
            raise InputError(f"uneven[{at}].rows: {len(row.rows)} groups, and the kernel has {groups}")


def _require_collectives(rows: Sequence[BesideRow]) -> None:
    """What is beside a kernel is a copy, or the collective that the row's call is of."""
    for at, row in enumerate(rows):
        _require_collective(f"beside[{at}]", row)


def _require_collective(key: str, row: BesideRow) -> None:
    known = [COPY, *(kind.value for kind in CollectiveType)]
    if row.beside not in known:
        raise InputError(f"{key}.beside: {shown(row.beside)} is unknown; {nearest(row.beside, known)}")
    if row.call is not None and row.call.collective.value != row.beside:
        raise InputError(f"{key}.beside: {row.beside} is not what its call is of, {row.call.collective.value}")
    if row.call_together is not None and row.call_alone is None:
        raise InputError(f"{key}.call_together: is there, but call_alone is not, which it is compared with")


def _require_different(key: str, measured: Sequence[Hashable]) -> None:
    twice = next((what for what, count in Counter(measured).items() if count > 1), None)
    if twice is not None:
        first, second = [at for at, what in enumerate(measured) if what == twice][:2]
        raise InputError(f"{key}[{second}] is the same measurement as {key}[{first}]; keep one of them")


def _measured_things(record: Record) -> dict[str, Sequence[Hashable]]:
    """What may stand in a record once, by the list that it stands in."""
    return {
        "kernels": [row.signature for row in record.kernels],
        "collectives": [row.call for row in record.collectives],
        "copies": [(copy.route, copy.bytes) for copy in record.copies],
        "uneven": [(uneven_row.kernel.signature, uneven_row.rows) for uneven_row in record.uneven],
        "beside": [(beside_row.kernel.signature, beside_row.beside, beside_row.call) for beside_row in record.beside],
        "collective_fits": [(fit.collective, fit.ranks, fit.nodes, fit.format) for fit in record.collective_fits],
        "chain": [row.family for row in record.chain],
        "host": [row.state for row in record.host],
        "gpus": [row.place for row in record.gpus],
        "steps": [row.what for row in record.steps],
    }


def _kernels(record: Record) -> Iterator[tuple[str, KernelRow]]:
    yield from ((f"kernels[{at}]", row) for at, row in enumerate(record.kernels))
    yield from ((f"beside[{at}].kernel", beside_row.kernel) for at, beside_row in enumerate(record.beside))
    yield from ((f"uneven[{at}].kernel", uneven_row.kernel) for at, uneven_row in enumerate(record.uneven))


def _calls(record: Record) -> Iterator[tuple[str, Call]]:
    yield from ((f"collectives[{at}].call", row.call) for at, row in enumerate(record.collectives))
    yield from (
        (f"beside[{at}].call", beside_row.call)
        for at, beside_row in enumerate(record.beside)
        if beside_row.call is not None
    )


def _times(record: Record) -> Iterator[tuple[str, Spread]]:
    for key, row in _kernels(record):
        if row.time is not None:
            yield f"{key}.time", row.time
    yield from ((f"collectives[{at}].time", row.time) for at, row in enumerate(record.collectives))
    yield from ((f"copies[{at}].time", copy.time) for at, copy in enumerate(record.copies))
    for at, beside_row in enumerate(record.beside):
        times = {
            "together": beside_row.together,
            "call_alone": beside_row.call_alone,
            "call_together": beside_row.call_together,
        }
        yield from ((f"beside[{at}].{name}", time) for name, time in times.items() if time is not None)
    yield from ((f"uneven[{at}].time", row.time) for at, row in enumerate(record.uneven))
    yield from ((f"gpus[{at}].time", row.time) for at, row in enumerate(record.gpus))


def _states(record: Record) -> Iterator[tuple[str, UnderLoad]]:
    """The device under load, wherever it was looked at."""
    yield from ((f"{key}.under", row.under) for key, row in _kernels(record) if row.under is not None)
    yield from ((f"gpus[{at}].under", row.under) for at, row in enumerate(record.gpus) if row.under is not None)
    yield from ((f"moments[{at}].state", moment.state) for at, moment in enumerate(record.moments))


def _positive(record: Record) -> Iterator[tuple[str, float]]:
    for key, time in _times(record):
        yield from _numbers(key, time, "seconds", "p5", "p95", "repetitions")
    for key, row in _kernels(record):
        yield f"{key}.launches", row.launches
        yield from _sizes(f"{key}.shape", row.shape)
    for key, call in _calls(record):
        yield from _numbers(key, call, "payload", "ranks", "nodes")
    for at, copy in enumerate(record.copies):
        yield f"copies[{at}].bytes", copy.bytes
    for at, fit in enumerate(record.collective_fits):
        yield from _numbers(f"collective_fits[{at}]", fit, "beta", "ranks", "nodes")
    for at, chain in enumerate(record.chain):
        yield from _numbers(f"chain[{at}]", chain, "kernels", "isolated", "in_chain")
    for at, step in enumerate(record.steps):
        yield from _numbers(f"steps[{at}]", step, "predicted", "measured")
    if record.kernel_fit is not None:
        yield from _rates(record.kernel_fit)
    yield "conditions.processes", record.conditions.processes


def _not_negative(record: Record) -> Iterator[tuple[str, float]]:
    for key, time in _times(record):
        yield f"{key}.dropped", time.dropped
    for key, row in _kernels(record):
        yield from _numbers(key, row, "flops", "bytes")
    for key, call in _calls(record):
        yield from ((f"{key}.shares[{place}]", share) for place, share in enumerate(call.shares))
    for at, uneven_row in enumerate(record.uneven):
        yield from ((f"uneven[{at}].rows[{place}]", rows) for place, rows in enumerate(uneven_row.rows))
    for at, fit in enumerate(record.collective_fits):
        yield f"collective_fits[{at}].alpha", fit.alpha
        yield from _numbers(f"collective_fits[{at}].residual", fit.residual, "error", "left_out")
    for at, host in enumerate(record.host):
        yield from _numbers(f"host[{at}]", host, "forward", "backward")
        yield from ((f"host[{at}].launches[{place}]", count) for place, count in enumerate(host.launches))
        yield from ((f"host[{at}].alone[{place}]", seconds) for place, seconds in enumerate(host.alone))
    yield from ((f"steps[{at}].of_rows", step.of_rows) for at, step in enumerate(record.steps))
    for key, state in _states(record):
        yield from _numbers(key, state, "sm_clock_mhz", "memory_clock_mhz", "power_w")
    yield from ((f"moments[{at}].seconds", moment.seconds) for at, moment in enumerate(record.moments))
    yield from _numbers("device", record.device, "memory_bytes", "compute_units", "threads", "power_limit_w")
    yield "launch_interval", record.launch_interval or 0.0
    if record.kernel_fit is not None:
        for name, residual in record.kernel_fit.residuals.items():
            yield from _numbers(f"kernel_fit.residuals.{name}", residual, "error", "left_out")


def _rates(fit: KernelFit) -> Iterator[tuple[str, float]]:
    yield from ((f"kernel_fit.peak.{dtype.value}", rate) for dtype, rate in fit.peak.items())
    yield from _numbers("kernel_fit", fit, "memory_bandwidth", "compute_units")
    yield "kernel_fit.efficiency.memory", fit.efficiency.memory
    yield from ((f"kernel_fit.factors.{name}", factor) for name, factor in fit.factors.items())


def _sizes(key: str, shape: Shape) -> Iterator[tuple[str, float]]:
    """The sizes of a shape that must be above zero."""
    sizes = (
        dataclass_field.name
        for dataclass_field in fields(shape)
        if dataclass_field.type is int and dataclass_field.name not in _MAY_BE_ZERO
    )
    return _numbers(key, shape, *sizes)


def _numbers(key: str, holder: object, *names: str) -> Iterator[tuple[str, float]]:
    return ((f"{key}.{name}", getattr(holder, name)) for name in names)
