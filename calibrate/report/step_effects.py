"""What does a step add to isolated kernels, and how accurate is the sum?

In-situ factors, host launches, holdout steps, interference.
"""

from calibrate.report.format import in_situ_factor
from calibrate.report.section import ReportSection
from clustersim.common.units import format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, InterferenceSample, TimeStatistics
from clustersim.model.kernels import format_kernel_shape


def in_situ_section(record: CalibrationRecord) -> ReportSection:
    """In-situ factors by family, those with the most time first; the total at the end."""
    samples = sorted(record.in_situ, key=lambda sample: -sample.in_situ)
    table_rows = [
        (
            sample.family.replace("_", " "),
            f"{sample.kernels:,}",
            format_seconds(sample.isolated),
            format_seconds(sample.in_situ),
            f"{sample.factor:.3f}",
        )
        for sample in samples
    ]
    isolated, in_situ = (
        sum(seconds) for seconds in zip(*((sample.isolated, sample.in_situ) for sample in samples), strict=True)
    )
    factor = in_situ_factor(record.in_situ)
    kernels = sum(sample.kernels for sample in samples)
    total_row = ("all kernels", f"{kernels:,}", format_seconds(isolated), format_seconds(in_situ), f"{factor:.3f}")
    return ReportSection(
        key="in_situ",
        title="Kernels in a layer (in situ)",
        heads=("family", "kernels", "isolated", "in situ", "factor"),
        rows=(*table_rows, total_row),
        content={
            "factor": factor,
            "families": [
                {
                    "family": sample.family,
                    "kernels": sample.kernels,
                    "isolated_s": sample.isolated,
                    "in_situ_s": sample.in_situ,
                    "factor": sample.factor,
                }
                for sample in samples
            ],
        },
        lead=(
            "Below 1 kernels find in the caches what those before them left; above 1 clocks, caches and bandwidth are "
            "less than an isolated kernel has. Predictions apply the factors."
        ),
    )


def host_section(record: CalibrationRecord) -> ReportSection:
    """Host seconds per launch."""
    return ReportSection(
        key="host_launches",
        title="Host launch times",
        heads=("launch mode", "forward, per launch", "backward, per launch", "launches"),
        rows=tuple(
            (
                sample.mode.value.replace("_", " "),
                format_seconds(sample.forward),
                format_seconds(sample.backward),
                " + ".join(f"{count:,}" for count in sample.launches),
            )
            for sample in record.host_launches
        ),
        content=[
            {
                "mode": sample.mode.value,
                "forward_s": sample.forward,
                "backward_s": sample.backward,
                "launches": sample.launches,
            }
            for sample in record.host_launches
        ],
        lead=f"What {record.device.host or 'this host'} needs for each launch; a kernel that is shorter waits for it.",
    )


def holdout_section(record: CalibrationRecord) -> ReportSection:
    """Holdout steps and their predictions."""
    return ReportSection(
        key="holdout_steps",
        title="Holdout steps",
        heads=("step", "predicted", "measured", "error"),
        rows=tuple(
            (step.description, format_seconds(step.predicted), format_seconds(step.measured), f"{step.error:+.1%}")
            for step in record.holdout_steps
        ),
        content=[
            {
                "description": step.description,
                "predicted_s": step.predicted,
                "measured_s": step.measured,
                "error": step.error,
            }
            for step in record.holdout_steps
        ],
        lead="Real steps of this device, of sizes that the record was not measured for, and what it predicts.",
    )


def interference_section(record: CalibrationRecord) -> ReportSection:
    """Mutual slowdowns of kernels and overlapped work."""
    return ReportSection(
        key="interference",
        title="Kernels with concurrent work",
        heads=("kernel", "concurrent with", "isolated", "concurrent", "slowdown", "slowdown of the other"),
        rows=tuple(_interference_row(sample) for sample in record.interference),
        content=[
            {
                "kernel": format_kernel_shape(sample.kernel.shape),
                "concurrent_with": sample.overlapped_with,
                "payload_bytes": None if sample.call is None else sample.call.payload,
                "slowdown": sample.kernel_slowdown,
                "comm_slowdown": _slowdown(sample.isolated_call_time, sample.overlapped_call_time),
            }
            for sample in record.interference
        ],
        text_columns=(1,),
    )


def _interference_row(sample: InterferenceSample) -> tuple[str, ...]:
    call, time, comm_slowdown = (
        sample.call,
        sample.kernel.time,
        _slowdown(sample.isolated_call_time, sample.overlapped_call_time),
    )
    background = sample.overlapped_with.replace("_", " ")
    if call is not None:
        background += f", {format_bytes(call.payload)}, {call.ranks} ranks"
    return (
        f"{sample.kernel.kind.value.replace('_', ' ')} {sample.kernel.dtype.value} "
        f"{format_kernel_shape(sample.kernel.shape)}",
        background,
        "" if time is None else format_seconds(time.seconds),
        format_seconds(sample.overlapped_time.seconds),
        f"{sample.kernel_slowdown:+.1%}",
        "" if comm_slowdown is None else f"{comm_slowdown:+.1%}",
    )


def _slowdown(isolated: TimeStatistics | None, overlapped: TimeStatistics | None) -> float | None:
    return None if isolated is None or overlapped is None else overlapped.seconds / isolated.seconds - 1.0
