"""What does a person look at? A record as one HTML file that needs nothing else, as the pages of answers are."""

from collections.abc import Callable, Iterator
from typing import Final

from calibrate.report.build import Report
from calibrate.report.efficiency import ceiling, reached
from calibrate.report.figures import chain_figure, collectives_figure, efficiency_figure, load_figure
from calibrate.report.format import chain_factor, steady
from calibrate.report.section import Section
from clustersim.common.units import format_bandwidth, format_seconds
from clustersim.report.figure import Figure
from clustersim.report.html_document import document, drawn

_FEW: Final = 2  # looks at each part
Drawn = Callable[[Report], Figure | None]


def report_page(report: Report) -> str:
    """The page as HTML text."""
    device = report.record.device
    name = device.name or device.accelerator
    sections = [(section, _figure(report, section)) for section in report.sections]
    page = drawn(
        "record.html",
        *(figure for _, figure in sections if figure is not None),
        title=f"Calibration of {name}",
        subject=f"{report.name}, {report.record.origin.value}",
        rows=list(_numbers(report)),
        facts=report.facts.items(),
        sections=sections,
        lacks=report.lacks,
    )
    return document(f"calibration of {name}", [page])


def _figure(report: Report, part: Section) -> Figure | None:
    """The figure of a section, if it has one."""
    return _FIGURES[part.key](report) if part.key in _FIGURES else None


def _efficiency(report: Report) -> Figure | None:
    most = ceiling(report.record, report.shipped)
    return None if most is None else efficiency_figure(reached(report.record, most))


def _load(report: Report) -> Figure | None:
    """Of a device that was looked at again and again; a CPU is once for each part, which the table says as well."""
    moments = report.record.moments
    known = any(moment.state.sm_clock_mhz or moment.state.power_w for moment in moments)
    return (
        load_figure(report.record)
        if known and len(moments) > _FEW * len({telemetry_sample.part for telemetry_sample in moments})
        else None
    )


_FIGURES: Final[dict[str, Drawn]] = {
    "efficiency": _efficiency,
    "under_load": _load,
    "chain": lambda report: chain_figure(report.record.chain),
    "collectives": lambda report: collectives_figure(report.record),
}


def _numbers(report: Report) -> Iterator[tuple[str, str, str]]:
    """What people compare: name, value, and what it means."""
    record = report.record
    state, factor, fit = steady(record), chain_factor(record.chain), record.kernel_fit
    if record.steps:
        worst = max((row.error for row in record.steps), key=abs)
        yield "unseen steps", f"{worst:+.1%}", "the largest error of steps that the record was not measured for"
    if state is not None and state.sm_clock_mhz:
        yield "clock", f"{state.sm_clock_mhz:,.0f} MHz", "under load, after the soak"
    if state is not None and state.power_w:
        yield "power", f"{state.power_w:,.0f} W", "under load, after the soak"
    if fit is not None:
        moved = fit.memory_bandwidth * fit.efficiency.memory
        yield "memory", format_bandwidth(moved), "that streaming kernels reach"
    if factor is not None:
        yield "in a layer", f"{factor:.3f}", "times that kernels take in a layer what they take alone"
    for row in record.host[:1]:
        yield "host", format_seconds(row.forward), f"for each launch of forward, {row.state.value}"
    measured = sum(row.time is not None for row in record.kernels)
    yield "kernels", f"{measured:,}", "that were measured"
