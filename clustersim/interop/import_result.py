"""What came of another program's arguments?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ImportResult:
    """A scenario file's mapping. passed_over: arguments that it does not say; assumed: what the arguments do not say.

    Both are sentences for whoever reads the scenario.
    """

    mapping: Mapping[str, Any]
    ignored_arguments: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
