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

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.units import Dimension, parse_quantity
from clustersim.hardware.cluster import MAX_GPUS
from clustersim.model.layer_stack import MAX_LAYERS

MAX_TOKENS = 2**31  # of one sequence, and sequences of one step
MAX_WIDTH = 2**24  # hidden, ffn, heads, vocab


def config_error(message: str) -> PydanticCustomError:
    """An error whose text reaches the user as it stands."""
    return PydanticCustomError("mistake", "{sentence}", {"sentence": message})


@dataclass(frozen=True)
class ValueParser:
    """What reads a value that users write, and for the schema what that may be, in words and as far as a type says it.

    The type is looked at when a schema is made: to do so when sections are imported would slow every command.
    """

    parse: Callable[..., object]
    allowed: str
    examples: tuple[str, ...] = ()
    schema_type: Any = Any

    def __call__(self, value: object) -> object:
        """Read a value."""
        return self.parse(value)


def value_parser(parse: Callable[..., object], allowed: str, *examples: str, schema_type: Any = Any) -> BeforeValidator:
    """A validator that reads what users write; legal, examples, of: as in `ValueParser`."""
    return BeforeValidator(ValueParser(parse, allowed, examples, schema_type))


def quantity_label(dimension: Dimension) -> str:
    """What a quantity is called in words."""
    return f"a {dimension.name.lower()} with its unit"


def enum_parser(enum_type: type[Enum], *choices: Enum, none_word: str | None = None) -> BeforeValidator:
    """Read the value of an enum's member; `legal` narrows the choice, the word `absent` is read as None."""
    names: dict[str, Enum | None] = {str(choice.value): choice for choice in choices or tuple(enum_type)}
    if none_word is not None:
        names[none_word] = None

    def parse(value: object) -> object:
        if isinstance(value, str) and value in names:
            return names[value]
        raise config_error(f"{format_value(value)} is unknown; {suggest_nearest(str(value), names)}")

    return BeforeValidator(parse, json_schema_input_type=Literal[tuple(names)])


def _parse_size(value: object) -> float:
    try:
        amount = parse_quantity(value, Dimension.SIZE)
    except InputError as error:
        raise config_error(str(error)) from error
    if amount <= 0:
        raise config_error(f"{format_value(value)} is not above zero; write e.g. '25 MiB'")
    if not math.isfinite(amount):
        raise config_error(f"{format_value(value)} is not finite; write e.g. '25 MiB'")
    return amount


def parse_timestamp(value: object) -> float:
    """Read seconds."""
    try:
        amount = parse_quantity(value, Dimension.TIME)
    except InputError as error:
        raise config_error(str(error)) from error
    if not math.isfinite(amount):
        raise config_error(f"{format_value(value)} is not finite; write e.g. '10 us'")
    return amount


def parse_duration(value: object) -> float:
    """Read seconds, none of them below zero."""
    amount = parse_timestamp(value)
    if amount < 0.0:
        raise config_error(f"{format_value(value)} is below zero; write e.g. '10 us'")
    return amount


def none_from_word(value: object) -> object:
    """The word `none` is nothing."""
    return None if value == "none" else value


def size_or_word_parser(word: str) -> BeforeValidator:
    """Read a size, or a word that is read as None."""

    def parse(value: object) -> float | None:
        if value == word:
            return None
        try:
            return _parse_size(value)
        except PydanticCustomError as error:
            raise config_error(f"{error.message()}, or {word}") from error

    return value_parser(parse, f"{quantity_label(Dimension.SIZE)}, or {word}", "25 MiB")


_PERCENT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*$")
_TEXT_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,2})")


def fraction_parser(minimum: float, maximum: float, hint: str = "") -> BeforeValidator:
    """Read a share, a number or a percentage (`0.9` or `90 %`), from `least` to `most`.

    A number above 1 is refused, since it is nearly always a percentage without its sign. remedy: ends the refusal of
    what is too small.
    """

    def parse(value: object) -> float:
        match = _PERCENT.match(value) if isinstance(value, str) else None
        fraction = float(match[1]) / 100 if match else value
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            yaml_message = yaml_number_message(value)
            raise config_error(
                yaml_message
                or f"{format_value(value)} is not a share; write a number or a percentage, such as 0.1 or 10 %"
            )
        if match is None and fraction > 1:
            raise config_error(_missing_percent_message(fraction, minimum, maximum))
        if not minimum <= fraction <= maximum:
            allowed_range = (
                f"{100 * minimum:g} % and {100 * maximum:g} %" if match else f"{minimum:g} and {min(maximum, 1.0):g}"
            )
            raise config_error(
                f"{format_value(value)} is not between {allowed_range}{hint if fraction < minimum else ''}"
            )
        return float(fraction)

    decimal_range = f"{minimum:g} to {min(maximum, 1.0):g}"
    return value_parser(
        parse, f"a share: {decimal_range}, or {100 * minimum:g} % to {100 * maximum:,g} %", schema_type=float | str
    )


def _missing_percent_message(value: float, minimum: float, maximum: float) -> str:
    """What is wrong with a number above 1, and the percentages that it may stand for."""
    candidates = [f"{item:,.12g} %" for item in (value, 100 * value) if minimum <= item / 100 <= maximum]
    if not candidates:
        return f"{format_value(value)} is more than all of it; the most is {100 * maximum:g} %"
    return (
        f"{format_value(value)} is more than all of it; write {' (or '.join(candidates)}{')' * (len(candidates) - 1)}"
    )


def yaml_number_message(value: object, *, integer: bool = False) -> str:
    """What is wrong with a number that YAML 1.1 reads as a text (it wants a point and a sign); empty if it is not that.

    >>> yaml_number("1e9")
    "'1e9' is a text in YAML; write 1.0e+9 or 1000000000"
    >>> yaml_number("1e9", whole=True), yaml_number("9")
    ("'1e9' is a text in YAML; write 1000000000", '')
    """
    match = _TEXT_NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    mantissa, exponent = match[1], int(match[2])
    decimal_text = f"{Decimal(f'{mantissa}e{exponent}'):f}"
    float_text = f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent:+d}"
    spellings = [decimal_text] if integer else [float_text, decimal_text]
    return (
        f"{format_value(value)} is a text in YAML; write {' or '.join(spellings)}"
        if not (integer and "." in decimal_text)
        else ""
    )


def _require_non_empty(value: str) -> str:
    if not value.strip():
        raise config_error("is empty; write a name")
    return value


Duration = Annotated[float, value_parser(parse_duration, quantity_label(Dimension.TIME), "10 us")]
Timestamp = Annotated[float, value_parser(parse_timestamp, quantity_label(Dimension.TIME), "-10 ms")]
Degree = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
LayerCountOrZero = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
LayerCount = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
SizeBytes = Annotated[float, value_parser(_parse_size, quantity_label(Dimension.SIZE), "25 MiB")]
NonEmptyText = Annotated[str, AfterValidator(_require_non_empty)]


class ConfigModel(BaseModel):
    """A part of the file.

    short: the key that a bare word (or number) stands for, if any; example: what a user may write, if one says more
    than the list of keys. The string below a key says what it means and, behind `; left out:`, what happens without it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    shorthand_key: ClassVar[str | None] = None
    example: ClassVar[str] = ""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """The mapping that a shorthand stands for; anything else as it is."""
        is_scalar = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        return {cls.shorthand_key: value} if cls.shorthand_key is not None and is_scalar else value

    @model_validator(mode="before")
    @classmethod
    def _expand_before_validation(cls, value: object) -> object:
        return cls.expand_shorthand(value)

    @classmethod
    def key_types(cls) -> dict[str, Any]:
        """The legal keys, as the file writes them, with the types of their values."""
        return {field.alias or name: field.annotation for name, field in cls.model_fields.items()}

    @classmethod
    def config_at(cls, path: Iterable[int | str]) -> "type[ConfigModel] | None":
        """The section that a path of keys leads to; None where it leads to a plain value or nowhere."""
        model: type[ConfigModel] | None = cls
        is_user_named = False  # whether a name that the user gave comes next
        for key in path:
            if isinstance(key, int) or is_user_named:  # the place in a list of sections
                is_user_named = False
                continue
            annotation = model.key_types().get(key) if model is not None else None
            is_user_named = get_origin(annotation) is dict
            model = _model_in_annotation(annotation)
        return model


def _model_in_annotation(annotation: object) -> type[ConfigModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    return next(filter(None, map(_model_in_annotation, get_args(annotation))), None)


class PresetOrPathConfig(ConfigModel):
    """Something that is shipped under a name or read from a file; a bare word that ends like a file is a path."""

    path: NonEmptyText | None = None
    """a file in place of a name, beside the scenario; left out: none"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """A file's name is `path`, another word is the name."""
        if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml")):
            return {"path": value}
        return super().expand_shorthand(value)


class OneOfConfig(ConfigModel):
    """A mapping with exactly one key, the name of what is chosen; its value holds the options, or nothing."""

    shorthands: ClassVar[dict[str, Any]] = {}  # bare words and what they stand for

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """A bare word is a choice without options."""
        if isinstance(value, str):
            if value not in cls.shorthands:
                raise config_error(f"{format_value(value)} is unknown; {suggest_nearest(value, cls.shorthands)}")
            return cls.shorthands[value]
        if isinstance(value, dict):
            return {name: {} if options is None else options for name, options in value.items()}
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise config_error(f"needs exactly one of {', '.join(self.key_types())}")
        return self

    @property
    def chosen(self) -> tuple[str, Any]:
        """The key and its validated options."""
        name = next(iter(self.model_fields_set))
        return type(self).model_fields[name].alias or name, getattr(self, name)
