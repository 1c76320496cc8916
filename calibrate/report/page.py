"""How is a record shown in a browser? As one self-contained HTML file, like the pages of simulation results."""

from collections.abc import Callable, Iterator
from typing import Final

from calibrate.report.build import CalibrationReport
from calibrate.report.efficiency import achieved_efficiencies, roofline_limits
from calibrate.report.figures import collectives_figure, efficiency_figure, in_situ_figure, telemetry_figure
from calibrate.report.format import in_situ_factor, steady_telemetry
from calibrate.report.section import ReportSection
from clustersim.common.units import format_bandwidth, format_seconds
from clustersim.report.figure import Figure
from clustersim.report.html_document import html_document, render_panel

_MIN_SAMPLES_PER_STAGE: Final = 2  # samples of each stage
FigureBuilder = Callable[[CalibrationReport], Figure | None]


def report_page(report: CalibrationReport) -> str:
    """The page as HTML text."""
    device = report.record.device
    name = device.name or device.accelerator
    sections = [(section, _section_figure(report, section)) for section in report.sections]
    page = render_panel(
        "record.html",
        *(figure for _, figure in sections if figure is not None),
        title=f"Calibration of {name}",
        subject=f"{report.name}, {report.record.origin.value}",
        rows=list(_key_numbers(report)),
        facts=report.device_details.items(),
        sections=sections,
        missing=report.missing_contents,
    )
    return html_document(f"calibration of {name}", [page])


def _section_figure(report: CalibrationReport, section: ReportSection) -> Figure | None:
    """The figure of a section, if it has one."""
    return _FIGURE_BUILDERS[section.key](report) if section.key in _FIGURE_BUILDERS else None


def _efficiency_figure(report: CalibrationReport) -> Figure | None:
    limits = roofline_limits(report.record, report.reference)
    return None if limits is None else efficiency_figure(achieved_efficiencies(report.record, limits))


def _telemetry_figure(report: CalibrationReport) -> Figure | None:
    """Of a device that was sampled repeatedly; a CPU is sampled once per stage, which the table shows as well."""
    samples = report.record.telemetry
    has_values = any(sample.state.sm_clock_mhz or sample.state.power_w for sample in samples)
    return (
        telemetry_figure(report.record)
        if has_values and len(samples) > _MIN_SAMPLES_PER_STAGE * len({sample.stage for sample in samples})
        else None
    )


_FIGURE_BUILDERS: Final[dict[str, FigureBuilder]] = {
    "efficiency": _efficiency_figure,
    "telemetry": _telemetry_figure,
    "in_situ": lambda report: in_situ_figure(report.record.in_situ),
    "collectives": lambda report: collectives_figure(report.record),
}


def _key_numbers(report: CalibrationReport) -> Iterator[tuple[str, str, str]]:
    """The key numbers: name, value, and meaning."""
    record = report.record
    state, factor, fit = steady_telemetry(record), in_situ_factor(record.in_situ), record.kernel_fit
    if record.holdout_steps:
        worst = max((sample.error for sample in record.holdout_steps), key=abs)
        yield "holdout steps", f"{worst:+.1%}", "the largest error of steps that the record was not measured for"
    if state is not None and state.sm_clock_mhz:
        yield "clock", f"{state.sm_clock_mhz:,.0f} MHz", "under load, after the burn-in"
    if state is not None and state.power_w:
        yield "power", f"{state.power_w:,.0f} W", "under load, after the burn-in"
    if fit is not None:
        achieved_bandwidth = fit.efficiency.operator_bandwidth(fit.memory_bandwidth)
        yield "memory", format_bandwidth(achieved_bandwidth), "that memory-bound kernels reach"
    if factor is not None:
        yield "in situ", f"{factor:.3f}", "time of kernels in a layer, relative to isolated ones"
    for sample in record.host_launches[:1]:
        yield "host", format_seconds(sample.forward), f"for each launch of forward, {sample.mode.value}"
    measured_count = sum(sample.time is not None for sample in record.kernels)
    yield "kernels", f"{measured_count:,}", "that were measured"
