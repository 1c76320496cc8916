"""Which kernels and collectives of a scenario rest on no measurement, and what do they weigh in the step?

A weight is the share of the time that all ranks compute or communicate. Kernels that are the same measurement (equal
kind, format and shape) are one line.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.cli.outputs import STDOUT, Outputs, write_json
from clustersim.common.units import format_bytes
from clustersim.cost.timing import Provenance
from clustersim.program.task import CollectiveType, CommOp, CommOverlap
from clustersim.report.export.span_descriptions import shape_words
from clustersim.report.labels import PROVENANCE_NAMES
from clustersim.results.provenance import Item
from clustersim.scenario import Scenario

COVERED: Final = (Provenance.MEASURED, Provenance.INTERPOLATED)
_COLLECTIVES: Final = frozenset(kind.value for kind in CollectiveType)
_MOST: Final = 25  # lines of the table; the rest is one more


@dataclass(frozen=True, slots=True)
class Line:
    """What is one measurement. share: of the busy time; error, longer: as in `cost.timing.Timing`."""

    kind: str
    what: str
    names: tuple[str, ...]
    provenance: Provenance
    error: float | None
    longer: float
    share: float

    def to_json(self) -> dict[str, Any]:
        """The line as plain data."""
        return {
            "kind": self.kind,
            "what": self.what,
            "names": list(self.names),
            "provenance": self.provenance.value,
            "covered": self.provenance in COVERED,
            "error": self.error,
            "times_longer_in_step": self.longer,
            "share": self.share,
        }


def show_coverage(file: Path, overrides: Sequence[str], json: str | None, *, every: bool) -> None:
    """Simulate the scenario, and print (or write) on what its durations rest."""
    scenario = Scenario.load(file, overrides)
    Outputs(json=json).require((file, *scenario.files))
    from clustersim.simulation import simulate

    result = simulate(scenario)
    shares, found, steps = result.provenance_shares, lines(result.busy_time_items), result.holdout_validation
    if json is not None:
        content = {"provenance_share": dict(shares), "lines": [line.to_json() for line in found]}
        write_json({**content, "record_steps": None if steps is None else steps.to_json()}, json)
    if json != STDOUT:
        shown = [line for line in found if every or line.provenance not in COVERED]
        _print(scenario, shares, shown, every=every)
        if steps is not None:
            print(f"the record {steps.description}")
        for hint in _hints(scenario, overrides, shown):
            print(hint)


def lines(items: Sequence[Item]) -> list[Line]:
    """What is measured once, heaviest first."""
    whole = sum(item.seconds for item in items) or 1.0
    together: dict[tuple[str, str, Provenance, float | None, float], tuple[float, dict[str, None]]] = {}
    for item in items:
        if item.seconds <= 0.0:  # a collective of one rank
            continue
        kind, what, name = _said(item)
        key = kind, what, item.provenance, item.error, item.longer
        share, names = together.get(key, (0.0, {}))
        together[key] = share + item.seconds / whole, names | {name: None}
    found = [
        Line(kind, what, tuple(names), provenance, error, longer, share)
        for (kind, what, provenance, error, longer), (share, names) in together.items()
    ]
    return sorted(found, key=lambda line: -line.share)


def _said(item: Item) -> tuple[str, str, str]:
    """Kind, what is done, and name."""
    match item.does:
        case CommOp() as exchange:
            return exchange.collective.value, f"{exchange.comm_group}, {format_bytes(exchange.payload)}", exchange.name
        case CommOverlap(comm_op=exchange, kernel=kernel):
            words = f"{kernel.dtype.value} {shape_words(kernel.shape)} beside {exchange.collective.value}"
            return kernel.kind.value, words, kernel.name
        case kernel:
            return kernel.kind.value, f"{kernel.dtype.value} {shape_words(kernel.shape)}", kernel.name


def _print(scenario: Scenario, shares: Mapping[str, float], shown: Sequence[Line], *, every: bool) -> None:
    record = scenario.cost.record
    told = "no record" if record is None else f"record of {record.device.name or record.device.accelerator}"
    print(f"{scenario.name}: {told}; busy time by the source of its durations:")
    for source in Provenance:
        if shares[source.value] > 0:
            print(f"  {shares[source.value]:7.1%}  {PROVENANCE_NAMES[source]}")
    if not shown:
        print("everything that takes time is measured or lies between measured shapes")
        return
    most = len(shown) if every else _MOST
    for line in shown[:most]:
        print(_words(line))
    if len(shown) > most:
        rest = sum(line.share for line in shown[most:])
        print(f"and {len(shown) - most} more, {rest:.2%} in all (--all lists them)")


def _hints(scenario: Scenario, overrides: Sequence[str], shown: Sequence[Line]) -> Iterator[str]:
    """How to measure what was not; beside what a record is, overrides change what is measured."""
    changes = [shlex.join(["--set", override]) for override in overrides if not override.startswith("cost.record")]
    name, gpu = " ".join([str(scenario.path or "SCENARIO.yaml"), *changes]), scenario.cluster.accelerator.name
    lacking = {line.kind in _COLLECTIVES for line in shown if line.provenance not in COVERED}
    if False in lacking:
        yield f"measure kernels on one {gpu}: clustersim calibrate --for {name} -o RECORD.json"
    if True in lacking:
        measure = f"torchrun --nproc-per-node N -m calibrate collectives --for {name} -o RECORD.json"
        yield f"measure collectives on the nodes that they span: {measure}"


def _words(line: Line) -> str:
    """One line of text; not a table, whose columns would be too narrow for shapes."""
    name = line.names[0] + (f" and {len(line.names) - 1} more" if len(line.names) > 1 else "")
    error = "" if line.error is None else f" within {line.error:.1%}"
    return f"{line.share:7.2%}  {name:<34} {line.kind} {line.what}, {line.provenance.value}{error}"
