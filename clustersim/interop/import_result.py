"""What came of another program's arguments?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Imported:
    """A scenario file's mapping. passed_over: arguments that it does not say; assumed: what the arguments do not say.

    Both are sentences for whoever reads the scenario.
    """

    mapping: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
