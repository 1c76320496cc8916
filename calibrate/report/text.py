"""What does a report say on a terminal? Lines that need no colours and no width; words come last."""

from collections.abc import Iterator, Sequence
from typing import Final

from calibrate.report.content import Report
from calibrate.report.section import Section

_ORIGINS: Final = {"measured": "", "published": ", published by others", "derived": ", derived from another record"}


def report_text(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    device = report.record.device
    yield f"{report.name}: {device.name or device.accelerator}{_ORIGINS[report.record.origin.value]}"
    yield from (f"  {name}: {value}" for name, value in report.facts.items())
    for section in report.sections:
        yield ""
        yield section.title
        yield from (f"  {section.lead}",) * bool(section.lead)
        yield from _table(section)
    if report.lacks:
        yield ""
        yield "It says nothing of"
        yield from (f"  {what}" for what in report.lacks)


def _table(section: Section) -> Iterator[str]:
    rows = (section.heads, *section.rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(section.heads))]
    last = len(widths) - 1
    for row in rows:
        cells = (
            _cell(row, place, widths) if place < last or place not in section.words else row[place]
            for place in range(last + 1)
        )
        yield ("  " + "  ".join(cells)).rstrip()


def _cell(row: Sequence[str], place: int, widths: Sequence[int]) -> str:
    return f"{row[place]:<{widths[place]}}" if place == 0 else f"{row[place]:>{widths[place]}}"
