"""What of a value is pickled and copied?"""

from dataclasses import Field, fields
from typing import Any, ClassVar


class FieldPickling:
    """A dataclass whose state is its fields: what cached properties found is left behind, and found again if needed."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __getstate__(self) -> dict[str, Any]:
        return {dataclass_field.name: getattr(self, dataclass_field.name) for dataclass_field in fields(self)}
