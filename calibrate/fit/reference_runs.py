"""Table of published runs by job, with the error of each prediction (`clustersim.uncertainty.reference_runs`).

Runs of quality A and B have their out-of-sample errors. Runs of quality C are in no fit; those of sources that no
constant has seen are predicted here.
"""

import argparse
import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from calibrate.fit.out_of_sample import out_of_sample_path, read_out_of_sample
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.model_file import MODEL_NAMES
from clustersim.uncertainty.reference_runs import COLUMNS, REFERENCE_RUNS, Job, ReferenceRun, to_cells
from clustersim.validation.case_scenario import is_measured
from clustersim.validation.cases import ValidationCase
from clustersim.validation.steps import build_scenario, compare_step, read_steps

_IMPORTANT_UNKNOWN = "C"


def reference_runs() -> Iterator[ReferenceRun]:
    """The runs of the table, by `case_id`."""
    errors = {
        step.case_id: step.log_error for name in MODEL_NAMES for step in read_out_of_sample(out_of_sample_path(name))
    }
    cases = sorted(read_steps(), key=lambda case: case.text("case_id"))
    fitted_sources = {case.text("source") for case in cases if case.text("case_id") in errors}
    for case in cases:
        log_error = errors.get(case.text("case_id"))
        if log_error is None and is_held_out(case, fitted_sources):
            log_error = _log_error(case)
        if log_error is not None:
            yield _reference_run(case, log_error)


def is_held_out(case: ValidationCase, fitted_sources: set[str]) -> bool:
    """Whether a run was measured, leaves something important open, and has a source that no constant has seen."""
    is_open = case.text("quality") == _IMPORTANT_UNKNOWN and is_measured(case)
    return is_open and case.text("source") not in fitted_sources


def _log_error(case: ValidationCase) -> float | None:
    """Logarithm of measured over predicted time; None if the run cannot be predicted."""
    comparison = compare_step(case)
    return None if comparison.predicted is None else math.log(comparison.measured / comparison.predicted)


def _reference_run(case: ValidationCase, log_error: float) -> ReferenceRun:
    rate = case.text("model_tflops_per_gpu")
    return ReferenceRun(
        case_id=case.text("case_id"),
        source=case.text("source"),
        locator=case.text("locator"),
        quality=case.text("quality"),
        log_error=log_error,
        measured=case.positive_float("step_time_s"),
        tflops_per_gpu=float(rate) if rate else None,
        job=Job.from_scenario(build_scenario(case)),
    )


def format_table(runs: Iterator[ReferenceRun]) -> str:
    """The runs as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    rows: Iterator[Mapping[str, str]] = map(to_cells, runs)
    writer.writerows(rows)
    return text.getvalue()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "--write", type=Path, default=REFERENCE_RUNS, metavar="FILE", help=f"default: {REFERENCE_RUNS.name}, packaged"
    )


def command(options: argparse.Namespace) -> None:
    """Write the table."""
    table = format_table(reference_runs())
    write_text_atomically(options.write, table)
    print(f"{table.count(chr(10)) - 1} runs")
