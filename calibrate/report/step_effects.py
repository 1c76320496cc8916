"""What does a step add to isolated kernels, and how accurate is the sum?

In-situ factors, host launches, holdout steps, interference.
"""

from calibrate.report.format import in_situ_factor
from calibrate.report.section import ReportSection
from clustersim.common.units import format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, InterferenceSample, TimeStatistics
from clustersim.report.export.span_descriptions import format_kernel_shape


def in_situ_section(record: CalibrationRecord) -> ReportSection:
    """In-situ factors by family, those with the most time first; the total at the end."""
    samples = sorted(record.chain, key=lambda sample: -sample.in_chain)
    table_rows = [
        (
            sample.family.replace("_", " "),
            f"{sample.kernels:,}",
            format_seconds(sample.isolated),
            format_seconds(sample.in_chain),
            f"{sample.factor:.3f}",
        )
        for sample in samples
    ]
    isolated, in_chain = (
        sum(seconds) for seconds in zip(*((sample.isolated, sample.in_chain) for sample in samples), strict=True)
    )
    factor = in_situ_factor(record.chain)
    kernels = sum(sample.kernels for sample in samples)
    total_row = ("all of them", f"{kernels:,}", format_seconds(isolated), format_seconds(in_chain), f"{factor:.3f}")
    return ReportSection(
        key="chain",
        title="Kernels in a layer",
        heads=("family", "kernels", "by themselves", "in the layer", "factor"),
        rows=(*table_rows, total_row),
        content={
            "factor": factor,
            "families": [
                {
                    "family": sample.family,
                    "kernels": sample.kernels,
                    "isolated_s": sample.isolated,
                    "in_chain_s": sample.in_chain,
                    "factor": sample.factor,
                }
                for sample in samples
            ],
        },
        lead=(
            "Below 1 kernels find in the caches what those before them left; above 1 clocks, caches and bandwidth are "
            "less than a kernel has by itself. Predictions apply the factors."
        ),
    )


def host_section(record: CalibrationRecord) -> ReportSection:
    """Host seconds per launch."""
    return ReportSection(
        key="host",
        title="The host",
        heads=("how it launches", "forward, each", "backward, each", "launches"),
        rows=tuple(
            (
                sample.state.value.replace("_", " "),
                format_seconds(sample.forward),
                format_seconds(sample.backward),
                " + ".join(f"{count:,}" for count in sample.launches),
            )
            for sample in record.host
        ),
        content=[
            {
                "state": sample.state.value,
                "forward_s": sample.forward,
                "backward_s": sample.backward,
                "launches": sample.launches,
            }
            for sample in record.host
        ],
        lead=f"What {record.device.host or 'this host'} needs for each launch; a kernel that is shorter waits for it.",
    )


def holdout_section(record: CalibrationRecord) -> ReportSection:
    """Holdout steps and their predictions."""
    return ReportSection(
        key="steps",
        title="Holdout steps",
        heads=("step", "predicted", "measured", "error"),
        rows=tuple(
            (step.what, format_seconds(step.predicted), format_seconds(step.measured), f"{step.error:+.1%}")
            for step in record.steps
        ),
        content=[
            {"description": step.what, "predicted_s": step.predicted, "measured_s": step.measured, "error": step.error}
            for step in record.steps
        ],
        lead="Real steps of this device, of sizes that the record was not measured for, and what it predicts.",
    )


def interference_section(record: CalibrationRecord) -> ReportSection:
    """Mutual slowdowns of kernels and overlapped work."""
    return ReportSection(
        key="interference",
        title="Kernels with concurrent work",
        heads=("kernel", "concurrent with", "isolated", "concurrent", "slowdown", "slowdown of the other"),
        rows=tuple(_interference_row(sample) for sample in record.beside),
        content=[
            {
                "kernel": format_kernel_shape(sample.kernel.shape),
                "concurrent_with": sample.beside,
                "payload_bytes": None if sample.call is None else sample.call.payload,
                "slowdown": sample.kernel_slowdown,
                "comm_slowdown": _slowdown(sample.call_alone, sample.call_together),
            }
            for sample in record.beside
        ],
        text_columns=(1,),
    )


def _interference_row(sample: InterferenceSample) -> tuple[str, ...]:
    call, time, comm_slowdown = sample.call, sample.kernel.time, _slowdown(sample.call_alone, sample.call_together)
    background = sample.beside.replace("_", " ")
    if call is not None:
        background += f", {format_bytes(call.payload)}, {call.ranks} ranks"
    return (
        f"{sample.kernel.kind.value.replace('_', ' ')} {sample.kernel.dtype.value} "
        f"{format_kernel_shape(sample.kernel.shape)}",
        background,
        "" if time is None else format_seconds(time.seconds),
        format_seconds(sample.together.seconds),
        f"{sample.kernel_slowdown:+.1%}",
        "" if comm_slowdown is None else f"{comm_slowdown:+.1%}",
    )


def _slowdown(isolated: TimeStatistics | None, overlapped: TimeStatistics | None) -> float | None:
    return None if isolated is None or overlapped is None else overlapped.seconds / isolated.seconds - 1.0
