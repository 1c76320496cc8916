"""What may a scenario file say about the sources of durations?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common.errors import format_value, suggest_nearest
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

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord

MAX_INTERFERENCE = 10.0
MAX_SCALE = 1_000.0


class RecordScaleConfig(ConfigModel):
    """`cost.record.scale`: ratios of the cluster's accelerator to the one that was measured."""

    compute: Annotated[float, Field(gt=0.0, le=MAX_SCALE)] = 1.0
    """compute throughput of this accelerator over that of the measured one"""
    bandwidth: Annotated[float, Field(gt=0.0, le=MAX_SCALE)] = 1.0
    """memory bandwidth of this accelerator over that of the measured one"""


class CostRecordConfig(ConfigModel):
    """`cost.calibration_record`: a calibration record, and how it is scaled to another accelerator."""

    shorthand_key: ClassVar[str | None] = "file"
    file: NonEmptyText = Field(examples=["my-gpu.json"])
    """a calibration record, packaged (published/h100-sxm-80gb) or your own"""
    scale: RecordScaleConfig | None = None
    """scales the record to another accelerator than the measured one; left out: not scaled"""


def _yaml_off(value: object) -> object:
    """YAML 1.1 reads `off` as false."""
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
    """Lists of algorithms by collective; a single name stands for a list of one."""
    parsed = _parse_algorithms(value)
    if not isinstance(parsed, dict):
        return parsed
    return {kind: tuple(names) if isinstance(names, list) else (names,) for kind, names in parsed.items()}


_COLLECTIVE_NAMES: Final = ", ".join(collective_type.value for collective_type in CollectiveType)
_SYMMETRY_NAMES: Final = tuple(symmetry.value for symmetry in Symmetry)


class CostConfig(ConfigModel):
    """`cost`: sources of durations, and use of symmetry between ranks."""

    record: Annotated[CostRecordConfig | None, BeforeValidator(none_from_word)] = None
    """calibration record of measured durations, see [Calibration](calibration.md), or none; left out: none"""
    collectives: Annotated[
        dict[CollectiveType, NonEmptyText],
        value_parser(_parse_algorithms, f"algorithms by collective: {_COLLECTIVE_NAMES}", "{all_reduce: ring}"),
    ] = Field({})
    """algorithm that is forced for each named collective, see [Models](models.md#collectives), or one of your own,
    see [Extending](extending.md#a-collective-algorithm); left out: the library's choice
    """
    candidates: Annotated[
        dict[CollectiveType, tuple[NonEmptyText, ...]],
        value_parser(
            _parse_algorithm_lists,
            f"algorithms, or lists of them, by collective: {_COLLECTIVE_NAMES}",
            "{all_reduce: my_module:MyAlgorithm}",
        ),
    ] = Field({})
    """additional algorithms that the library's tuner may choose; left out: none"""
    nccl: NcclConfig = NcclConfig()
    """restrictions of NCCL's (or RCCL's) choice, by its environment variables; left out: none"""
    symmetry: Annotated[
        Symmetry, enum_parser(Symmetry), value_parser(_yaml_off, "", schema_type=Literal[_SYMMETRY_NAMES])
    ] = Symmetry.AUTO
    """off: simulate every rank; the result is the same"""
    coalesce: bool = True
    """operations inside a forward or backward are merged into one event where that is exact.

    false: same result, slower
    """
    network: Annotated[Contention, enum_parser(Contention)] = Contention.SHARED
    """shared: overlapping communication shares links max-min fairly.

    uncontended: only groups of one kind do, in lockstep
    """
    interference: Annotated[float | None, fraction_parser(0.0, MAX_INTERFERENCE)] = None
    """fraction by which kernels slow down while a collective is in flight; collectives do not.

    Left out: the record's, or the accelerator's, of both
    """

    @model_validator(mode="after")
    def _check_no_duplicates(self) -> Self:
        for kind in (kind for kind in self.candidates if kind in self.collectives):
            raise config_error(f"has both collectives and candidates for {kind.value}; keep one of them")
        return self

    @property
    def named_algorithms(self) -> Iterator[tuple[str, CollectiveType, str]]:
        """The named algorithms: key, collective and name of each."""
        yield from (("collectives", kind, name) for kind, name in self.collectives.items())
        yield from (("candidates", kind, name) for kind, names in self.candidates.items() for name in names)

    def cost_settings(
        self, record: "CalibrationRecord | None", user_algorithms: Mapping[str, CollectiveAlgorithm]
    ) -> CostSettings:
        """The cost settings as the simulator represents them, with the loaded record and user algorithms."""
        overrides = self.nccl.nccl_overrides()
        forced = (f"{kind.value} by {name}" for kind, name in self.collectives.items())
        added = (
            f"{' and '.join(names)} in addition to its own for {kind.value}" for kind, names in self.candidates.items()
        )
        description = " and ".join((*forced, *added, *([overrides.description] if overrides.description else [])))
        nccl_overrides = replace(
            overrides,
            forced=self.collectives,
            added=self.candidates,
            custom_algorithms=user_algorithms,
            description=description,
        )
        return CostSettings(self.symmetry, self.coalesce, self.network, nccl_overrides, self.interference, record)
