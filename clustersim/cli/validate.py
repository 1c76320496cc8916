"""What does `clustersim validate` do? Predict published cases, or a user's, and say how far off the predictions are.

clustersim validate                     all shipped cases
clustersim validate steps [FILE.csv]    one kind: the shipped cases, or those of a file
clustersim validate steps --set KEY=VALUE  steps with keys of their scenarios changed, such as cost.network
clustersim validate show CASE_ID        one shipped case: its scenario, and where the predicted time goes
clustersim validate show [KIND] FILE.csv CASE_ID  one case of a file
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.validation_kinds import KINDS, MOST_BEFORE_ID, SHOW, Choice, Kind, is_table, load_kind, near_ids
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.validation.cases import Case
from clustersim.validation.summary import Summary


def run_validation(words: Sequence[str], choice: Choice, outputs: Outputs) -> None:
    """Answer; words: what stands behind `validate`, without options."""
    if choice.changes and list(words[:1]) != [KINDS[0]]:
        raise InputError(f"--set {choice.changes[0]}: is for steps, as in clustersim validate steps --set")
    match words:
        case []:
            validate_shipped(choice, outputs)
        case ["show", *which, case_id] if len(which) <= MOST_BEFORE_ID:
            from clustersim.cli.validation_show import show_case

            show_case(which, case_id, choice, outputs)
        case [kind] if _is_kind(kind):
            validate_table(load_kind(kind, choice), None, choice, outputs)
        case [kind, file] if _is_kind(kind):
            validate_table(load_kind(kind, choice), Path(file), choice, outputs)
        case _:
            more = " ".join(words[2:])
            raise InputError(f"validate takes a kind and one file or case, not also {format_value(more)}")


def _is_kind(word: str) -> bool:
    """Whether it is one; raise InputError with the nearest if not."""
    if word in KINDS:
        return True
    if word == SHOW:
        raise InputError(
            "validate show needs the id of one case, after the file that it is in if it is one of yours; "
            "clustersim validate --json - lists the shipped ones"
        )
    if is_table(word):
        raise InputError(f"{word}: say what it holds ({', '.join(KINDS)}), as in clustersim validate steps {word}")
    raise InputError(f"validate {format_value(word)}: there is no such kind; {suggest_nearest(word, (*KINDS, SHOW))}")


def validate_table(kind: Kind, file: Path | None, choice: Choice, outputs: Outputs) -> None:
    """Predict the cases of a file, or the shipped ones of a kind."""
    path = file or kind.shipped
    every = kind.read(path)
    outputs.require([path])
    cases = choice.of(every)
    if not cases:
        raise _none_chosen(choice, every)
    summary = kind.summarize(cases)
    title = f"{path.name}, {kind.name}" if file else f"published {kind.name}"
    _answer([summary], summary.to_json(), title, outputs)


def validate_shipped(choice: Choice, outputs: Outputs) -> None:
    """Predict all shipped cases."""
    kinds = [load_kind(name, choice) for name in KINDS]
    every = [kind.read(kind.shipped) for kind in kinds]
    outputs.require([kind.shipped for kind in kinds])
    chosen = [choice.of(cases) for cases in every]
    if not any(chosen):
        raise _none_chosen(choice, [case for cases in every for case in cases])
    summaries = [kind.summarize(cases) for kind, cases in zip(kinds, chosen, strict=True)]
    steps, *others = summaries
    content = steps.to_json() | {summary.kind: summary.to_json() for summary in others}
    _answer([item for item in summaries if item.comparisons or item.simulated], content, "published cases", outputs)


def _none_chosen(choice: Choice, cases: Sequence[Case]) -> InputError:
    return InputError(f"--only {format_value(choice.only)}: no case id contains it; {near_ids(choice.only, cases)}")


def _answer(summaries: Sequence[Summary], content: Mapping[str, Any], title: str, outputs: Outputs) -> None:
    """Write what was asked for, and print the tables."""
    if outputs.json is not None:
        write_json(content, outputs.json)
    if outputs.html is not None:
        from clustersim.cli.validation_page import write_page

        write_page(summaries, f"Predicted against measured: {title}", outputs.html)
    if outputs.table:
        from clustersim.cli.validation_table import print_summaries

        print_summaries(summaries)
        for path in outputs.files.values():
            announce(path)
