"""Which keys of a framework file does a version of the software change?

A file lists `versions`, dates of the software's code (an entry is what it was from that day on) or names, or
`releases`, numbers such as 2.10, where an entry is what all releases up to that one are.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError, format_value

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_RELEASE: Final = re.compile(r"\d+(?:\.\d+)+")


def version_changes(
    path: Path, version: str, versions: Mapping[str, Any], releases: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The keys that a version changes."""
    if not releases:
        changes: Mapping[str, Any] = versions[selected_version(path.stem, version, versions)]
        return changes
    if not _RELEASE.fullmatch(version):
        raise _unknown_version(
            path.stem, version, f"write a release, such as {next(iter(releases))}; left out: the newest"
        )
    return _release_changes(version, releases)


def _release_changes(release: str, releases: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The keys of the first listed release that is not older, since each stands for all up to it; newest: none.

    >>> _release_changes("2.7.1", {"2.10": {"attention": "flash2"}}), _release_changes("2.11", {"2.10": {"host": {}}})
    ({'attention': 'flash2'}, {})
    """
    later = [listed for listed in releases if _release_numbers(listed) >= _release_numbers(release)]
    return releases[min(later, key=_release_numbers)] if later else {}


def _release_numbers(release: str) -> tuple[int, ...]:
    """Numbers of a release, which order releases."""
    return tuple(map(int, release.split(".")))


def selected_version(framework: str, version: str, versions: Mapping[str, Any]) -> str:
    """The entry of a version; of dates, the last one that is not later; the last one if no version is named.

    >>> selected_version("torchtitan", "2025-03-01", {"2023-12-01": {}, "2025-02-24": {}, "2025-04-02": {}})
    '2025-02-24'
    """
    if version in versions:
        return version
    if not version and versions:
        return [*versions][-1]
    is_dated = bool(versions) and all(map(_DATE.fullmatch, versions))
    earlier = [date for date in sorted(versions) if date <= version]
    if is_dated and _DATE.fullmatch(version) and earlier:
        return earlier[-1]
    raise _unknown_version(framework, version, _available_versions(versions, is_dated=is_dated))


def _available_versions(versions: Mapping[str, Any], *, is_dated: bool) -> str:
    """Which versions a user may write."""
    if not versions:
        return "its file describes one version only, leave it out"
    listed = f"write the date of its code, {min(versions)} or later" if is_dated else f"it has {', '.join(versions)}"
    return f"{listed}; left out: the newest"


def _unknown_version(framework: str, version: str, available: str) -> InputError:
    return InputError(f"version: {format_value(version)} of {framework} is unknown; {available}")
