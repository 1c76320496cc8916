"""Pickling of dataclasses by their fields."""

from dataclasses import Field, fields
from typing import Any, ClassVar


class FieldPickling:
    """Mixin of dataclasses that pickles and copies fields only.

    Cached properties are dropped and recomputed on demand.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __getstate__(self) -> dict[str, Any]:
        return {dataclass_field.name: getattr(self, dataclass_field.name) for dataclass_field in fields(self)}
