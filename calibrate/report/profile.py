"""How is the profiled step that a record was made of reported?"""

from dataclasses import asdict

from calibrate.report.section import ReportSection
from clustersim.common.units import format_bytes, format_seconds
from clustersim.cost.calibration_record import ProfileAnchor

_LISTED = 12  # calls of no operator


def profile_section(anchor: ProfileAnchor) -> ReportSection:
    """What was profiled, how much of it runs the plan's operators, and what runs none."""
    rows = [
        ("step", format_seconds(anchor.step_time), f"{anchor.steps} x {anchor.ranks} ranks of {anchor.traces}"),
        ("kernels", format_seconds(anchor.busy), f"{anchor.matched / anchor.busy:.2%} of the plan's operators"),
    ]
    rows += [
        (f"of no operator, {call.phase}", format_seconds(call.seconds), f"{call.count:g} x {call.name}")
        for call in anchor.unmatched[:_LISTED]
    ]
    if anchor.memory is not None:
        memory = anchor.memory
        rows += [
            ("memory, allocated", format_bytes(memory.allocated), f"model: {format_bytes(memory.modelled)}"),
            ("memory, reserved", format_bytes(memory.reserved), f"{memory.fragmentation:.3f} of the model's"),
        ]
    return ReportSection(
        key="profile",
        title="Profiled step",
        heads=("of a step", "seconds, bytes", "what"),
        rows=tuple(rows),
        content={key: value for key, value in asdict(anchor).items() if key != "attention"}
        | {"attention": anchor.attention.value},
        lead="Kernel times are means over a step of one rank, not of isolated kernels.",
        text_columns=(0, 2),
    )
