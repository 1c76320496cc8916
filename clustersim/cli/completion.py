"""What does a shell offer when a user presses Tab? Files, names of what is shipped, keys of a scenario.

Shells ask `clustersim` itself (typer's protocol). Most of them put a space behind the only word that is offered, so a
folder is offered with what is in it, and names that would have to be quoted are not offered at all. What is heavy is
imported by the functions, since these are named wherever a command is defined.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from shlex import quote


def complete_data_file(incomplete: str) -> list[str]:
    """Scenarios, and other data files, by their beginning; folders end with a slash."""
    from clustersim.common.data_files import is_path

    return _matching_files(incomplete, is_path)


def complete_cluster(incomplete: str) -> list[str]:
    """Names of shipped clusters, the last one of a list with commas."""
    from clustersim.common.data_files import list_names

    prefix, comma, last = incomplete.rpartition(",")
    return [f"{prefix}{comma}{name}" for name in _with_prefix(last, list_names("clusters"))]


def complete_cluster_or_file(incomplete: str) -> list[str]:
    """A shipped cluster, or a data file."""
    from clustersim.common.data_files import list_names

    return [*_with_prefix(incomplete, list_names("clusters")), *complete_data_file(incomplete)]


def complete_override_key(incomplete: str) -> list[str]:
    """Dotted keys of a scenario, up to the sign behind which the value stands."""
    from clustersim.scenario.schema import dotted_keys

    return _with_prefix(incomplete, (f"{key}=" for key in dotted_keys()))


def complete_objective(incomplete: str) -> list[str]:
    """What a search looks for."""
    from clustersim.planning.layouts.objective import Objective

    return _with_prefix(incomplete, (objective.value for objective in Objective))


def complete_import_program(incomplete: str) -> list[str]:
    """Programs whose arguments are read."""
    from clustersim.interop.registry import IMPORTERS

    return _with_prefix(incomplete, IMPORTERS)


def complete_export_program(incomplete: str) -> list[str]:
    """Programs that are written for."""
    from clustersim.cli.export import CHAKRA
    from clustersim.interop.registry import EXPORTERS

    return _with_prefix(incomplete, (CHAKRA, *EXPORTERS))


def complete_validation_target(incomplete: str) -> list[str]:
    """Kinds of published measurements, or a table of one's own."""
    from clustersim.cli.validation_kinds import KINDS, SHOW

    return [*_with_prefix(incomplete, (*KINDS, SHOW)), *_matching_files(incomplete, lambda name: name.endswith(".csv"))]


def _with_prefix(incomplete: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]


def _matching_files(incomplete: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Files by their beginning; of the only folder that begins so, what is in it."""
    matches = sorted(_matching_entries(incomplete, is_wanted))
    while (
        len(matches) == 1 and matches[0].endswith("/") and (entries := sorted(_matching_entries(matches[0], is_wanted)))
    ):
        matches = entries
    return matches


def _matching_entries(incomplete: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Folders and wanted files whose path begins as it was typed; hidden ones only where their dot was."""
    folder, name_prefix = os.path.split(incomplete)
    try:
        entries = list(Path(folder).expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):  # no such folder, no such user, a NUL
        return
    for entry in entries:
        name = entry.name
        is_visible = name_prefix.startswith(".") or not name.startswith(".")
        if is_visible and name.startswith(name_prefix) and quote(name) == name:
            if entry.is_dir():
                yield f"{os.path.join(folder, name)}/"  # noqa: PTH118 - as it was typed
            elif is_wanted(name):
                yield os.path.join(folder, name)  # noqa: PTH118
