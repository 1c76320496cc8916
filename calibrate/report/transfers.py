"""How fast does data move: within the device, to its host, and between devices?"""

from collections.abc import Sequence

from calibrate.report.section import Section
from clustersim.common.dtypes import DType
from clustersim.common.units import format_bandwidth, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveCall, CollectiveSample
from clustersim.program.task import CollectiveType

Key = tuple[CollectiveType, int, int, DType]


def copies_section(record: CalibrationRecord) -> Section:
    """Copies by route; each byte is read once and written once."""
    return Section(
        key="copies",
        title="Copies",
        heads=("route", "bytes", "time", "bandwidth"),
        rows=tuple(
            (
                row.route.replace("_", " "),
                format_bytes(row.bytes),
                format_seconds(row.time.seconds),
                format_bandwidth(row.bytes / row.time.seconds),
            )
            for row in record.copies
        ),
        content=[
            {"route": row.route, "bytes": row.bytes, "seconds": row.time.seconds, "dispersion": row.time.dispersion}
            for row in record.copies
        ],
        lead="Bytes that were copied, over the time; within the device's memory each is read and written.",
    )


def by_call(record: CalibrationRecord) -> dict[Key, list[CollectiveSample]]:
    """Collectives with even parts by kind, ranks and nodes, the smallest payload first."""
    groups: dict[Key, list[CollectiveSample]] = {}
    even = (collective for collective in record.collectives if not collective.call.shares)
    for row in sorted(even, key=lambda each: each.call.payload):
        call = row.call
        groups.setdefault((call.collective, call.ranks, call.nodes, call.format), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (item[0][0].value, *item[0][1:3], item[0][3].value)))


def call_words(call: CollectiveCall) -> str:
    """A collective without its payload."""
    nodes = f" on {call.nodes} nodes" if call.nodes > 1 else ""
    form = "" if call.format is DType.FP32 else f" in {call.format.value}"
    return f"{call.collective.value.replace('_', ' ')}{form}, {call.ranks} ranks{nodes}"


def collectives_section(record: CalibrationRecord) -> Section:
    """The smallest and the largest payload of each kind."""
    groups = by_call(record)
    return Section(
        key="collectives",
        title="Collectives",
        heads=("collective", "rows", "smallest", "time", "largest", "time", "payload over time"),
        rows=tuple(_collective(rows) for rows in groups.values()),
        content=[_content(key, rows) for key, rows in groups.items()],
        lead=f"Measured with {record.device.collectives}." if record.device.collectives else "",
    )


def _collective(rows: Sequence[CollectiveSample]) -> tuple[str, ...]:
    first, last = rows[0], rows[-1]
    return (
        call_words(first.call),
        f"{len(rows):,}",
        format_bytes(first.call.payload),
        format_seconds(first.time.seconds),
        format_bytes(last.call.payload),
        format_seconds(last.time.seconds),
        format_bandwidth(last.call.payload / last.time.seconds),
    )


def _content(key: Key, rows: Sequence[CollectiveSample]) -> dict[str, object]:
    return {
        "collective": key[0].value,
        "ranks": key[1],
        "nodes": key[2],
        "format": key[3].value,
        "rows": [{"payload_bytes": row.call.payload, "seconds": row.time.seconds} for row in rows],
    }
