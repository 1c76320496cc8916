"""How are collectives added to an existing record?

Its samples are kept, and replaced by new ones of the same calls; method and command of both are joined; the
kernel fit stays, since no kernels are added.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, merge_records
from clustersim.cost.record_file import read_record


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that commands share which add samples of collectives to a record: the cluster, and the record."""
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="cluster that was measured: a packaged one or a file"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="RECORD",
        required=True,
        help="record to write (JSON); samples are added to an existing one",
    )


def add_to_record(record: CalibrationRecord, output: Path | None) -> CalibrationRecord:
    """The record merged into the existing file, if any; raise InputError where that is of another device."""
    if output is None or not output.exists():
        return record
    existing = read_record(output)
    old_conditions, new_conditions = existing.conditions, record.conditions
    conditions = replace(
        new_conditions,
        processes=old_conditions.processes,  # processes that measured the kernels
        method=_join_texts(old_conditions.method, new_conditions.method),
        command=_join_texts(old_conditions.command, new_conditions.command),
    )
    try:
        return replace(merge_records(existing, replace(record, conditions=conditions)), kernel_fit=existing.kernel_fit)
    except InputError as error:
        raise InputError(f"{output}: {error}") from error


def _join_texts(first: str, second: str) -> str:
    """Both texts, or the first where it contains the second."""
    return first if second in first else f"{first}; {second}" if first else second
