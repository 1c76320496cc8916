"""What does a record hold? `clustersim calibrate report RECORD.json`, which needs no torch."""

import argparse
from pathlib import Path
from typing import Final

from calibrate.report.build import CalibrationReport, build_report
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.record_file import read_record
from clustersim.hardware.accelerator import Accelerator, load_accelerator

STDOUT: Final = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("record", metavar="RECORD.json", help="record file, or the name of a packaged record")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - is stdout")
    parser.add_argument("--accelerator", metavar="NAME", help="accelerator to compare with (default: the record's)")


def command(options: argparse.Namespace) -> None:
    """Print and draw a record's report; raise InputError where the file is no record, or an empty one."""
    for target in (options.html, options.json):
        _check_target(target, options.record)
    report = load_report(options.record, options.accelerator)
    if options.json not in (None, STDOUT):
        write_text_atomically(options.json, report.to_json() + "\n")
    if options.html is not None:
        from calibrate.report.page import report_page

        write_text_atomically(options.html, report_page(report))
    if options.json == STDOUT:
        print(report.to_json())
        return
    from calibrate.report.text import format_report

    print(format_report(report))


def load_report(name: str, accelerator: str | None = None) -> CalibrationReport:
    """The report of a record file, or of a packaged record by name."""
    path = Path(name) if data_files.is_path(name) or Path(name).exists() else data_files.find_file("records", name)
    record = read_record(path)
    return build_report(name, record, _reference_accelerator(record, accelerator))


def _reference_accelerator(record: CalibrationRecord, accelerator: str | None) -> Accelerator | None:
    """The accelerator that a record stands for, None where clustersim has no file of that name."""
    if accelerator is not None:
        return load_accelerator(accelerator)
    is_packaged = record.device.accelerator in data_files.list_names("accelerators")
    return load_accelerator(record.device.accelerator) if is_packaged else None


def _check_target(target: str | None, record_path: str) -> None:
    """Raise InputError or OutputError where an output cannot be written, or would overwrite the record."""
    if target in (None, STDOUT):
        return
    require_writable(target)
    if Path(target).exists() and Path(record_path).exists() and Path(target).samefile(record_path):
        raise InputError(f"{target}: is the record itself; name another file")
