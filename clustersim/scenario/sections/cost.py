"""What may a scenario file say of where durations come from?"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from clustersim.cost.record import Record
from clustersim.errors import nearest, shown
from clustersim.program.task import Collective
from clustersim.scenario.section import (
    Name,
    Section,
    member,
    mistake,
    or_none,
    reads,
    share,
)
from clustersim.scenario.sections.nccl import NcclSection
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
    """`cost.record`: a calibration record, and how it is carried over to another accelerator."""

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
    names = [collective.value for collective in Collective]
    for name in value:
        if name not in names:
            raise mistake(f"{shown(name)} is no collective; {nearest(str(name), names)}")
    return {Collective(name): algorithm for name, algorithm in value.items()}


_FORCED: Final = f"algorithms by collective: {', '.join(each.value for each in Collective)}"
_SYMMETRIES: Final = tuple(each.value for each in Symmetry)


class CostSection(Section):
    """`cost`: where durations come from, and how many ranks are simulated one by one."""

    record: Annotated[RecordSection | None, BeforeValidator(or_none)] = None
    """measured durations, see [Calibration](calibration.md), or none; left out: none"""
    collectives: Annotated[dict[Collective, Name], reads(_algorithms, _FORCED, "{all_reduce: ring}")] = Field({})
    """algorithm that each named collective is forced to, see [Models](models.md#collectives); left out: the
    library's choice"""
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

    def settings(self, record: Record | None) -> CostSettings:
        """The settings as the inside knows them, with the record that was read."""
        switches = self.nccl.switches(self.collectives)
        return CostSettings(self.symmetry, self.coalesce, self.network, switches, self.interference, record)
