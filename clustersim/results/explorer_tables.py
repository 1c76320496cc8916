"""Data of the explorer page: lookup tables for trying layouts of a model on a cluster without a simulator.

A `LookupTable` holds results of the package over the few settings that they depend on. Coefficient rows are
multiplied and added by the page: what a stage holds and sends is a count of each memory column (`rows`), a
column is bytes per feature (`sizes`), a feature is a product of settings. Lists indexed by n layers (or n
microbatches) are extrapolated linearly beyond their last entry. `explorer.explorer_data` evaluates the package
and fills the tables; a test checks them against the package.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustersim.common.units import Bytes, Seconds

IntArray = NDArray[np.int64]
Setting = int | str | bool


@dataclass(frozen=True, slots=True)
class LookupTable:
    """Results by the values of some settings (`keys`), nested in their order; missing: no result."""

    keys: tuple[str, ...]
    values: Mapping[Setting, Any]

    @classmethod
    def tabulate(cls, evaluate: Callable[..., Any], **axes: Iterable[Setting]) -> "LookupTable":
        """Evaluate every combination of the settings' values; None means no result."""
        values: dict[Setting, Any] = {}
        for point in product(*axes.values()):
            answer = evaluate(**dict(zip(axes, point, strict=True)))
            if answer is not None:
                level = values
                for value in point[:-1]:
                    level = level.setdefault(value, {})
                level[point[-1]] = answer
        return cls(tuple(axes), values)

    def lookup(self, settings: Mapping[str, Setting]) -> Any:
        """The result for some settings, or None."""
        level: Any = self.values
        for key in self.keys:
            level = level.get(settings[key]) if level else None
        return level


@dataclass(frozen=True, slots=True)
class ExplorerTables:
    """All tables and coefficients that the page computes with.

    A setting is a control's value, or derived from those.

    derived: (name, factors, divisors) of derived settings that are products; chunks: actual number of model chunks of a
    pipeline rank; flags: derived settings that are not products; rules: tables of messages why settings are invalid, in
    groups, of which the first match is shown; stages: for every pipeline rank [first layer, layers, embedding, head,
    content] of each of its stages; columns: names of memory columns; features: settings to which columns are
    proportional; sizes: [columns][features] bytes; rows: by what they count, of a stage [content][columns] or
    [content][moments][columns], where content is a number of layers, or the index of the stage's layers among all
    distinct ones if there are several kinds; groups: columns of each parameter group; reused: of those that layers use
    again, which are held elsewhere; experts: the expert parameter group, or None; sharing: how ZeRO shards a parameter
    (`zero_memory`); sends: bytes of one dispatch (`expert_traffic`); buffers: bytes of each axis's process groups;
    receives: number of concurrently posted receives; context: bytes of the CUDA context; workspace: bytes of library
    workspaces on a stage [content]; fragmentation: by recomputation, fraction added to each use; schedules: {bubble:
    fraction of the step, held: for each pipeline rank the candidate moments of peak memory
    (`schedule_tables.PeakCandidate`)}; orders: axis orders of rank numbering, by mesh; roles: axes of process groups;
    partners: by process group kind, the pipeline ranks that each pipeline rank talks to.
    """

    derived: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    chunks: LookupTable
    flags: Mapping[str, LookupTable]
    rules: tuple[tuple[LookupTable, ...], ...]
    stages: LookupTable
    columns: tuple[str, ...]
    features: tuple[str, ...]
    sizes: LookupTable
    rows: Mapping[str, LookupTable]
    groups: tuple[tuple[int, ...], ...]
    reused: tuple[tuple[int, ...], ...]
    experts: int | None
    sharing: LookupTable
    sends: LookupTable | None
    buffers: tuple[LookupTable, ...]
    receives: LookupTable
    context: Bytes
    workspace: tuple[Bytes, ...]
    fragmentation: Mapping[str, Mapping[str, float]]
    schedules: LookupTable
    orders: tuple[tuple[str, ...], ...]
    roles: Mapping[str, tuple[str, ...]]
    partners: LookupTable


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a model for display. dimensions: fields of `model.transformer.TransformerModel`."""

    name: str
    parameters: int
    dimensions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExplorerCluster:
    """The cluster that layouts are tried on.

    capacity: bytes of the smallest GPU; levels: (tier, unit index of each GPU), lowest tier first: traffic
    stays within the first tier one unit of which contains all its GPUs; top: the tier above.
    """

    cluster: str
    accelerator: str
    capacity: Bytes
    per_node: int
    levels: tuple[tuple[str, IntArray], ...]
    top: str


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One simulated step of a scaling study.

    label: its layout; is_baseline: it is the scenario's own step; missing_reason: why there is no result, or
    empty.
    """

    label: str
    gpus: int
    step_time: Seconds = 0.0
    tokens_per_gpu: float = 0.0
    mfu: float = 0.0
    mfu_causal: float = 0.0
    bubble_fraction: float = 0.0
    exposed_fraction: float = 0.0
    peak_memory: Bytes = 0.0
    fits: bool = False
    is_baseline: bool = False
    missing_reason: str = ""


@dataclass(frozen=True, slots=True)
class ScalingStudy:
    """Steps that differ in one setting. name: a key; title, description: what varies and what stays fixed."""

    name: str
    title: str
    description: str
    points: tuple[ScalingPoint, ...]


@dataclass(frozen=True, slots=True)
class ExplorerData:
    """Everything that the explorer page shows.

    models, formats: the scenario's first; choices: values of each control, by setting; start: the scenario's
    values; warnings: sentences on what is left out, without which memory verdicts mislead; notes: sentences on other
    differences from the scenario.
    """

    name: str
    models: tuple[ModelDescription, ...]
    formats: tuple[str, ...]
    machine: ExplorerCluster
    choices: Mapping[str, tuple[Setting, ...]]
    start: Mapping[str, Setting]
    tables: ExplorerTables
    studies: tuple[ScalingStudy, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def baseline(self) -> ScalingPoint | None:
        """The scenario's own step on a healthy cluster; None where it was not simulated."""
        points = (point for study in self.studies for point in study.points)
        return next((point for point in points if point.is_baseline and not point.missing_reason), None)
