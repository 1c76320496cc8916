"""What does `clustersim validate` do? Predict published cases, or a user's, and report the errors.

clustersim validate                     all packaged cases
clustersim validate steps [FILE.csv]    one kind: the packaged cases, or those of a file
clustersim validate steps --set KEY=VALUE  steps with keys of their scenarios changed, such as cost.network
clustersim validate show CASE_ID        one packaged case: its scenario, and where the predicted time goes
clustersim validate show [KIND] FILE.csv CASE_ID  one case of a file
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.validation_kinds import (
    KINDS,
    MAX_ARGUMENTS_BEFORE_ID,
    SHOW,
    ValidationKind,
    ValidationOptions,
    is_csv_name,
    load_kind,
    suggest_case_ids,
)
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.validation.cases import ValidationCase
from clustersim.validation.summary import ValidationSummary


def run_validation(arguments: Sequence[str], options: ValidationOptions, outputs: Outputs) -> None:
    """Run one form of the command. arguments: the positional arguments after `validate`."""
    if options.changes and list(arguments[:1]) != [KINDS[0]]:
        raise InputError(f"--set {options.changes[0]}: is for steps, as in clustersim validate steps --set")
    match arguments:
        case []:
            validate_published(options, outputs)
        case ["show", *location, case_id] if len(location) <= MAX_ARGUMENTS_BEFORE_ID:
            from clustersim.cli.validation_show import show_case

            show_case(location, case_id, options, outputs)
        case [kind] if _is_kind(kind):
            validate_table(load_kind(kind, options), None, options, outputs)
        case [kind, file] if _is_kind(kind):
            validate_table(load_kind(kind, options), Path(file), options, outputs)
        case _:
            extra = " ".join(arguments[2:])
            raise InputError(f"validate takes a kind and one file or case, not also {format_value(extra)}")


def _is_kind(argument: str) -> bool:
    """True for a kind of measurement; otherwise raise InputError that suggests the nearest."""
    if argument in KINDS:
        return True
    if argument == SHOW:
        raise InputError(
            "validate show needs the id of one case, after the file that it is in if it is one of yours; "
            "clustersim validate --json - lists the packaged ones"
        )
    if is_csv_name(argument):
        raise InputError(
            f"{argument}: say what it holds ({', '.join(KINDS)}), as in clustersim validate steps {argument}"
        )
    raise InputError(
        f"validate {format_value(argument)}: there is no such kind; {suggest_nearest(argument, (*KINDS, SHOW))}"
    )


def validate_table(kind: ValidationKind, file: Path | None, options: ValidationOptions, outputs: Outputs) -> None:
    """Predict the cases of a file, or the packaged ones of a kind."""
    path = file or kind.data_file
    all_cases = kind.read(path)
    outputs.check_writable([path])
    cases = options.select(all_cases)
    if not cases:
        raise _no_case_error(options, all_cases)
    summary = kind.summarize(cases)
    title = f"{path.name}, {kind.name}" if file else f"published {kind.name}"
    _report_summaries([summary], summary.to_json(), title, outputs)


def validate_published(options: ValidationOptions, outputs: Outputs) -> None:
    """Predict all packaged cases."""
    kinds = [load_kind(name, options) for name in KINDS]
    all_cases = [kind.read(kind.data_file) for kind in kinds]
    outputs.check_writable([kind.data_file for kind in kinds])
    chosen = [options.select(cases) for cases in all_cases]
    if not any(chosen):
        raise _no_case_error(options, [case for cases in all_cases for case in cases])
    summaries = [kind.summarize(cases) for kind, cases in zip(kinds, chosen, strict=True)]
    step_summary, *other_summaries = summaries
    content = step_summary.to_json() | {summary.table_kind: summary.to_json() for summary in other_summaries}
    _report_summaries(
        [summary for summary in summaries if summary.comparisons or summary.simulated_by_others],
        content,
        "published cases",
        outputs,
    )


def _no_case_error(options: ValidationOptions, cases: Sequence[ValidationCase]) -> InputError:
    return InputError(
        f"--only {format_value(options.only)}: no case id contains it; {suggest_case_ids(options.only, cases)}"
    )


def _report_summaries(
    summaries: Sequence[ValidationSummary], content: Mapping[str, Any], title: str, outputs: Outputs
) -> None:
    """Write the requested files, and print the tables."""
    if outputs.json is not None:
        write_json(content, outputs.json)
    if outputs.html is not None:
        from clustersim.cli.validation_page import write_page

        write_page(summaries, f"Predicted against measured: {title}", outputs.html)
    if outputs.table:
        from clustersim.cli.validation_table import print_summaries

        print_summaries(summaries)
        for path in outputs.file_paths.values():
            announce_file(path)
