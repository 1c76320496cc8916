"""What does a shell offer when a user presses Tab? Files, names of packaged presets, keys of a scenario.

Shells call `clustersim` itself (typer's completion protocol). Most of them append a space to the only
candidate, so a folder is offered together with its content; names that would need quoting are not offered.
Heavy modules are imported inside the functions, because the functions are referenced where commands are
defined.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from shlex import quote


def complete_data_file(incomplete: str) -> list[str]:
    """Scenarios and other data files that start with the incomplete path; folders end with a slash."""
    from clustersim.common.data_files import is_path

    return _matching_files(incomplete, is_path)


def complete_cluster(incomplete: str) -> list[str]:
    """Names of packaged clusters; completes the last element of a comma-separated list."""
    from clustersim.common.data_files import list_names

    prefix, comma, last = incomplete.rpartition(",")
    return [f"{prefix}{comma}{name}" for name in _with_prefix(last, list_names("clusters"))]


def complete_cluster_or_file(incomplete: str) -> list[str]:
    """Names of packaged clusters, and data files."""
    from clustersim.common.data_files import list_names

    return [*_with_prefix(incomplete, list_names("clusters")), *complete_data_file(incomplete)]


def complete_override_key(incomplete: str) -> list[str]:
    """Dotted keys of a scenario, each with the trailing `=`."""
    from clustersim.scenario.schema import dotted_keys

    return _with_prefix(incomplete, (f"{key}=" for key in dotted_keys()))


def complete_objective(incomplete: str) -> list[str]:
    """Objectives of a search."""
    from clustersim.planning.layouts.objective import Objective

    return _with_prefix(incomplete, (objective.value for objective in Objective))


def complete_import_program(incomplete: str) -> list[str]:
    """Programs whose arguments can be imported."""
    from clustersim.interop.detect import AUTO
    from clustersim.interop.machines import MACHINE_READERS
    from clustersim.interop.registry import IMPORTERS

    return _with_prefix(incomplete, (AUTO, *IMPORTERS, *MACHINE_READERS))


def complete_export_program(incomplete: str) -> list[str]:
    """Programs that can be exported to."""
    from clustersim.cli.export import CHAKRA
    from clustersim.interop.registry import EXPORTERS

    return _with_prefix(incomplete, (CHAKRA, *EXPORTERS))


def complete_validation_target(incomplete: str) -> list[str]:
    """Kinds of published measurements, and CSV tables of the user's own."""
    from clustersim.cli.validation_kinds import KINDS, SHOW

    return [*_with_prefix(incomplete, (*KINDS, SHOW)), *_matching_files(incomplete, lambda name: name.endswith(".csv"))]


def _with_prefix(incomplete: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]


def _matching_files(incomplete: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Files that start with the incomplete path; descends into a folder that is the only match."""
    matches = sorted(_matching_entries(incomplete, is_wanted))
    while (
        len(matches) == 1 and matches[0].endswith("/") and (entries := sorted(_matching_entries(matches[0], is_wanted)))
    ):
        matches = entries
    return matches


def _matching_entries(incomplete: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Folders and wanted files whose path starts as typed; hidden ones only where their dot was typed."""
    folder, name_prefix = os.path.split(incomplete)
    try:
        entries = list(Path(folder).expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):  # no such folder, no such user, or a NUL character
        return
    for entry in entries:
        name = entry.name
        is_visible = name_prefix.startswith(".") or not name.startswith(".")
        if is_visible and name.startswith(name_prefix) and quote(name) == name:
            if entry.is_dir():
                yield f"{os.path.join(folder, name)}/"  # noqa: PTH118 - keep the path as typed
            elif is_wanted(name):
                yield os.path.join(folder, name)  # noqa: PTH118
