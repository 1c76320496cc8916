"""What does importing another program's arguments yield?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class ImportContext:
    """What surrounds a file that is imported.

    directory: where files that it names are, None: nowhere; definitions: environment variables, and positional
    parameters by number; overridden: keys of the scenario that the user sets, so that the file need not.
    """

    directory: Path | None = None
    definitions: Mapping[str, str] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()


NO_CONTEXT: Final = ImportContext()
"""Of a file that names no other, or whose surroundings are not known."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The mapping of a scenario file, with remarks for the user.

    ignored_arguments: arguments that it cannot express; assumptions: what the arguments leave open. Both are
    sentences.
    """

    mapping: Mapping[str, Any]
    ignored_arguments: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
