"""Which kinds of measurement can be validated? Each is read and predicted by its own module of `validation_page`."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clustersim.cli.progress import count_progress, show_activity
from clustersim.common.errors import InputError
from clustersim.validation.cases import ValidationCase, missing_columns, read_columns
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.summary import ValidationSummary, summarize_steps

KINDS: Final = ("steps", "memory", "collectives", "kernels", "reliability", "sites")
SHOW: Final = "show"
MAX_ARGUMENTS_BEFORE_ID: Final = 2  # arguments between `write_figures` and the id of a case: its kind and its file
_MAX_SUGGESTED_IDS: Final = 5


@dataclass(frozen=True, slots=True)
class ValidationOptions:
    """Which cases are predicted, and how.

    only: substring of their ids; workers: processes, None for one per usable CPU; changes: overrides of the scenarios
    of steps, as `key=value`.
    """

    only: str = ""
    workers: int | None = None
    changes: tuple[str, ...] = ()

    def select(self, cases: Sequence[ValidationCase]) -> list[ValidationCase]:
        """The selected cases."""
        return [case for case in cases if self.only in case.text("case_id")]


@dataclass(frozen=True, slots=True)
class ValidationKind:
    """One kind of measurement: its packaged cases, and how its tables are read, predicted and summarized.

    data_file: table of the packaged cases; required_columns: of a table of this kind.
    """

    name: str
    data_file: Path
    required_columns: Sequence[str]
    read: Callable[[Path], list[ValidationCase]]
    summarize: Callable[[Sequence[ValidationCase]], ValidationSummary]


def load_kind(name: str, options: ValidationOptions) -> ValidationKind:
    """The kind of that name (one of KINDS); its module is imported on demand."""
    match name:
        case "steps":
            return _step_kind(options)
        case "memory":
            return _memory_kind()
        case "collectives":
            from clustersim.validation import collectives as module

            return ValidationKind(
                name,
                module.PUBLISHED_TABLE,
                module.REQUIRED_COLUMNS,
                module.read_collectives,
                _make_summarizer(name, module.compare_collectives),
            )
        case "reliability":
            from clustersim.validation import reliability

            return ValidationKind(
                name,
                reliability.PUBLISHED_TABLE,
                reliability.REQUIRED_COLUMNS,
                reliability.read_reliability,
                _make_summarizer(name, reliability.compare_reliability, reliability.describe_rates),
            )
        case "sites":
            return _sites_kind()
        case _:
            from clustersim.validation import kernels

            return ValidationKind(
                name,
                kernels.PUBLISHED_TABLE,
                kernels.REQUIRED_COLUMNS,
                kernels.read_kernels,
                _make_summarizer(name, kernels.compare_kernels),
            )


def _step_kind(options: ValidationOptions) -> ValidationKind:
    from clustersim.validation import steps

    def summarize(cases: Sequence[ValidationCase]) -> ValidationSummary:
        with count_progress("predicting steps", len(cases)) as progress:
            comparisons = steps.compare_steps(cases, options.changes, workers=options.workers, progress=progress)
            return summarize_steps(cases, comparisons)

    return ValidationKind("steps", steps.PUBLISHED_TABLE, steps.REQUIRED_COLUMNS, steps.read_steps, summarize)


def _memory_kind() -> ValidationKind:
    from clustersim.validation import memory

    def summarize(cases: Sequence[ValidationCase]) -> ValidationSummary:
        with show_activity("predicting memory"):
            return ValidationSummary(
                "memory", tuple(memory.compare_memory(cases)), fit_verdicts=tuple(memory.judge_memory_fit(cases))
            )

    return ValidationKind("memory", memory.PUBLISHED_TABLE, memory.REQUIRED_COLUMNS, memory.read_memory, summarize)


def _sites_kind() -> ValidationKind:
    from clustersim.validation import sites

    def summarize(cases: Sequence[ValidationCase]) -> ValidationSummary:
        simulated = [case for case in cases if sites.is_simulated(case)]
        measured = [case for case in cases if not sites.is_simulated(case)]
        comparisons = tuple(sites.compare_sites(measured))
        return ValidationSummary("sites", comparisons, simulated_by_others=tuple(sites.compare_sites(simulated)))

    return ValidationKind("sites", sites.PUBLISHED_TABLE, sites.REQUIRED_COLUMNS, sites.read_sites, summarize)


def _make_summarizer(
    name: str,
    compare: Callable[[Sequence[ValidationCase]], Sequence[CaseComparison]],
    notes: Callable[[], Sequence[str]] = tuple,
) -> Callable[[Sequence[ValidationCase]], ValidationSummary]:
    def summarize(cases: Sequence[ValidationCase]) -> ValidationSummary:
        with show_activity(f"predicting {name}"):
            return ValidationSummary(name, tuple(compare(cases)), notes=tuple(notes()))

    return summarize


def is_csv_name(argument: str) -> bool:
    """Whether an argument is the name of a CSV table."""
    return Path(argument).suffix.casefold() == ".csv"


def detect_kind(path: Path, options: ValidationOptions) -> ValidationKind:
    """The kind of a table, by its columns; raise InputError where none or several match."""
    columns, kinds = read_columns(path), [load_kind(name, options) for name in KINDS]
    matches = [kind for kind in kinds if not missing_columns(columns, kind.required_columns)]
    if len(matches) > 1:
        names = " or ".join(kind.name for kind in matches)
        raise InputError(
            f"{path}: could be of {names}; say which, as in clustersim validate show {matches[0].name} {path} CASE_ID"
        )
    nearest_kind = min(kinds, key=lambda kind: len(missing_columns(columns, kind.required_columns)))
    if not matches:
        missing_names = ", ".join(missing_columns(columns, nearest_kind.required_columns))
        raise InputError(
            f"{path}: is no table of {', '.join(KINDS)}: as {nearest_kind.name} it is missing {missing_names}"
        )
    return matches[0]


def suggest_case_ids(
    case_id: str, cases: Sequence[ValidationCase], list_command: str = "clustersim validate --json -"
) -> str:
    """End of a sentence about an unknown case id: the ids that contain it or are most similar, at most five.

    list_command: the command that lists all ids.
    """
    ids = list(dict.fromkeys(case.text("case_id") for case in cases))
    folded = {name.casefold(): name for name in ids}
    containing = [name for spelling, name in folded.items() if case_id.casefold() in spelling]
    similar = [folded[match] for match in difflib.get_close_matches(case_id.casefold(), folded, n=3, cutoff=0.5)]
    suggestions = (containing or similar)[:_MAX_SUGGESTED_IDS]
    if suggestions:
        return f"did you mean {' or '.join(suggestions)}?"
    return f"there are {len(ids):,}, such as {ids[0]}; {list_command} lists them"
