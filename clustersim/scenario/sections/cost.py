"""What may a scenario file say of where durations come from?"""

from typing import Annotated, ClassVar

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
    share,
)
from clustersim.scenario.sections.nccl import NcclSection
from clustersim.scenario.settings import Contention, CostSettings, Symmetry

MOST_INTERFERENCE = 10.0
MOST_SCALE = 1_000.0


class ScaleSection(Section):
    """`cost.record.scale`: the cluster's accelerator relative to the one that was measured."""

    compute: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0
    bandwidth: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0


class RecordSection(Section):
    """`cost.record`: a calibration record, and how it is carried over to another accelerator."""

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my-gpu.json"])
    scale: ScaleSection | None = None


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


class CostSection(Section):
    """`cost`: where durations come from, and how many ranks are simulated one by one."""

    record: Annotated[RecordSection | None, BeforeValidator(or_none)] = None
    collectives: Annotated[dict[Collective, Name], BeforeValidator(_algorithms)] = Field({})
    nccl: NcclSection = NcclSection()
    symmetry: Annotated[Symmetry, member(Symmetry), BeforeValidator(_yaml_off)] = Symmetry.AUTO
    coalesce: bool = True
    network: Annotated[Contention, member(Contention)] = Contention.SHARED
    interference: Annotated[float | None, share(0.0, MOST_INTERFERENCE)] = None

    def settings(self, record: Record | None) -> CostSettings:
        """The settings as the inside knows them, with the record that was read."""
        switches = self.nccl.switches(self.collectives)
        return CostSettings(self.symmetry, self.coalesce, self.network, switches, self.interference, record)
