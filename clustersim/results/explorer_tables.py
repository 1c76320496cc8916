"""What does a page need to know, so that a reader can lay any model out on a machine, and the page knows no physics?

Tables of what the package answers, each over the few settings that the answer depends on (`LookupTable`), and rows of
numbers that the page multiplies and adds: what a stage holds and sends is so many of each part (`rows`), a part is so
many bytes of each feature (`sizes`), a feature is a product of settings. What a row or a list says of n layers (or n
microbatches) is its entry n, and beyond its end as much more with each as the last entry has more than the one before.
`explorer.explorer_data` asks the package and fills the tables; a test holds what they say together to the package.
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
    """Answers by the values of some settings (`keys`), nested in their order; what has no answer is missing."""

    keys: tuple[str, ...]
    values: Mapping[Setting, Any]

    @classmethod
    def tabulate(cls, evaluate: Callable[..., Any], **axes: Iterable[Setting]) -> "LookupTable":
        """Ask for every combination of some settings' values; None is no answer."""
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
        """The answer to some settings, or None."""
        level: Any = self.values
        for key in self.keys:
            level = level.get(settings[key]) if level else None
        return level


@dataclass(frozen=True, slots=True)
class ExplorerTables:
    """All that the page computes with. A setting is one of the controls', or one that follows from them.

    derived: (name, factors, divisors) of settings that follow; chunks: of a pipeline rank in fact; flags: settings
    that follow and are no products; rules: tables of sentences that say why settings are impossible, in groups, of
    which the first that says anything is told; stages: of every pipeline rank [first layer, layers, embedding,
    head, content] of each of its stages; columns: names of parts; features: settings to which parts are
    proportional; sizes: [columns][features]; rows: by what they count, of a stage [content][columns] or
    [content][moments][columns]: a content is a number of layers, or the number of a stage's layers among all that
    there are, where they are of several kinds; groups: of each group of parameters its columns; experts: the group
    that has ranks of its own, or None; sharing: what ZeRO makes of a parameter (`zero_memory`); sends: bytes of one
    dispatch (`expert_traffic`); buffers: bytes of each axis's process groups;
    receives: messages that are awaited at once; context: bytes; workspace: bytes that libraries take on a
    stage [content]; fragmentation: part that is added to each use of
    memory;
    schedules: {bubble: share of the step, held: for each pipeline rank the moments that can be its fullest: which of
    its stages runs backward, and the microbatches that each of them holds}; orders: of the axes in a rank's
    number, by mesh; roles: axes of process groups; partners: by role, for each pipeline rank the ranks it talks to.
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
    experts: int | None
    sharing: LookupTable
    sends: LookupTable | None
    buffers: tuple[LookupTable, ...]
    receives: LookupTable
    context: Bytes
    workspace: tuple[Bytes, ...]
    fragmentation: Mapping[str, float]
    schedules: LookupTable
    orders: tuple[tuple[str, ...], ...]
    roles: Mapping[str, tuple[str, ...]]
    partners: LookupTable


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the page says of a model beside what it computes; dimensions: in words of `workload.transformer.Model`."""

    name: str
    parameters: int
    dimensions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExplorerCluster:
    """What the page is laid out on.

    capacity: bytes of the smallest GPU; levels: (tier, unit of each GPU), from the narrowest tier up: traffic stays in
    the first tier in whose unit all its GPUs are; top: the tier beyond.
    """

    cluster: str
    accelerator: str
    capacity: Bytes
    per_node: int
    levels: tuple[tuple[str, IntArray], ...]
    top: str


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One simulated step. label: its layout; own: it is the scenario's; missing: why there is none, or empty."""

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
    """Steps of which one thing differs. name: a key; title and words: what differs and what stays."""

    name: str
    title: str
    description: str
    points: tuple[ScalingPoint, ...]


@dataclass(frozen=True, slots=True)
class ExplorerData:
    """All that the explorer page shows.

    models, formats: the scenario's first; choices: values of each control, by setting; start: the scenario's; notes:
    what differs from the scenario, in sentences.
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

    @property
    def baseline(self) -> ScalingPoint | None:
        """The scenario's own step on a healthy cluster; None where it was not simulated."""
        points = (point for study in self.studies for point in study.points)
        return next((point for point in points if point.is_baseline and not point.missing_reason), None)
