"""How is a report printed on a terminal? Lines that need no colours and no fixed width; text columns come last."""

import textwrap
from collections.abc import Iterator
from typing import Final

from calibrate.report.build import CalibrationReport
from calibrate.report.section import ReportSection

_WIDTH: Final = 100  # characters per line of a sentence
_ORIGIN_SUFFIXES: Final = {
    "measured": "",
    "published": ", published by others",
    "derived": ", derived from another record",
}


def format_report(report: CalibrationReport) -> str:
    """The complete report."""
    return "\n".join(_report_lines(report))


def _report_lines(report: CalibrationReport) -> Iterator[str]:
    device = report.record.device
    yield f"{report.name}: {device.name or device.accelerator}{_ORIGIN_SUFFIXES[report.record.origin.value]}"
    yield from (f"  {name}: {value}" for name, value in report.device_details.items())
    for section in report.sections:
        yield ""
        yield section.title
        yield from textwrap.wrap(section.lead, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield from _table_lines(section)
    if report.missing_contents:
        yield ""
        yield "Missing measurements"
        yield from (f"  {missing}" for missing in report.missing_contents)


def _table_lines(section: ReportSection) -> Iterator[str]:
    """Names left-aligned, quantities right-aligned, long text unpadded in the last column."""
    rows = (section.heads, *section.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            _format_cell(text, width, left=column_index in (0, *section.text_columns))
            for column_index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield ("  " + "  ".join(cells)).rstrip()


def _format_cell(text: str, width: int, *, left: bool) -> str:
    return f"{text:<{width}}" if left else f"{text:>{width}}"
