"""What does a step add to kernels by themselves, and how true is the whole? Chain, host, unseen steps, interference."""

from calibrate.report.format import chain_factor
from calibrate.report.section import Section
from clustersim.common.units import format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, InterferenceSample, TimeStatistics
from clustersim.report.export.span_descriptions import shape_words


def chain_section(record: CalibrationRecord) -> Section:
    """Factors by family, those that weigh most first; all of them at the end."""
    ordered = sorted(record.chain, key=lambda row: -row.in_chain)
    lines = [
        (
            row.family.replace("_", " "),
            f"{row.kernels:,}",
            format_seconds(row.isolated),
            format_seconds(row.in_chain),
            f"{row.factor:.3f}",
        )
        for row in ordered
    ]
    isolated, in_chain = (sum(item) for item in zip(*((row.isolated, row.in_chain) for row in ordered), strict=True))
    factor = chain_factor(record.chain)
    kernels = sum(row.kernels for row in ordered)
    whole = ("all of them", f"{kernels:,}", format_seconds(isolated), format_seconds(in_chain), f"{factor:.3f}")
    return Section(
        key="chain",
        title="Kernels in a layer",
        heads=("family", "kernels", "by themselves", "in the layer", "factor"),
        rows=(*lines, whole),
        content={
            "factor": factor,
            "families": [
                {
                    "family": row.family,
                    "kernels": row.kernels,
                    "isolated_s": row.isolated,
                    "in_chain_s": row.in_chain,
                    "factor": row.factor,
                }
                for row in ordered
            ],
        },
        lead=(
            "Below 1 kernels find in the caches what those before them left; above 1 clocks, caches and bandwidth are "
            "less than a kernel has by itself. Predictions apply the factors."
        ),
    )


def host_section(record: CalibrationRecord) -> Section:
    """Seconds of each launch."""
    return Section(
        key="host",
        title="The host",
        heads=("how it launches", "forward, each", "backward, each", "launches"),
        rows=tuple(
            (
                row.state.value.replace("_", " "),
                format_seconds(row.forward),
                format_seconds(row.backward),
                " + ".join(f"{many:,}" for many in row.launches),
            )
            for row in record.host
        ),
        content=[
            {"state": row.state.value, "forward_s": row.forward, "backward_s": row.backward, "launches": row.launches}
            for row in record.host
        ],
        lead=f"What {record.device.host or 'this host'} needs for each launch; a kernel that is shorter waits for it.",
    )


def steps_section(record: CalibrationRecord) -> Section:
    """Unseen steps beside their prediction."""
    return Section(
        key="steps",
        title="Steps that were not measured for",
        heads=("step", "predicted", "measured", "error"),
        rows=tuple(
            (row.what, format_seconds(row.predicted), format_seconds(row.measured), f"{row.error:+.1%}")
            for row in record.steps
        ),
        content=[
            {"what": row.what, "predicted_s": row.predicted, "measured_s": row.measured, "error": row.error}
            for row in record.steps
        ],
        lead="Real steps of this device, of sizes that the record was not measured for, and what it predicts.",
    )


def beside_section(record: CalibrationRecord) -> Section:
    """What kernels and other work do to each other."""
    return Section(
        key="interference",
        title="Kernels beside other work",
        heads=("kernel", "beside", "alone", "together", "longer", "the other is longer"),
        rows=tuple(_beside(row) for row in record.beside),
        content=[
            {
                "kernel": shape_words(row.kernel.shape),
                "beside": row.beside,
                "payload_bytes": None if row.call is None else row.call.payload,
                "longer": row.kernel_slowdown,
                "call_longer": _longer(row.call_alone, row.call_together),
            }
            for row in record.beside
        ],
        words=(1,),
    )


def _beside(row: InterferenceSample) -> tuple[str, ...]:
    call, time, other = row.call, row.kernel.time, _longer(row.call_alone, row.call_together)
    what = row.beside.replace("_", " ")
    if call is not None:
        what += f", {format_bytes(call.payload)}, {call.ranks} ranks"
    return (
        f"{row.kernel.kind.value.replace('_', ' ')} {row.kernel.dtype.value} {shape_words(row.kernel.shape)}",
        what,
        "" if time is None else format_seconds(time.seconds),
        format_seconds(row.together.seconds),
        f"{row.kernel_slowdown:+.1%}",
        "" if other is None else f"{other:+.1%}",
    )


def _longer(alone: TimeStatistics | None, together: TimeStatistics | None) -> float | None:
    return None if alone is None or together is None else together.seconds / alone.seconds - 1.0
