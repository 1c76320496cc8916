"""What may a scenario file say of where durations come from?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common.errors import nearest, shown
from clustersim.cost.calibration_record import Record
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.nccl import NcclSection
from clustersim.scenario.config_reader import Name, Section, member, mistake, or_none, reads, share
from clustersim.scenario.settings import Contention, CostSettings, Symmetry

MOST_INTERFERENCE = 10.0
MOST_SCALE = 1_000.0


class ScaleSection(Section):
    """`cost.record.scale`: the cluster's accelerator relative to the one that was measured."""

    compute: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0
    """rate of arithmetic of this accelerator over that of the measured one"""
    bandwidth: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0
    """memory bandwidth of this accelerator over that of the measured one"""


class RecordSection(Section):
    """`cost.calibration_record`: a calibration record, and how it is carried over to another accelerator."""

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my-gpu.json"])
    """a calibration record, shipped (published/h100-sxm-80gb) or your own"""
    scale: ScaleSection | None = None
    """to stand for another accelerator than the one that was measured; left out: it does not"""


def _yaml_off(value: object) -> object:
    """YAML 1.1 reads `off` as false."""
    return "off" if value is False else value


def _algorithms(value: object) -> object:
    if not isinstance(value, dict):
        return value
    names = [collective.value for collective in CollectiveType]
    for name in value:
        if name not in names:
            raise mistake(f"{shown(name)} is no collective; {nearest(str(name), names)}")
    return {CollectiveType(name): algorithm for name, algorithm in value.items()}


def _several(value: object) -> object:
    """One algorithm may stand alone."""
    found = _algorithms(value)
    if not isinstance(found, dict):
        return found
    return {kind: tuple(item) if isinstance(item, list) else (item,) for kind, item in found.items()}


_KINDS: Final = ", ".join(collective_type.value for collective_type in CollectiveType)
_SYMMETRIES: Final = tuple(element.value for element in Symmetry)


class CostSection(Section):
    """`cost`: where durations come from, and how many ranks are simulated one by one."""

    record: Annotated[RecordSection | None, BeforeValidator(or_none)] = None
    """measured durations, see [Calibration](calibration.md), or none; left out: none"""
    collectives: Annotated[
        dict[CollectiveType, Name], reads(_algorithms, f"algorithms by collective: {_KINDS}", "{all_reduce: ring}")
    ] = Field({})
    """algorithm that each named collective is forced to, see [Models](models.md#collectives), or one of your own, see
    [Extending](extending.md#a-collective-algorithm); left out: the library's choice"""
    candidates: Annotated[
        dict[CollectiveType, tuple[Name, ...]],
        reads(
            _several, f"algorithms, or lists of them, by collective: {_KINDS}", "{all_reduce: my_module:MyAlgorithm}"
        ),
    ] = Field({})
    """algorithms that the library chooses from beside its own, likewise; left out: none"""
    nccl: NcclSection = NcclSection()
    """what NCCL (or RCCL) may choose from, in its own variables; left out: nothing is said"""
    symmetry: Annotated[Symmetry, member(Symmetry), reads(_yaml_off, "", of=Literal[_SYMMETRIES])] = Symmetry.AUTO
    """off: every rank is simulated, for the same answer"""
    coalesce: bool = True
    """operations inside a forward or backward are one event where that is exact; false: the same answer, slower"""
    network: Annotated[Contention, member(Contention)] = Contention.SHARED
    """shared: communication that overlaps shares links fairly; uncontended: only groups of one role do, in step"""
    interference: Annotated[float | None, share(0.0, MOST_INTERFERENCE)] = None
    """part by which kernels take longer beside a collective; left out: the record's, or the accelerator's"""

    @model_validator(mode="after")
    def _once(self) -> Self:
        for kind in (kind for kind in self.candidates if kind in self.collectives):
            raise mistake(f"has both collectives and candidates for {kind.value}; keep one of them")
        return self

    @property
    def named(self) -> Iterator[tuple[str, CollectiveType, str]]:
        """Algorithms that are named: the key, for which collective, and which."""
        yield from (("collectives", kind, name) for kind, name in self.collectives.items())
        yield from (("candidates", kind, name) for kind, names in self.candidates.items() for name in names)

    def settings(self, record: Record | None, own: Mapping[str, CollectiveAlgorithm]) -> CostSettings:
        """The settings as the inside knows them, with the record and the user's algorithms that were read."""
        told = self.nccl.switches()
        forced = (f"{kind.value} by {name}" for kind, name in self.collectives.items())
        added = (f"{' and '.join(names)} beside its own for {kind.value}" for kind, names in self.candidates.items())
        words = " and ".join((*forced, *added, *([told.description] if told.description else [])))
        switches = replace(
            told, forced=self.collectives, added=self.candidates, custom_algorithms=own, description=words
        )
        return CostSettings(self.symmetry, self.coalesce, self.network, switches, self.interference, record)
