"""Which kernels and collectives of a scenario have no measurement behind them, and what is their share of the step?

The share is of the busy time: the time that all ranks compute or communicate. Kernels of one measurement
(equal kind, format and shape) are one entry.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.cli.outputs import STDOUT, Outputs, write_json
from clustersim.common.units import format_bytes
from clustersim.cost.timing import Provenance
from clustersim.model.kernels import format_kernel_shape
from clustersim.program.task import CollectiveType, CommOp, CommOverlap
from clustersim.report.labels import PROVENANCE_LABELS
from clustersim.results.provenance import BusyTimeItem
from clustersim.scenario import Scenario

COVERED_PROVENANCES: Final = (Provenance.MEASURED, Provenance.INTERPOLATED)
_COLLECTIVES: Final = frozenset(kind.value for kind in CollectiveType)
_MAX_LINES: Final = 25  # lines that are printed; one more line sums up the remaining ones


@dataclass(frozen=True, slots=True)
class CoverageEntry:
    """Coverage of one measurement.

    busy_share: fraction of the busy time; error, in_situ_slowdown: as in `cost.timing.KernelTiming`.
    """

    kind: str
    description: str
    names: tuple[str, ...]
    provenance: Provenance
    error: float | None
    in_situ_slowdown: float
    busy_share: float

    def to_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        return {
            "kind": self.kind,
            "description": self.description,
            "names": list(self.names),
            "provenance": self.provenance.value,
            "covered": self.provenance in COVERED_PROVENANCES,
            "error": self.error,
            "in_situ_slowdown": self.in_situ_slowdown,
            "share": self.busy_share,
        }


def show_coverage(file: Path, overrides: Sequence[str], json: str | None, *, include_measured: bool) -> None:
    """Simulate the scenario, and print (or write) the provenance of its durations."""
    scenario = Scenario.load(file, overrides)
    Outputs(json=json).check_writable((file, *scenario.files))
    from clustersim.simulation import simulate

    result = simulate(scenario)
    shares, entries, steps = (
        result.provenance_shares,
        coverage_entries(result.busy_time_items),
        result.holdout_validation,
    )
    if json is not None:
        content = {"provenance_share": dict(shares), "entries": [entry.to_json() for entry in entries]}
        write_json({**content, "holdout_validation": None if steps is None else steps.to_json()}, json)
    if json != STDOUT:
        shown = [entry for entry in entries if include_measured or entry.provenance not in COVERED_PROVENANCES]
        _print_coverage(scenario, shares, shown, include_measured=include_measured)
        if steps is not None:
            print(f"the record {steps.description}")
        for hint in _measurement_hints(scenario, overrides, shown):
            print(hint)


def coverage_entries(items: Sequence[BusyTimeItem]) -> list[CoverageEntry]:
    """One entry per measurement, largest share first."""
    total_seconds = sum(item.seconds for item in items) or 1.0
    by_key: dict[tuple[str, str, Provenance, float | None, float], tuple[float, dict[str, None]]] = {}
    for item in items:
        if item.seconds <= 0.0:  # a collective of one rank
            continue
        kind, description, name = _describe_item(item)
        key = kind, description, item.provenance, item.error, item.in_situ_slowdown
        share, names = by_key.get(key, (0.0, {}))
        by_key[key] = share + item.seconds / total_seconds, names | {name: None}
    entries = [
        CoverageEntry(kind, description, tuple(names), provenance, error, slowdown, share)
        for (kind, description, provenance, error, slowdown), (share, names) in by_key.items()
    ]
    return sorted(entries, key=lambda entry: -entry.busy_share)


def _describe_item(item: BusyTimeItem) -> tuple[str, str, str]:
    """Kind, description and name of an item."""
    match item.body:
        case CommOp() as comm_op:
            return comm_op.collective.value, f"{comm_op.comm_group}, {format_bytes(comm_op.payload)}", comm_op.name
        case CommOverlap(comm_op=comm_op, kernel=kernel):
            description = (
                f"{kernel.dtype.value} {format_kernel_shape(kernel.shape)} overlapped with {comm_op.collective.value}"
            )
            return kernel.kind.value, description, kernel.name
        case kernel:
            return kernel.kind.value, f"{kernel.dtype.value} {format_kernel_shape(kernel.shape)}", kernel.name


def _print_coverage(
    scenario: Scenario, shares: Mapping[str, float], shown: Sequence[CoverageEntry], *, include_measured: bool
) -> None:
    record = scenario.cost.record
    record_label = "no record" if record is None else f"record of {record.device.name or record.device.accelerator}"
    print(f"{scenario.name}: {record_label}; busy time by the source of its durations:")
    for source in Provenance:
        if shares[source.value] > 0:
            print(f"  {shares[source.value]:7.1%}  {PROVENANCE_LABELS[source]}")
    if not shown:
        print("all busy time is measured or interpolated between measured shapes")
        return
    line_count = len(shown) if include_measured else _MAX_LINES
    for entry in shown[:line_count]:
        print(_format_entry(entry))
    if len(shown) > line_count:
        remaining_share = sum(entry.busy_share for entry in shown[line_count:])
        print(f"and {len(shown) - line_count} more, {remaining_share:.2%} in all (--all lists them)")


def _measurement_hints(scenario: Scenario, overrides: Sequence[str], shown: Sequence[CoverageEntry]) -> Iterator[str]:
    """Commands that would measure what is missing. Overrides are passed on, except those of cost.record."""
    changes = [shlex.join(["--set", override]) for override in overrides if not override.startswith("cost.record")]
    name, gpu = " ".join([str(scenario.path or "SCENARIO.yaml"), *changes]), scenario.cluster.accelerator.name
    missing_collectives = {entry.kind in _COLLECTIVES for entry in shown if entry.provenance not in COVERED_PROVENANCES}
    if False in missing_collectives:
        yield f"measure kernels on one {gpu}: clustersim calibrate --for {name} -o RECORD.json"
    if True in missing_collectives:
        measure = f"torchrun --nproc-per-node N -m calibrate collectives --for {name} -o RECORD.json"
        yield f"measure collectives on the nodes that they span: {measure}"


def _format_entry(entry: CoverageEntry) -> str:
    """One line of text. Not a table, whose columns would be too narrow for shapes."""
    name = entry.names[0] + (f" and {len(entry.names) - 1} more" if len(entry.names) > 1 else "")
    error = "" if entry.error is None else f" within {entry.error:.1%}"
    return f"{entry.busy_share:7.2%}  {name:<34} {entry.kind} {entry.description}, {entry.provenance.value}{error}"
