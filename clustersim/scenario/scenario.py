"""What is to be simulated: which model, on which cluster, in which layout and schedule, with which costs?"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clustersim.cost.jitter import Jitter
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.disturbance import Disturbances
from clustersim.parallel.layout import Layout
from clustersim.scenario.settings import CostSettings
from clustersim.schedules.schedule import Schedule
from clustersim.workload.framework import Framework, load_framework
from clustersim.workload.training import Training
from clustersim.workload.transformer import Model


@dataclass(frozen=True, slots=True)
class Scenario:
    """Training steps of a model on a cluster; every rank of the layout is one of the cluster's GPUs.

    framework: the software, which launches kernels and holds memory of its own;
    disturbances: what is wrong with the cluster, whose `fabric` already is the disturbed one; jitter: how kernels vary,
    None: not at all; steps: how many successive ones are simulated; warnings: what is legal and still likely a mistake;
    path: the file that it was read from, if any; written: the mapping that it was read from, overrides applied;
    files: those that the model and the cluster were read from.
    """

    name: str
    model: Model
    cluster: Cluster
    layout: Layout
    schedule: Schedule
    training: Training
    cost: CostSettings = field(default_factory=CostSettings)
    framework: Framework = field(default_factory=load_framework)
    disturbances: Disturbances = field(default_factory=Disturbances)
    jitter: Jitter | None = None
    steps: int = 1
    warnings: tuple[str, ...] = ()
    path: Path | None = None
    files: tuple[Path, ...] = field(default=(), compare=False)
    written: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @property
    def microbatches(self) -> int:
        """How many microbatches each replica runs in a step."""
        return self.training.global_batch // (self.layout.dp * self.training.microbatch)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Scenario":
        """Read a YAML or JSON file, with overrides such as `layout.tp=4`; raise InputError that lists what is wrong."""
        from clustersim.scenario.load import load

        return load(Path(path), overrides)

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "scenario"
    ) -> "Scenario":
        """Build from what a file would hold, with overrides as in `load`; `source` stands in errors for its name."""
        from clustersim.scenario.load import Origin, from_mapping

        return from_mapping(mapping, Origin(source=source, name=source, base=Path()), overrides)

    def to_mapping(self) -> dict[str, Any]:
        """What a file of this scenario holds: `from_mapping` of it gives the same scenario."""
        return copy.deepcopy(dict(self.written))

    def changed(self, overrides: str | Iterable[str], *more: str) -> "Scenario":
        """The same scenario with overrides such as `layout.tp=4`, one by one or in a list."""
        from clustersim.scenario.load import Origin, from_mapping

        first = (overrides,) if isinstance(overrides, str) else overrides
        base = Path() if self.path is None else self.path.parent
        origin = Origin(source=str(self.path or self.name), name=self.name, base=base)
        return replace(from_mapping(self.written, origin, (*first, *more)), path=self.path)
