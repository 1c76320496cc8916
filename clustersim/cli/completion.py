"""What does a shell offer when a user presses Tab? Files, names of what is shipped, keys of a scenario.

Shells ask `clustersim` itself (typer's protocol). Most of them put a space behind the only word that is offered, so a
folder is offered with what is in it, and names that would have to be quoted are not offered at all. What is heavy is
imported by the functions, since these are named wherever a command is defined.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from shlex import quote


def data_files(incomplete: str) -> list[str]:
    """Scenarios, and other data files, by their beginning; folders end with a slash."""
    from clustersim.common.data_files import is_path

    return _files(incomplete, is_path)


def clusters(incomplete: str) -> list[str]:
    """Names of shipped clusters, the last one of a list with commas."""
    from clustersim.common.data_files import list_names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, list_names("clusters"))]


def cluster_or_file(incomplete: str) -> list[str]:
    """A shipped cluster, or a data file."""
    from clustersim.common.data_files import list_names

    return [*_beginning(incomplete, list_names("clusters")), *data_files(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Dotted keys of a scenario, up to the sign behind which the value stands."""
    from clustersim.scenario.schema import dotted_keys

    return _beginning(incomplete, (f"{key}=" for key in dotted_keys()))


def objectives(incomplete: str) -> list[str]:
    """What a search looks for."""
    from clustersim.planning.layouts.objective import Objective

    return _beginning(incomplete, (objective.value for objective in Objective))


def programs(incomplete: str) -> list[str]:
    """Programs whose arguments are read."""
    from clustersim.interop.registry import READERS

    return _beginning(incomplete, READERS)


def writers(incomplete: str) -> list[str]:
    """Programs that are written for."""
    from clustersim.cli.export import CHAKRA
    from clustersim.interop.registry import WRITERS

    return _beginning(incomplete, (CHAKRA, *WRITERS))


def kinds_or_table(incomplete: str) -> list[str]:
    """Kinds of published measurements, or a table of one's own."""
    from clustersim.cli.validation_kinds import KINDS, SHOW

    return [*_beginning(incomplete, (*KINDS, SHOW)), *_files(incomplete, lambda name: name.endswith(".csv"))]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _files(incomplete: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Files by their beginning; of the only folder that begins so, what is in it."""
    found = sorted(_entries(incomplete, is_wanted))
    while len(found) == 1 and found[0].endswith("/") and (inside := sorted(_entries(found[0], is_wanted))):
        found = inside
    return found


def _entries(incomplete: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Folders and wanted files whose path begins as it was typed; hidden ones only where their dot was."""
    folder, beginning = os.path.split(incomplete)
    try:
        entries = list(Path(folder).expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):  # no such folder, no such user, a NUL
        return
    for entry in entries:
        name = entry.name
        shown = beginning.startswith(".") or not name.startswith(".")
        if shown and name.startswith(beginning) and quote(name) == name:
            if entry.is_dir():
                yield f"{os.path.join(folder, name)}/"  # noqa: PTH118 - as it was typed
            elif is_wanted(name):
                yield os.path.join(folder, name)  # noqa: PTH118
