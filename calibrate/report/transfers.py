"""How fast does data move: within the device, to its host, and between devices?"""

from collections.abc import Sequence

from calibrate.report.section import ReportSection
from clustersim.common.dtypes import DType
from clustersim.common.units import format_bandwidth, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveCall, CollectiveSample
from clustersim.program.task import CollectiveType

CollectiveShapeKey = tuple[CollectiveType, int, int, DType]


def copies_section(record: CalibrationRecord) -> ReportSection:
    """Copies by route; each byte is read once and written once."""
    return ReportSection(
        key="copies",
        title="Copies",
        heads=("route", "bytes", "time", "bandwidth"),
        rows=tuple(
            (
                sample.route.replace("_", " "),
                format_bytes(sample.bytes),
                format_seconds(sample.time.seconds),
                format_bandwidth(sample.bytes / sample.time.seconds),
            )
            for sample in record.copies
        ),
        content=[
            {
                "route": sample.route,
                "bytes": sample.bytes,
                "seconds": sample.time.seconds,
                "dispersion": sample.time.dispersion,
            }
            for sample in record.copies
        ],
        lead="Bytes that were copied, over the time; within the device's memory each is read and written.",
    )


def samples_by_shape(record: CalibrationRecord) -> dict[CollectiveShapeKey, list[CollectiveSample]]:
    """Collectives with balanced shards by kind, ranks, nodes and format, ascending by payload."""
    groups: dict[CollectiveShapeKey, list[CollectiveSample]] = {}
    balanced = (sample for sample in record.collectives if not sample.call.shares)
    for sample in sorted(balanced, key=lambda sample: sample.call.payload):
        call = sample.call
        groups.setdefault((call.collective, call.ranks, call.nodes, call.dtype), []).append(sample)
    return dict(
        sorted(
            groups.items(),
            key=lambda shape_samples: (shape_samples[0][0].value, *shape_samples[0][1:3], shape_samples[0][3].value),
        )
    )


def call_label(call: CollectiveCall) -> str:
    """The displayed name of a collective call, without its payload."""
    nodes = f" on {call.nodes} nodes" if call.nodes > 1 else ""
    dtype_text = "" if call.dtype is DType.FP32 else f" in {call.dtype.value}"
    return f"{call.collective.value.replace('_', ' ')}{dtype_text}, {call.ranks} ranks{nodes}"


def collectives_section(record: CalibrationRecord) -> ReportSection:
    """The smallest and the largest payload of each kind."""
    groups = samples_by_shape(record)
    return ReportSection(
        key="collectives",
        title="Collectives",
        heads=("collective", "rows", "smallest", "time", "largest", "time", "payload over time"),
        rows=tuple(_collective_row(samples) for samples in groups.values()),
        content=[_collective_json(key, samples) for key, samples in groups.items()],
        lead=f"Measured with {record.device.collectives}." if record.device.collectives else "",
    )


def _collective_row(samples: Sequence[CollectiveSample]) -> tuple[str, ...]:
    first, last = samples[0], samples[-1]
    return (
        call_label(first.call),
        f"{len(samples):,}",
        format_bytes(first.call.payload),
        format_seconds(first.time.seconds),
        format_bytes(last.call.payload),
        format_seconds(last.time.seconds),
        format_bandwidth(last.call.payload / last.time.seconds),
    )


def _collective_json(key: CollectiveShapeKey, samples: Sequence[CollectiveSample]) -> dict[str, object]:
    return {
        "collective": key[0].value,
        "ranks": key[1],
        "nodes": key[2],
        "format": key[3].value,
        "rows": [{"payload_bytes": sample.call.payload, "seconds": sample.time.seconds} for sample in samples],
    }
