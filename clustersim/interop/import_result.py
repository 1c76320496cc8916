"""What does importing another program's arguments yield?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The mapping of a scenario file, with remarks for the user.

    ignored_arguments: arguments that it cannot express; assumptions: what the arguments leave open. Both are
    sentences.
    """

    mapping: Mapping[str, Any]
    ignored_arguments: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
