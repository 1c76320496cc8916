"""How is one part of a scenario file read?

Strictly: no unknown keys, no quantity without its unit, no number in quotes. A section may have a shorthand
(`cluster: dgx-h100`), which is written out as a mapping before it is validated.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.units import Dimension, parse_quantity
from clustersim.hardware.cluster import MOST_GPUS
from clustersim.model.layer_stack import MOST_LAYERS

MOST_TOKENS = 2**31  # of one sequence, and sequences of one step
MOST_WIDTH = 2**24  # hidden, ffn, heads, vocab


def mistake(sentence: str) -> PydanticCustomError:
    """An error whose text reaches the user as it stands."""
    return PydanticCustomError("mistake", "{sentence}", {"sentence": sentence})


@dataclass(frozen=True)
class Reader:
    """What reads a value that users write, and for the schema what that may be, in words and as far as a type says it.

    The type is looked at when a schema is made: to do so when sections are imported would slow every command.
    """

    read: Callable[..., object]
    legal: str
    examples: tuple[str, ...] = ()
    of: Any = Any

    def __call__(self, value: object) -> object:
        """Read a value."""
        return self.read(value)


def reads(read: Callable[..., object], legal: str, *examples: str, of: Any = Any) -> BeforeValidator:
    """A validator that reads what users write; legal, examples, of: as in `Reader`."""
    return BeforeValidator(Reader(read, legal, examples, of))


def quantity(dimension: Dimension) -> str:
    """What a quantity is called in words."""
    return f"a {dimension.name.lower()} with its unit"


def member(kind: type[Enum], *legal: Enum, absent: str | None = None) -> BeforeValidator:
    """Read the value of an enum's member; `legal` narrows the choice, the word `absent` is read as None."""
    names: dict[str, Enum | None] = {str(choice.value): choice for choice in legal or tuple(kind)}
    if absent is not None:
        names[absent] = None

    def read(value: object) -> object:
        if isinstance(value, str) and value in names:
            return names[value]
        raise mistake(f"{shown(value)} is unknown; {nearest(str(value), names)}")

    return BeforeValidator(read, json_schema_input_type=Literal[tuple(names)])


def _size(value: object) -> float:
    try:
        amount = parse_quantity(value, Dimension.SIZE)
    except InputError as error:
        raise mistake(str(error)) from error
    if amount <= 0:
        raise mistake(f"{shown(value)} is not above zero; write e.g. '25 MiB'")
    if not math.isfinite(amount):
        raise mistake(f"{shown(value)} is not finite; write e.g. '25 MiB'")
    return amount


def moment(value: object) -> float:
    """Read seconds."""
    try:
        amount = parse_quantity(value, Dimension.TIME)
    except InputError as error:
        raise mistake(str(error)) from error
    if not math.isfinite(amount):
        raise mistake(f"{shown(value)} is not finite; write e.g. '10 us'")
    return amount


def duration(value: object) -> float:
    """Read seconds, none of them below zero."""
    amount = moment(value)
    if amount < 0.0:
        raise mistake(f"{shown(value)} is below zero; write e.g. '10 us'")
    return amount


def or_none(value: object) -> object:
    """The word `none` is nothing."""
    return None if value == "none" else value


def size_or(word: str) -> BeforeValidator:
    """Read a size, or a word that is read as None."""

    def read(value: object) -> float | None:
        if value == word:
            return None
        try:
            return _size(value)
        except PydanticCustomError as error:
            raise mistake(f"{error.message()}, or {word}") from error

    return reads(read, f"{quantity(Dimension.SIZE)}, or {word}", "25 MiB")


_PERCENT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*$")
_TEXT_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,2})")


def share(least: float, most: float, remedy: str = "") -> BeforeValidator:
    """Read a share, a number or a percentage (`0.9` or `90 %`), from `least` to `most`.

    A number above 1 is refused, since it is nearly always a percentage without its sign. remedy: ends the refusal of
    what is too small.
    """

    def read(value: object) -> float:
        match = _PERCENT.match(value) if isinstance(value, str) else None
        number = float(match[1]) / 100 if match else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            meant = yaml_number(value)
            raise mistake(
                meant or f"{shown(value)} is not a share; write a number or a percentage, such as 0.1 or 10 %"
            )
        if match is None and number > 1:
            raise mistake(_without_sign(number, least, most))
        if not least <= number <= most:
            legal = f"{100 * least:g} % and {100 * most:g} %" if match else f"{least:g} and {min(most, 1.0):g}"
            raise mistake(f"{shown(value)} is not between {legal}{remedy if number < least else ''}")
        return float(number)

    plain = f"{least:g} to {min(most, 1.0):g}"
    return reads(read, f"a share: {plain}, or {100 * least:g} % to {100 * most:,g} %", of=float | str)


def _without_sign(number: float, least: float, most: float) -> str:
    """What is wrong with a number above 1, and the percentages that it may stand for."""
    legal = [f"{item:,.12g} %" for item in (number, 100 * number) if least <= item / 100 <= most]
    if not legal:
        return f"{shown(number)} is more than all of it; the most is {100 * most:g} %"
    return f"{shown(number)} is more than all of it; write {' (or '.join(legal)}{')' * (len(legal) - 1)}"


def yaml_number(value: object, *, whole: bool = False) -> str:
    """What is wrong with a number that YAML 1.1 reads as a text (it wants a point and a sign); empty if it is not that.

    >>> yaml_number("1e9")
    "'1e9' is a text in YAML; write 1.0e+9 or 1000000000"
    >>> yaml_number("1e9", whole=True), yaml_number("9")
    ("'1e9' is a text in YAML; write 1000000000", '')
    """
    match = _TEXT_NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    mantissa, power = match[1], int(match[2])
    plain = f"{Decimal(f'{mantissa}e{power}'):f}"
    exponent = f"{mantissa}{'' if '.' in mantissa else '.0'}e{power:+d}"
    legal = [plain] if whole else [exponent, plain]
    return f"{shown(value)} is a text in YAML; write {' or '.join(legal)}" if not (whole and "." in plain) else ""


def _named(value: str) -> str:
    if not value.strip():
        raise mistake("is empty; write a name")
    return value


Duration = Annotated[float, reads(duration, quantity(Dimension.TIME), "10 us")]
Moment = Annotated[float, reads(moment, quantity(Dimension.TIME), "-10 ms")]
Degree = Annotated[int, Field(ge=1, le=MOST_GPUS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Ends = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Size = Annotated[float, reads(_size, quantity(Dimension.SIZE), "25 MiB")]
Name = Annotated[str, AfterValidator(_named)]


class Section(BaseModel):
    """A part of the file.

    short: the key that a bare word (or number) stands for, if any; example: what a user may write, if one says more
    than the list of keys. The string below a key says what it means and, behind `; left out:`, what happens without it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    short: ClassVar[str | None] = None
    example: ClassVar[str] = ""

    @classmethod
    def written_out(cls, value: object) -> object:
        """The mapping that a shorthand stands for; anything else as it is."""
        bare = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        return {cls.short: value} if cls.short is not None and bare else value

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return cls.written_out(value)

    @classmethod
    def keys(cls) -> dict[str, Any]:
        """The legal keys, as the file writes them, with the types of their values."""
        return {field.alias or name: field.annotation for name, field in cls.model_fields.items()}

    @classmethod
    def at(cls, path: Iterable[int | str]) -> "type[Section] | None":
        """The section that a path of keys leads to; None where it leads to a plain value or nowhere."""
        section: type[Section] | None = cls
        named = False  # whether a name that the user gave comes next
        for key in path:
            if isinstance(key, int) or named:  # the place in a list of sections
                named = False
                continue
            annotation = section.keys().get(key) if section is not None else None
            named = get_origin(annotation) is dict
            section = _section_in(annotation)
        return section


def _section_in(annotation: object) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


class Shipped(Section):
    """Something that is shipped under a name or read from a file; a bare word that ends like a file is a path."""

    path: Name | None = None
    """a file in place of a name, beside the scenario; left out: none"""

    @classmethod
    def written_out(cls, value: object) -> object:
        """A file's name is `path`, another word is the name."""
        if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml")):
            return {"path": value}
        return super().written_out(value)


class Choice(Section):
    """A mapping with exactly one key, the name of what is chosen; its value holds the options, or nothing."""

    words: ClassVar[dict[str, Any]] = {}  # bare words and what they stand for

    @classmethod
    def written_out(cls, value: object) -> object:
        """A bare word is a choice without options."""
        if isinstance(value, str):
            if value not in cls.words:
                raise mistake(f"{shown(value)} is unknown; {nearest(value, cls.words)}")
            return cls.words[value]
        if isinstance(value, dict):
            return {name: {} if options is None else options for name, options in value.items()}
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise mistake(f"needs exactly one of {', '.join(self.keys())}")
        return self

    @property
    def chosen(self) -> tuple[str, Any]:
        """The key and its validated options."""
        name = next(iter(self.model_fields_set))
        return type(self).model_fields[name].alias or name, getattr(self, name)
