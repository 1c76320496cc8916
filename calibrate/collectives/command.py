"""How long do this machine's collectives take?

    torchrun --nproc-per-node 8 -m calibrate collectives -o h100.json
    torchrun --nproc-per-node 2 -m calibrate collectives --for plan.yaml -o cpu.json

Every collective at power-of-two payloads (reductions in each format), for all group sizes that the processes
divide into, within nodes and across them; or exactly the collectives that a scenario's ranks run. Also
all-to-alls with imbalanced shards, at the largest payload (of a scenario: at every payload); then kernels of
each class overlapped with collectives of each kind, for their mutual slowdowns. Samples are written as they
are measured, so an interrupted run continues when it is started again with the same record. How a call is
timed: `collectives.timing`; overlapped with kernels: `collectives.contention_benchmark`.
"""

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

from calibrate.collectives.record_update import add_to_record
from calibrate.collectives.scenario_calls import distinct_comm_calls
from calibrate.collectives.tables import (
    fit_table,
    format_collective_sample,
    format_interference_sample,
    imbalance_table,
    interference_table,
)
from calibrate.fit.alpha_beta import fit_collectives
from calibrate.imbalanced_shares import VARIATIONS, lognormal_shares
from calibrate.torch_requirement import require_torch
from clustersim.build import distinct_kernels
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
    from calibrate.collectives.interference import KernelCallPair
    from calibrate.collectives.process_groups import World
    from calibrate.collectives.sweep import SkippedCall
    from calibrate.devices.device import TorchDevice

MEASURED_COLLECTIVES: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.BROADCAST,
    CollectiveType.SEND_RECV,
)
REDUCTION_DTYPES: Final = (DType.FP32, DType.BF16, DType.FP16)
MIN_PAYLOAD_BYTES: Final = 2**10
MAX_SECONDS_PER_CALL: Final = 1.0  # seconds for one call, budget permitting


def measure_calls(
    calls: Sequence[CollectiveCall],
    device: "TorchDevice",
    *,
    budget: Seconds | None = None,
    max_seconds_per_call: Seconds = MAX_SECONDS_PER_CALL,
    on_result: Callable[["CollectiveSample | SkippedCall"], None] | None = None,
) -> list[CollectiveSample]:
    """Measure calls within an initialized torch.distributed. All ranks pass the same calls and get the same samples.

    budget: seconds for all of them, None for unlimited; max_seconds_per_call: for each; on_result: called with
    each sample, or with the reason why a call was skipped.
    """
    from calibrate.collectives.sweep import sweep_collectives

    samples: list[CollectiveSample] = []
    for result in sweep_collectives(calls, device, budget=budget, max_seconds_per_call=max_seconds_per_call):
        if on_result is not None:
            on_result(result)
        if isinstance(result, CollectiveSample):
            samples.append(result)
    return samples


def grid_calls(
    world: "World", sizes: Sequence[Bytes], dtypes: Sequence[DType] = (DType.FP32,)
) -> tuple[CollectiveCall, ...]:
    """Every collective at every size, in all groups that the processes divide into; send_recv in pairs.

    dtypes: that reductions sum in; collectives that only move bytes are measured in one.
    """
    pairs = tuple((2, nodes) for nodes in (1, 2) if world.disjoint_groups(2, nodes))
    return tuple(
        CollectiveCall(collective, size, ranks, nodes, dtype)
        for ranks, nodes in sorted({*world.group_shapes(), *pairs})
        for collective in MEASURED_COLLECTIVES
        if ((ranks, nodes) in (pairs if collective is CollectiveType.SEND_RECV else world.group_shapes()))
        for dtype in (dtypes if collective.is_reduction else (DType.FP32,))
        for size in sizes
        if size >= 4.0 * ranks  # at least one element per rank
    )


def imbalanced_calls(calls: Iterable[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """The all-to-alls among these calls with imbalanced shards."""
    return tuple(
        replace(call, shares=lognormal_shares(call.ranks, variation))
        for call in calls
        if call.collective is CollectiveType.ALL_TO_ALL
        for variation in VARIATIONS
    )


def with_dtypes(calls: Iterable[CollectiveCall], dtypes: Sequence[DType]) -> tuple[CollectiveCall, ...]:
    """The calls, with reductions in each of these dtypes."""
    expanded = (
        replace(call, dtype=dtype)
        for call in calls
        for dtype in (dtypes if call.collective.is_reduction else (call.dtype,))
    )
    return tuple(dict.fromkeys(expanded))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`.

    Torchrun rejects a script's option that abbreviates several of its own, such as --max.
    """
    parser.add_argument("-o", "--output", metavar="RECORD", help="record to write (JSON); an existing one is continued")
    parser.add_argument("--for", dest="scenario", metavar="SCENARIO", help="measure the collectives of this scenario")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                        help="override a key of the scenario")  # fmt: skip
    parser.add_argument("--sizes", metavar="SIZES", help='payloads, e.g. "1 KiB,1 MiB" (default: powers of two)')
    parser.add_argument(
        "--largest", default="1 GiB", metavar="SIZE", help="largest of the default payloads (default: 1 GiB)"
    )
    parser.add_argument("--dtype", metavar="FORMATS", help="number formats of reductions, e.g. fp32,bf16 "
                        "(default: the scenario's; without one fp32, on GPUs also bf16)")  # fmt: skip
    parser.add_argument("--budget", default="5 min", metavar="TIME", help="total measurement time (default: 5 min)")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="nccl for GPUs, gloo for CPUs (default: nccl if available)"
    )
    parser.add_argument("--accelerator", metavar="NAME", help="name of this device's accelerator")


def command(options: argparse.Namespace) -> None:
    """Measure with the processes that torchrun started; rank 0 writes the record and reports errors."""
    require_torch()
    from calibrate.collectives.process_groups import world_from_torchrun

    world = world_from_torchrun(command="collectives")
    try:
        _measure(options, world)
    except InputError:
        if world.rank:
            raise SystemExit(2) from None
        raise


def _measure(options: argparse.Namespace, world: "World") -> None:
    from calibrate.collectives.interference import measure_interference
    from calibrate.collectives.process_groups import (
        decide_on_rank0,
        local_device,
        process_group_session,
        select_backend,
    )

    budget, sizes = _parse_duration(options.budget), _parse_sizes(options)
    dtypes = _parse_dtypes(options.dtype)
    backend = select_backend(options.backend)
    device = local_device(backend, world)
    with process_group_session(backend, device.torch):
        calls, record, pairs = decide_on_rank0(
            lambda: _plan_measurements(options, world, device, (sizes, dtypes)), device.torch
        )
        writer = _RecordWriter(record, _output_path(options), len(calls) + len(pairs))
        measure_calls(calls, device, budget=budget, on_result=None if world.rank else writer.add_result)
        for result in measure_interference(pairs, device):
            if not world.rank:
                writer.add_result(result)
        if world.rank == 0:
            writer.finish(device.conditions())


def _output_path(options: argparse.Namespace) -> Path | None:
    return None if options.output is None else Path(options.output)


def _parse_duration(text: str) -> Seconds:
    return _parse_positive("--budget", text, Dimension.TIME)


def _parse_sizes(options: argparse.Namespace) -> tuple[Bytes, ...]:
    if options.sizes is not None:
        return tuple(sorted({_parse_positive("--sizes", text, Dimension.SIZE) for text in options.sizes.split(",")}))
    largest = _parse_positive("--largest", options.largest, Dimension.SIZE)
    if largest < MIN_PAYLOAD_BYTES:
        raise InputError(
            f"--largest: {options.largest!r} is below 1 KiB, the smallest payload; name others with --sizes"
        )
    return tuple(float(2**power) for power in range(10, 64) if 2**power <= largest)


def _parse_dtypes(text: str | None) -> tuple[DType, ...] | None:
    """The requested dtypes without repetition; None: the defaults."""
    if text is None:
        return None
    dtype_by_name = {dtype.value: dtype for dtype in REDUCTION_DTYPES}
    labels = [label.strip().lower() for label in text.split(",")]
    for label in labels:
        if label not in dtype_by_name:
            raise InputError(
                f"--dtype: reductions are not measured in {label!r}; {suggest_nearest(label, dtype_by_name)}"
            )
    return tuple(dict.fromkeys(dtype_by_name[label] for label in labels))


def _parse_positive(option: str, text: str, dimension: Dimension) -> float:
    try:
        value = parse_quantity(text, dimension)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    if value <= 0.0:
        raise InputError(f"{option}: {text!r} is not above zero")
    return value


def _plan_measurements(
    options: argparse.Namespace,
    world: "World",
    device: "TorchDevice",
    grid: tuple[Sequence[Bytes], Sequence[DType] | None],
) -> tuple[tuple[CollectiveCall, ...], CalibrationRecord, tuple["KernelCallPair", ...]]:
    """Calls still to be measured, the record that they are added to, and the kernel-call pairs to be overlapped."""
    from calibrate.collectives.interference import (
        DEFAULT_PAYLOADS,
        default_calls,
        default_kernels,
        heaviest_kernels,
        largest_calls,
    )

    record, (sizes, dtypes) = _initial_record(options, world, device), grid
    if options.output is not None:
        write_record(record, Path(options.output))  # fail now if the record cannot be written
    if options.scenario is None:
        default_dtypes = (DType.FP32,) if device.torch.type == "cpu" else (DType.FP32, DType.BF16)
        calls = grid_calls(world, sizes, dtypes or default_dtypes)
        calls += imbalanced_calls(call for call in calls if call.payload == max(sizes))
        interference_calls = default_calls(world, min(DEFAULT_PAYLOADS[device.torch.type], max(sizes)))
        kernels = default_kernels(device)
    else:
        scenario = Scenario.load(options.scenario, options.overrides)
        calls = tuple(call for call in distinct_comm_calls(scenario) if call.ranks > 1)
        calls = (calls if dtypes is None else with_dtypes(calls, dtypes)) + imbalanced_calls(calls)
        interference_calls, kernels = largest_calls(calls), heaviest_kernels(distinct_kernels(scenario))
    measured_calls = {sample.call for sample in record.collectives}
    measured_pairs = {(sample.kernel.signature, sample.call) for sample in record.interference}
    pairs = tuple(
        (kernel, call)
        for call in interference_calls
        for kernel in kernels
        if (signature_of(kernel), call) not in measured_pairs
    )
    return tuple(call for call in calls if call not in measured_calls), record, pairs


def _initial_record(options: argparse.Namespace, world: "World", device: "TorchDevice") -> CalibrationRecord:
    from calibrate.collectives.process_groups import collective_library, torchrun_command
    from calibrate.collectives.timing import METHOD
    from calibrate.devices.device import accelerator_name

    accelerator = load_accelerator(accelerator_name(device, options.accelerator))
    device_info = replace(device.describe(accelerator.name), collectives=collective_library(device.torch))
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command=shlex.join([*torchrun_command(world, os.environ), "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD,
        before=device.conditions(),
    )
    return add_to_record(CalibrationRecord(device_info, conditions), _output_path(options))


@dataclass(slots=True)
class _RecordWriter:
    """Writes and prints results as they are measured.

    total_count: number of expected results, calls and overlapped pairs.
    """

    record: CalibrationRecord
    output: Path | None
    total_count: int
    start_time: Seconds = field(default_factory=perf_counter)
    done_count: int = 0
    skip_reasons: Counter[str] = field(default_factory=Counter)

    def add_result(self, result: "CollectiveSample | InterferenceSample | SkippedCall") -> None:
        """Add one result: a call, an overlapped pair, or a skipped call."""
        self.done_count += 1
        match result:
            case CollectiveSample():
                self._save_and_print(
                    replace(self.record, collectives=(*self.record.collectives, result)),
                    format_collective_sample(result),
                )
            case InterferenceSample():
                self._save_and_print(
                    replace(self.record, interference=(*self.record.interference, result)),
                    format_interference_sample(result),
                )
            case _:
                self.skip_reasons[result.reason] += 1

    def _save_and_print(self, record: CalibrationRecord, line: str) -> None:
        self.record = record
        self._write()
        print(f"[{self.done_count}/{self.total_count}, {self._remaining_text()}] {line}", file=sys.stderr, flush=True)

    def finish(self, after: Mapping[str, float]) -> None:
        """Fit and write the record, and print fits and skip reasons."""
        conditions = replace(self.record.conditions, after=after)
        fits = fit_collectives(self.record.collectives)
        self.record = replace(self.record, conditions=conditions, collective_fits=fits)
        self._write()
        print(fit_table(fits))
        print(interference_table(self.record.interference))
        print(imbalance_table(self.record.collectives))
        for reason, count in self.skip_reasons.items():
            print(f"{count} not measured: {reason}")
        if self.output is None:
            print("nothing was written; name a record with -o RECORD")
        else:
            print(f"wrote {self.output}; use: cost: {{record: {self.output}}}")

    def _write(self) -> None:
        if self.output is not None:
            write_record(self.record, self.output)

    def _remaining_text(self) -> str:
        remaining_seconds = (perf_counter() - self.start_time) / self.done_count * (self.total_count - self.done_count)
        return f"{format_seconds(round(remaining_seconds))} left"
