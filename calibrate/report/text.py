"""What does a report say on a terminal? Lines that need no colours and no width; words come last."""

import textwrap
from collections.abc import Iterator
from typing import Final

from calibrate.report.build import Report
from calibrate.report.section import Section

_WIDTH: Final = 100  # of sentences
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
        yield from textwrap.wrap(section.lead, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield from _table(section)
    if report.lacks:
        yield ""
        yield "It says nothing of"
        yield from (f"  {what}" for what in report.lacks)


def _table(section: Section) -> Iterator[str]:
    """Names to the left, quantities to the right, words as long as they are where they come last."""
    rows = (section.heads, *section.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            _cell(word, width, left=place in (0, *section.words))
            for place, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        yield ("  " + "  ".join(cells)).rstrip()


def _cell(word: str, width: int, *, left: bool) -> str:
    return f"{word:<{width}}" if left else f"{word:>{width}}"
