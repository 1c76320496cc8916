"""With which settings of local training is each layout of a search evaluated?

Inner steps between exchanges, fragments, overlap and format: the file's, those that the user names, or published ones.
The inner step of a layout is the same for all of them, so they are no dimension of the space of layouts.

Left out unless the user names both: fragments that are waited for, which only add round trips; and fragments that
travel for longer than their part of a round, so that exchanges would meet.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.planning.layouts.config_keys import (
    FRAGMENTS,
    INNER_STEPS,
    OUTER_GRADIENTS,
    OUTER_KEYS,
    OVERLAP,
)
from clustersim.reliability.outer_settings import FORMATS, MAX_FRAGMENTS, OVERLAPS
from clustersim.scenario import Scenario
from clustersim.scenario.config.diloco import MAX_INNER_STEPS
from clustersim.scenario.diloco import DilocoSettings, OuterFormat

_INNER_STEPS: Final = (10, 30, 100, 300)
"""Range in which loss against inner steps is published (arXiv:2503.09799, arXiv:2501.18512)."""
_FIELDS: Final = tuple(key.rpartition(".")[2] for key in OUTER_KEYS)


@dataclass(frozen=True, slots=True, order=True)
class OuterVariant:
    """Settings of local training that a search varies."""

    inner_steps: int
    overlap: int
    fragments: int
    outer_gradients: str

    @classmethod
    def of_settings(cls, settings: DilocoSettings) -> "OuterVariant":
        """Those of some settings."""
        return cls(settings.inner_steps, settings.overlap, settings.fragments, settings.outer_gradients.value)

    @property
    def overrides(self) -> tuple[str, ...]:
        """As `--set` takes them."""
        return tuple(f"{key}={getattr(self, field)}" for key, field in zip(OUTER_KEYS, _FIELDS, strict=True))

    def apply(self, settings: DilocoSettings) -> DilocoSettings:
        """Other settings with these."""
        return replace(
            settings,
            inner_steps=self.inner_steps,
            fragments=self.fragments,
            overlap=self.overlap,
            outer_gradients=OuterFormat(self.outer_gradients),
        )


def outer_variants(scenario: Scenario, named: Mapping[str, tuple[str, ...]]) -> tuple[OuterVariant, ...]:
    """The variants of a scenario with local training; raise InputError for a value that no scenario can have.

    named: values of keys that the user fixed or varied.
    """
    if scenario.diloco is None:
        return ()
    settings, layers = scenario.diloco, scenario.model.layer_count
    values: dict[str, set[Any]] = {
        INNER_STEPS: {*_INNER_STEPS, settings.inner_steps},
        FRAGMENTS: {1, min(layers, MAX_FRAGMENTS), settings.fragments},
        OVERLAP: {*OVERLAPS, settings.overlap},
        OUTER_GRADIENTS: {*(form.value for form in FORMATS), settings.outer_gradients.value},
    } | {key: {_read(scenario, key, text) for text in texts} for key, texts in named.items()}
    combined = (
        OuterVariant(**dict(zip(_FIELDS, combination, strict=True))) for combination in product(*values.values())
    )
    stated = OuterVariant.of_settings(settings)
    is_free = not {FRAGMENTS, OVERLAP} <= named.keys()
    legal = {variant for variant in combined if _is_legal(variant, layers) and not (is_free and _is_needless(variant))}
    if not named:
        legal.add(stated)
    if not legal:
        raise InputError(f"{', '.join(named)}: no combination of these values is a round of local training")
    return tuple(sorted(legal))


def _read(scenario: Scenario, key: str, text: str) -> Any:
    """A value as a scenario reads it, whatever the others are."""
    neutral = {INNER_STEPS: MAX_INNER_STEPS, FRAGMENTS: 1, OVERLAP: 0} | {key: text}
    read = scenario.resolve_unchecked(tuple(f"{other}={value}" for other, value in neutral.items())).diloco
    value = getattr(read, key.rpartition(".")[2])
    return value.value if isinstance(value, OuterFormat) else value


def _is_legal(variant: OuterVariant, layers: int) -> bool:
    return variant.overlap < variant.inner_steps and variant.fragments <= min(variant.inner_steps, layers)


def _is_needless(variant: OuterVariant) -> bool:
    is_waited_for = variant.fragments > 1 and not variant.overlap
    return is_waited_for or variant.fragments * variant.overlap > variant.inner_steps


def outer_distance(overrides: Iterable[str]) -> tuple[int, float, int, int]:
    """How far the settings of local training among some overrides are from synchronous training; zeros: none is."""
    values = dict(override.split("=", 1) for override in overrides)
    if INNER_STEPS not in values:
        return 0, 0.0, 0, 0
    element_bytes = OuterFormat(values[OUTER_GRADIENTS]).bytes
    return int(values[INNER_STEPS]), -element_bytes, int(values[OVERLAP]), int(values[FRAGMENTS])


def named_outer_keys(
    fixed: Mapping[str, str], varied: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The keys of local training among those that the user fixed or varied, with their values."""
    yield from ((key, (value,)) for key, value in fixed.items() if key in OUTER_KEYS)
    yield from ((key, values) for key, values in varied.items() if key in OUTER_KEYS)
