"""How long do this machine's collectives take?

    torchrun --nproc-per-node 8 -m calibrate collectives -o h100.json
    torchrun --nproc-per-node 2 -m calibrate collectives --for plan.yaml -o cpu.json

Every collective over powers of two of bytes (reductions in each format), for all sizes of groups that the processes
divide into, within nodes and across them; or exactly the collectives that a scenario's ranks run; all-to-alls with
uneven parts, too, at the largest payload (of a scenario: at all); then kernels of
each class beside collectives of each kind, for by how much they slow each other. Rows are written as they come, so an
interrupted run goes on where it was when it is started again with the same record. How a call is timed:
`collectives.timing`; beside kernels: `collectives.contention_benchmark`.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

from calibrate.collectives.record_update import added
from calibrate.collectives.tables import beside_line, beside_table, fit_table, row_line, uneven_table
from calibrate.fit.alpha_beta import fit_calls
from calibrate.imbalanced_shares import VARIATIONS, shares
from calibrate.torch_requirement import require_torch
from clustersim.build import distinct_comm_calls, distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import Bytes, Dimension, Seconds, format_seconds, parse_quantity
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    InterferenceSample,
    MeasurementConditions,
    signature_of,
)
from clustersim.cost.record_file import write_record
from clustersim.hardware.accelerator import load_accelerator
from clustersim.program.task import CollectiveType
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from calibrate.collectives.interference import Pair
    from calibrate.collectives.process_groups import World
    from calibrate.collectives.sweep import Skipped
    from calibrate.devices.device import TorchDevice

MEASURED: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.BROADCAST,
    CollectiveType.SEND_RECV,
)
SUMMED: Final = (DType.FP32, DType.BF16, DType.FP16)
SMALLEST: Final = 2**10
PATIENCE: Final = 1.0  # seconds for one call, if the budget has as much


def measure_calls(
    calls: Sequence[CollectiveCall],
    device: "TorchDevice",
    *,
    budget: Seconds | None = None,
    patience: Seconds = PATIENCE,
    arrived: Callable[["CollectiveSample | Skipped"], None] | None = None,
) -> list[CollectiveSample]:
    """Measure calls inside an initialised torch.distributed; all ranks call it alike and get the same rows.

    budget: seconds for all of them, None for as long as it takes; patience: for each, at most; arrived: told of each
    row, or why there is none.
    """
    from calibrate.collectives.sweep import sweep

    rows: list[CollectiveSample] = []
    for result in sweep(calls, device, budget=budget, patience=patience):
        if arrived is not None:
            arrived(result)
        if isinstance(result, CollectiveSample):
            rows.append(result)
    return rows


def calls_for(
    world: "World", sizes: Sequence[Bytes], formats: Sequence[DType] = (DType.FP32,)
) -> tuple[CollectiveCall, ...]:
    """Every collective at every size, in all groups that the processes divide into; send_recv in pairs.

    formats: that reductions sum in; what only moves bytes is measured once.
    """
    pairs = tuple((2, nodes) for nodes in (1, 2) if world.groups(2, nodes))
    return tuple(
        CollectiveCall(collective, size, ranks, nodes, form)
        for ranks, nodes in sorted({*world.layouts(), *pairs})
        for collective in MEASURED
        if ((ranks, nodes) in (pairs if collective is CollectiveType.SEND_RECV else world.layouts()))
        for form in (formats if collective.is_reduction else (DType.FP32,))
        for size in sizes
        if size >= 4.0 * ranks  # a number for each rank
    )


def uneven(calls: Iterable[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """All-to-alls of these with uneven parts."""
    return tuple(
        replace(call, shares=shares(call.ranks, variation))
        for call in calls
        if call.collective is CollectiveType.ALL_TO_ALL
        for variation in VARIATIONS
    )


def in_formats(calls: Iterable[CollectiveCall], formats: Sequence[DType]) -> tuple[CollectiveCall, ...]:
    """Calls whose reductions sum in these formats."""
    asked = (
        replace(call, format=form)
        for call in calls
        for form in (formats if call.collective.is_reduction else (call.format,))
    )
    return tuple(dict.fromkeys(asked))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`; torchrun refuses a script's option that begins several of its own, such as --max."""
    parser.add_argument("-o", "--output", metavar="RECORD", help="record to write, or to go on with, in JSON")
    parser.add_argument("--for", dest="scenario", metavar="SCENARIO", help="measure exactly what its ranks run")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                        help="change a value of the scenario")  # fmt: skip
    parser.add_argument("--sizes", metavar="SIZES", help='payloads, such as "1 KiB,1 MiB" (default: powers of two)')
    parser.add_argument("--largest", default="1 GiB", metavar="SIZE", help="largest of the default payloads (1 GiB)")
    parser.add_argument("--dtype", metavar="FORMATS", help="formats that reductions sum in, such as fp32,bf16 "
                        "(default: the scenario's; else fp32, and on GPUs bf16)")  # fmt: skip
    parser.add_argument("--budget", default="5 min", metavar="TIME", help="time for all of it (5 min)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl on GPUs, gloo on CPUs (the best there is)")
    parser.add_argument("--accelerator", metavar="NAME", help="what clustersim calls this device")


def command(options: argparse.Namespace) -> None:
    """Measure, with as many processes as torchrun started; the first one writes and reports errors."""
    require_torch()
    from calibrate.collectives.process_groups import started

    world = started(command="collectives")
    try:
        _measure(options, world)
    except InputError:
        if world.rank:
            raise SystemExit(2) from None
        raise


def _measure(options: argparse.Namespace, world: "World") -> None:
    from calibrate.collectives.interference import beside
    from calibrate.collectives.process_groups import backend_of, first_decides, joined, local_device

    budget, sizes = _duration(options.budget), _sizes(options)
    formats = _formats(options.dtype)
    backend = backend_of(options.backend)
    device = local_device(backend, world)
    with joined(backend, device.torch):
        calls, record, pairs = first_decides(lambda: _plan(options, world, device, (sizes, formats)), device.torch)
        keeper = _Keeper(record, _path(options), len(calls) + len(pairs))
        measure_calls(calls, device, budget=budget, arrived=None if world.rank else keeper.keep)
        for found in beside(pairs, device):
            if not world.rank:
                keeper.keep(found)
        if world.rank == 0:
            keeper.finish(device.conditions())


def _path(options: argparse.Namespace) -> Path | None:
    return None if options.output is None else Path(options.output)


def _duration(text: str) -> Seconds:
    return _quantity("--budget", text, Dimension.TIME)


def _sizes(options: argparse.Namespace) -> tuple[Bytes, ...]:
    if options.sizes is not None:
        return tuple(sorted({_quantity("--sizes", text, Dimension.SIZE) for text in options.sizes.split(",")}))
    largest = _quantity("--largest", options.largest, Dimension.SIZE)
    if largest < SMALLEST:
        raise InputError(
            f"--largest: {options.largest!r} is below 1 KiB, the smallest payload; name others with --sizes"
        )
    return tuple(float(2**power) for power in range(10, 64) if 2**power <= largest)


def _formats(text: str | None) -> tuple[DType, ...] | None:
    """The formats that are asked for, each once; None: the usual ones."""
    if text is None:
        return None
    names = {form.value: form for form in SUMMED}
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in names:
            raise InputError(f"--dtype: reductions are not measured in {word!r}; {suggest_nearest(word, names)}")
    return tuple(dict.fromkeys(names[word] for word in words))


def _quantity(option: str, text: str, dimension: Dimension) -> float:
    try:
        value = parse_quantity(text, dimension)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    if value <= 0.0:
        raise InputError(f"{option}: {text!r} is not above zero")
    return value


def _plan(
    options: argparse.Namespace,
    world: "World",
    device: "TorchDevice",
    grid: tuple[Sequence[Bytes], Sequence[DType] | None],
) -> tuple[tuple[CollectiveCall, ...], CalibrationRecord, tuple["Pair", ...]]:
    """Calls that are still to be measured, the record that they go into, and kernels that are to be beside which."""
    from calibrate.collectives.interference import PAYLOADS, heaviest_kernels, largest_calls, usual_calls, usual_kernels

    record, (sizes, formats) = _record(options, world, device), grid
    if options.output is not None:
        write_record(record, Path(options.output))  # one that cannot be written is known now
    if options.scenario is None:
        usual = (DType.FP32,) if device.torch.type == "cpu" else (DType.FP32, DType.BF16)
        calls = calls_for(world, sizes, formats or usual)
        calls += uneven(call for call in calls if call.payload == max(sizes))
        some = usual_calls(world, min(PAYLOADS[device.torch.type], max(sizes)))
        kernels = usual_kernels(device)
    else:
        scenario = Scenario.load(options.scenario, options.overrides)
        calls = tuple(call for call in distinct_comm_calls(scenario) if call.ranks > 1)
        calls = (calls if formats is None else in_formats(calls, formats)) + uneven(calls)
        some, kernels = largest_calls(calls), heaviest_kernels(distinct_kernels(scenario))
    known = {row.call for row in record.collectives}
    beside = {(row.kernel.signature, row.call) for row in record.beside}
    pairs = tuple((kernel, call) for call in some for kernel in kernels if (signature_of(kernel), call) not in beside)
    return tuple(call for call in calls if call not in known), record, pairs


def _record(options: argparse.Namespace, world: "World", device: "TorchDevice") -> CalibrationRecord:
    from calibrate.collectives.process_groups import library, torchrun
    from calibrate.collectives.timing import METHOD
    from calibrate.devices.device import accelerator_of

    accelerator = load_accelerator(accelerator_of(device, options.accelerator))
    found = replace(device.describe(accelerator.name), collectives=library(device.torch))
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command=shlex.join([*torchrun(world), "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD,
        before=device.conditions(),
    )
    return added(CalibrationRecord(found, conditions), _path(options))


@dataclass(slots=True)
class _Keeper:
    """Writes rows as they come, and shows them; calls: how many are to come, by themselves and beside kernels."""

    record: CalibrationRecord
    output: Path | None
    calls: int
    began: Seconds = field(default_factory=perf_counter)
    done: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def keep(self, result: "CollectiveSample | InterferenceSample | Skipped") -> None:
        """One more call is done, by itself or beside a kernel, or passed over."""
        self.done += 1
        match result:
            case CollectiveSample():
                self._say(replace(self.record, collectives=(*self.record.collectives, result)), row_line(result))
            case InterferenceSample():
                self._say(replace(self.record, beside=(*self.record.beside, result)), beside_line(result))
            case _:
                self.reasons[result.why] += 1

    def _say(self, record: CalibrationRecord, line: str) -> None:
        self.record = record
        self._write()
        print(f"[{self.done}/{self.calls}, {self._left()}] {line}", file=sys.stderr, flush=True)

    def finish(self, after: Mapping[str, float]) -> None:
        """Fit, write, and say what was found and what was not measured."""
        conditions = replace(self.record.conditions, after=after)
        fits = fit_calls(self.record.collectives)
        self.record = replace(self.record, conditions=conditions, collective_fits=fits)
        self._write()
        print(fit_table(fits))
        print(beside_table(self.record.beside))
        print(uneven_table(self.record.collectives))
        for why, count in self.reasons.items():
            print(f"{count} not measured: {why}")
        if self.output is None:
            print("nothing was written; name a record with -o RECORD")
        else:
            print(f"wrote {self.output}; use: cost: {{record: {self.output}}}")

    def _write(self) -> None:
        if self.output is not None:
            write_record(self.record, self.output)

    def _left(self) -> str:
        left = (perf_counter() - self.began) / self.done * (self.calls - self.done)
        return f"{format_seconds(round(left))} left"
