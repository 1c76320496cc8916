"""What may a scenario file say of where durations come from?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common.errors import format_value, suggest_nearest
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.nccl import NcclConfig
from clustersim.scenario.config_reader import (
    ConfigModel,
    NonEmptyText,
    config_error,
    enum_parser,
    fraction_parser,
    none_from_word,
    value_parser,
)
from clustersim.scenario.settings import Contention, CostSettings, Symmetry

MAX_INTERFERENCE = 10.0
MAX_SCALE = 1_000.0


class RecordScaleConfig(ConfigModel):
    """`cost.record.scale`: the cluster's accelerator relative to the one that was measured."""

    compute: Annotated[float, Field(gt=0.0, le=MAX_SCALE)] = 1.0
    """rate of arithmetic of this accelerator over that of the measured one"""
    bandwidth: Annotated[float, Field(gt=0.0, le=MAX_SCALE)] = 1.0
    """memory bandwidth of this accelerator over that of the measured one"""


class CostRecordConfig(ConfigModel):
    """`cost.calibration_record`: a calibration record, and how it is carried over to another accelerator."""

    shorthand_key: ClassVar[str | None] = "file"
    file: NonEmptyText = Field(examples=["my-gpu.json"])
    """a calibration record, shipped (published/h100-sxm-80gb) or your own"""
    scale: RecordScaleConfig | None = None
    """to stand for another accelerator than the one that was measured; left out: it does not"""


def _yaml_off(value: object) -> object:
    """YAML 1.1 reads `off_label` as false."""
    return "off" if value is False else value


def _parse_algorithms(value: object) -> object:
    if not isinstance(value, dict):
        return value
    names = [collective.value for collective in CollectiveType]
    for name in value:
        if name not in names:
            raise config_error(f"{format_value(name)} is no collective; {suggest_nearest(str(name), names)}")
    return {CollectiveType(name): algorithm for name, algorithm in value.items()}


def _parse_algorithm_lists(value: object) -> object:
    """One algorithm may stand alone."""
    parsed = _parse_algorithms(value)
    if not isinstance(parsed, dict):
        return parsed
    return {kind: tuple(item) if isinstance(item, list) else (item,) for kind, item in parsed.items()}


_COLLECTIVE_NAMES: Final = ", ".join(collective_type.value for collective_type in CollectiveType)
_SYMMETRY_NAMES: Final = tuple(element.value for element in Symmetry)


class CostConfig(ConfigModel):
    """`cost`: where durations come from, and how many ranks are simulated one by one."""

    record: Annotated[CostRecordConfig | None, BeforeValidator(none_from_word)] = None
    """measured durations, see [Calibration](calibration.md), or none; left out: none"""
    collectives: Annotated[
        dict[CollectiveType, NonEmptyText],
        value_parser(_parse_algorithms, f"algorithms by collective: {_COLLECTIVE_NAMES}", "{all_reduce: ring}"),
    ] = Field({})
    """algorithm that each named collective is forced to, see [Models](models.md#collectives), or one of your own, see
    [Extending](extending.md#a-collective-algorithm); left out: the library's choice"""
    candidates: Annotated[
        dict[CollectiveType, tuple[NonEmptyText, ...]],
        value_parser(
            _parse_algorithm_lists,
            f"algorithms, or lists of them, by collective: {_COLLECTIVE_NAMES}",
            "{all_reduce: my_module:MyAlgorithm}",
        ),
    ] = Field({})
    """algorithms that the library chooses from beside its own, likewise; left out: none"""
    nccl: NcclConfig = NcclConfig()
    """what NCCL (or RCCL) may choose from, in its own variables; left out: nothing is said"""
    symmetry: Annotated[
        Symmetry, enum_parser(Symmetry), value_parser(_yaml_off, "", schema_type=Literal[_SYMMETRY_NAMES])
    ] = Symmetry.AUTO
    """off: every rank is simulated, for the same answer"""
    coalesce: bool = True
    """operations inside a forward or backward are one event where that is exact; false: the same answer, slower"""
    network: Annotated[Contention, enum_parser(Contention)] = Contention.SHARED
    """shared: communication that overlaps shares links fairly; uncontended: only groups of one role do, in step"""
    interference: Annotated[float | None, fraction_parser(0.0, MAX_INTERFERENCE)] = None
    """part by which kernels take longer beside a collective; left out: the record's, or the accelerator's"""

    @model_validator(mode="after")
    def _check_no_duplicates(self) -> Self:
        for kind in (kind for kind in self.candidates if kind in self.collectives):
            raise config_error(f"has both collectives and candidates for {kind.value}; keep one of them")
        return self

    @property
    def named_algorithms(self) -> Iterator[tuple[str, CollectiveType, str]]:
        """Algorithms that are named: the key, for which collective, and which."""
        yield from (("collectives", kind, name) for kind, name in self.collectives.items())
        yield from (("candidates", kind, name) for kind, names in self.candidates.items() for name in names)

    def cost_settings(
        self, record: CalibrationRecord | None, user_algorithms: Mapping[str, CollectiveAlgorithm]
    ) -> CostSettings:
        """The settings as the inside knows them, with the record and the user's algorithms that were read."""
        overrides = self.nccl.nccl_overrides()
        forced = (f"{kind.value} by {name}" for kind, name in self.collectives.items())
        added = (f"{' and '.join(names)} beside its own for {kind.value}" for kind, names in self.candidates.items())
        description = " and ".join((*forced, *added, *([overrides.description] if overrides.description else [])))
        nccl_overrides = replace(
            overrides,
            forced=self.collectives,
            added=self.candidates,
            custom_algorithms=user_algorithms,
            description=description,
        )
        return CostSettings(self.symmetry, self.coalesce, self.network, nccl_overrides, self.interference, record)
