"""How is a section of a scenario file parsed? Base classes of the pydantic config models, and value parsers.

Parsing is strict: no unknown keys, no quantity without its unit, no number in quotes. A section may have a
shorthand (`cluster: dgx-h100`), which is expanded into a mapping before validation.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
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

MAX_TOKENS = 2**31  # tokens per sequence, and sequences per step
MAX_WIDTH = 2**24  # hidden, ffn, heads, vocab


def config_error(message: str) -> PydanticCustomError:
    """A validation error whose message is shown to the user verbatim."""
    return PydanticCustomError("mistake", "{sentence}", {"sentence": message})


@dataclass(frozen=True)
class ValueParser:
    """Parses a value of the file; describes the allowed values for the JSON schema, in words and by type.

    schema_type is resolved only when a schema is generated: at import it would slow down every command.
    """

    parse: Callable[..., object]
    allowed: str
    examples: tuple[str, ...] = ()
    schema_type: Any = Any

    def __call__(self, value: object) -> object:
        """Parse a value."""
        return self.parse(value)


def value_parser(parse: Callable[..., object], allowed: str, *examples: str, schema_type: Any = Any) -> BeforeValidator:
    """A pydantic validator that parses a value of the file; allowed, examples, schema_type: as in `ValueParser`."""
    return BeforeValidator(ValueParser(parse, allowed, examples, schema_type))


def quantity_label(dimension: Dimension) -> str:
    """Description of a quantity of a dimension, such as `a time with its unit`."""
    return f"a {dimension.name.lower()} with its unit"


def suggest_value(word: str, choices: Collection[str]) -> str:
    """What to write instead of a word that is none of the choices."""
    from clustersim.common.synonyms import find_value_synonym

    meant = find_value_synonym(word, choices)
    return f"did you mean {meant}?" if meant else suggest_nearest(word, choices)


def enum_parser(enum_type: type[Enum], *choices: Enum, none_word: str | None = None) -> BeforeValidator:
    """A validator that parses the value of an enum's member.

    choices: the members that are allowed, all if empty; none_word: a word that is parsed as None.
    """
    names: dict[str, Enum | None] = {str(choice.value): choice for choice in choices or tuple(enum_type)}
    if none_word is not None:
        names[none_word] = None

    def parse(value: object) -> object:
        if isinstance(value, str) and value in names:
            return names[value]
        raise config_error(f"{format_value(value)} is unknown; {suggest_value(str(value), names)}")

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
    """Parse a time with its unit into seconds; it may be negative."""
    try:
        amount = parse_quantity(value, Dimension.TIME)
    except InputError as error:
        raise config_error(str(error)) from error
    if not math.isfinite(amount):
        raise config_error(f"{format_value(value)} is not finite; write e.g. '10 us'")
    return amount


def parse_duration(value: object) -> float:
    """Parse a time with its unit into seconds; raises a config error if it is negative."""
    amount = parse_timestamp(value)
    if amount < 0.0:
        raise config_error(f"{format_value(value)} is below zero; write e.g. '10 us'")
    return amount


def none_from_word(value: object) -> object:
    """None for the word `none`; any other value unchanged."""
    return None if value == "none" else value


def size_or_word_parser(word: str) -> BeforeValidator:
    """A validator that parses a size in bytes, or one given word as None."""

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
    """A validator that parses a fraction (`0.9`) or a percentage (`90 %`) within [minimum, maximum].

    A number above 1 is refused, since it is nearly always a percentage without its sign. hint: appended to the
    message for values below the minimum.
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
    """Error message for a number above 1, with the percentages that it may stand for."""
    candidates = [f"{candidate:,.12g} %" for candidate in (value, 100 * value) if minimum <= candidate / 100 <= maximum]
    if not candidates:
        return f"{format_value(value)} is more than all of it; the most is {100 * maximum:g} %"
    return (
        f"{format_value(value)} is more than all of it; write {' (or '.join(candidates)}{')' * (len(candidates) - 1)}"
    )


def yaml_number_message(value: object, *, integer: bool = False) -> str:
    """Error message for a number that YAML 1.1 parses as a string (it needs a point and a sign); empty if none.

    >>> yaml_number_message("1e9")
    "'1e9' is a text in YAML; write 1.0e+9 or 1000000000"
    >>> yaml_number_message("1e9", integer=True), yaml_number_message("9")
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
    """Base of the config models: a section of the file.

    shorthand_key: the key that a bare string or number stands for, if any; example: what a user may write, where
    that says more than the list of keys. The string below a key describes it and, after `; left out:`, its
    default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    shorthand_key: ClassVar[str | None] = None
    example: ClassVar[str] = ""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand a shorthand into the mapping that it stands for; any other value is returned unchanged."""
        is_scalar = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        return {cls.shorthand_key: value} if cls.shorthand_key is not None and is_scalar else value

    @model_validator(mode="before")
    @classmethod
    def _expand_before_validation(cls, value: object) -> object:
        return cls.expand_shorthand(value)

    @classmethod
    def key_types(cls) -> dict[str, Any]:
        """The allowed keys, as spelled in the file, with the types of their values."""
        return {field.alias or name: field.annotation for name, field in cls.model_fields.items()}

    def stated_values(self) -> dict[str, Any]:
        """Values by field, without those of None: what the user left to a default of elsewhere."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    @classmethod
    def config_at(cls, path: Iterable[int | str]) -> "type[ConfigModel] | None":
        """The config model at a path of keys; None where the path leads to a plain value or does not exist."""
        model: type[ConfigModel] | None = cls
        is_user_named = False  # whether the next key is a user-defined name
        for key in path:
            if isinstance(key, int) or is_user_named:  # an index into a list of sections
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


def _parse_accelerator(value: object) -> object:
    """A name or a path, or a mapping of an accelerator file's keys, which is checked with the cluster."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, Mapping) and value:
        return dict(value)
    raise config_error(f"{format_value(value)} is neither a name nor a mapping; write e.g. {{like: h100-sxm-80gb}}")


AcceleratorSource = Annotated[
    str | dict[str, Any],
    value_parser(
        _parse_accelerator,
        "a file of topologies/accelerators, or a mapping, see [Accelerators](clusters.md#an-accelerator-of-your-own)",
        schema_type=str | dict[str, Any],
    ),
]


class PresetOrPathConfig(ConfigModel):
    """A section that selects packaged data by name or a file by path; a bare string with a file extension is a path."""

    path: NonEmptyText | None = None
    """a file instead of a name, relative to the scenario; left out: none"""

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand a bare file name to `path`, any other bare string to the shorthand key."""
        if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml")):
            return {"path": value}
        return super().expand_shorthand(value)


class OneOfConfig(ConfigModel):
    """A mapping with exactly one key, which selects a variant (tagged union); its value holds the options."""

    shorthands: ClassVar[dict[str, Any]] = {}  # bare words and their expansions

    @classmethod
    def expand_shorthand(cls, value: object) -> object:
        """Expand a bare word to the variant without options."""
        if isinstance(value, str):
            if value not in cls.shorthands:
                raise config_error(f"{format_value(value)} is unknown; {suggest_value(value, cls.shorthands)}")
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
        """The selected key and its validated options."""
        name = next(iter(self.model_fields_set))
        return type(self).model_fields[name].alias or name, getattr(self, name)
