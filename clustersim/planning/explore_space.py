"""Which settings does the explorer page offer, and what is the scenario with some of them?

Tables are made of scenarios in which a few settings are changed; whatever a table does not name is as plain as can be
(one rank, one sequence, nothing recomputed), or as in the scenario (attention, loss, optimizer, framework, cluster).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Final

from clustersim.analysis.exploration import Setting
from clustersim.parallel.data import DataParallelism, NaiveDataParallel, Replicated, Zero
from clustersim.parallel.layout import AXES
from clustersim.parallel.plan import Plan
from clustersim.scenario import Scenario
from clustersim.scenario.checks import check_heads, check_widths
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.shelf import schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.workload.training import (
    FullRecompute,
    NoRecompute,
    Precision,
    Recompute,
    SelectiveOperations,
    SelectiveRecompute,
)
from clustersim.workload.transformer import Model

RECOMPUTES: Final[Mapping[str, Recompute]] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "selective_op": SelectiveOperations(),
    "full": FullRecompute(),
}
_SOME_LAYERS: Final = (1, 2, 4)
_OFFERED: Final[Mapping[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4, 8, 16, 32, 64),
    "cp": (1, 2, 4, 8, 16),
    "pp": (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64),
    "chunks": (2, 3, 4, 5, 6, 8),
    "microbatch": (1, 2, 4, 8, 16, 32),
    "sequence": tuple(2**power for power in range(8, 18)),
    "batch": tuple(2**power for power in range(15)),
}
DERIVED: Final = (
    ("dp", ("gpus",), ("tp", "cp", "pp")),
    ("replicas", ("dp", "cp"), ()),
    ("room", ("gpus",), ("tp", "cp")),
    ("microbatches", ("batch",), ("dp", "microbatch")),
    ("stages", ("pp", "chunks"), ()),
    ("one", (), ()),
    ("tokens", ("microbatch", "sequence"), ("cp",)),
    ("scores", ("microbatch", "sequence", "sequence"), ("cp",)),
    ("keys", ("microbatch", "sequence"), ()),
)
"""Settings that follow from others: (name, factors, divisors).

replicas: ranks with the same weights; room: ranks for pipelines; tokens: of a microbatch on a rank; scores: by keys.
"""


@dataclass(frozen=True)
class Space:
    """A scenario, and the models, number formats and numbers of GPUs that its page offers, the scenario's first."""

    scenario: Scenario
    models: tuple[Model, ...]
    precisions: tuple[Precision, ...]
    gpus: tuple[int, ...]

    @cached_property
    def start(self) -> dict[str, Setting]:
        """The scenario's settings, in the order in which the page has its controls."""
        layout, training = self.scenario.layout, self.scenario.training
        return {
            "model": 0, "gpus": self.scenario.cluster.gpus, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp,
            "zero": layout.data.stage, "recompute": self._recompute, "microbatch": training.microbatch,
            "sequence": training.sequence, "batch": training.global_batch, "schedule": self._schedule.name,
            "chunks": max(2, self._schedule.chunks), "precision": 0, "split": layout.sequence_parallel,
        }  # fmt: skip

    @cached_property
    def choices(self) -> dict[str, tuple[Setting, ...]]:
        """Values of every setting."""
        batches = (self.scenario.training.global_batch * factor for factor in (2, 4))
        offered: dict[str, Iterable[Setting]] = {
            **{key: sorted({*values, self.start[key]}) for key, values in _OFFERED.items()},
            "model": range(len(self.models)), "precision": range(len(self.precisions)), "gpus": self.gpus,
            "zero": range(4), "split": (False, True), "schedule": ("1f1b", "gpipe", "interleaved"),
            "recompute": (*RECOMPUTES, *(f"layers:{layers}" for layers in sorted(self._some_layers))),
            "batch": sorted({*_OFFERED["batch"], self.scenario.training.global_batch, *batches}),
        }  # fmt: skip
        return {key: tuple(offered[key]) for key in self.start}

    @property
    def _schedule(self) -> Schedule:
        """The scenario's schedule, or the nearest whose order does not depend on durations."""
        own = self.scenario.schedule
        return schedule("1f1b") if isinstance(own, ZeroBubble) else own

    @property
    def _recompute(self) -> str:
        own = self.scenario.training.recompute
        names = (name for name, way in RECOMPUTES.items() if way == own)
        return next(names, f"layers:{own.layers}" if isinstance(own, FullRecompute) else "none")

    @property
    def _some_layers(self) -> set[int]:
        own = self.scenario.training.recompute
        return {*_SOME_LAYERS, *([own.layers] if isinstance(own, FullRecompute) and own.layers else [])}

    def ints(self, key: str) -> tuple[int, ...]:
        """Values of a setting that is a number."""
        return tuple(int(value) for value in self.choices[key])

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Tensor-parallel degrees that can cut each model."""
        return tuple(
            tuple(
                tp
                for tp in self.ints("tp")
                if not [*check_heads(there := self.at(model=place, tp=tp)), *check_widths(there)]
            )
            for place in range(len(self.models))
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Model chunks of a pipeline rank, with any schedule."""
        return (1, *self.ints("chunks"))

    @property
    def pipelines(self) -> tuple[int, ...]:
        """Pipeline ranks that divide some number of GPUs."""
        return tuple(pp for pp in self.ints("pp") if any(gpus % pp == 0 for gpus in self.gpus))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Data-parallel degrees that can come of the choices, with which the ranks of a replica fill a cluster."""
        sizes = {tp * cp * pp for tp, cp, pp in product(*map(self.ints, ("tp", "cp", "pp")))}
        return tuple(sorted({gpus // size for gpus in self.gpus for size in sizes if gpus % size == 0}))

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches of a step that can come of the choices."""
        sizes = {dp * each for dp in self.replicas for each in self.ints("microbatch")}
        return tuple(sorted({batch // size for batch in self.ints("batch") for size in sizes if batch % size == 0}))

    def at(self, **settings: Any) -> Scenario:
        """The scenario with some settings, and the plainest of the others; it need not be legal."""
        model, pp, order = settings.get("model", 0), settings.get("pp", 1), self.schedule(settings)
        layout = replace(
            self.scenario.layout,
            **{axis: settings.get(axis, 1) for axis in AXES},
            sequence_parallel=settings.get("split", False),
            data=self.strategy(settings.get("zero", 0)),
            layers_per_stage=self._layers_per_stage(model, pp * order.chunks),
        )
        training = replace(
            self.scenario.training,
            precision=self.precisions[settings.get("precision", 0)],
            recompute=recompute(settings.get("recompute", "none")),
            microbatch=settings.get("microbatch", 1),
            sequence=settings.get("sequence", self.scenario.training.sequence),
            global_batch=settings.get("batch", 1),
        )
        cluster = replace(self.scenario.cluster, gpus=settings.get("gpus", layout.world))
        return replace(
            self.scenario, model=self.models[model], cluster=cluster, layout=layout, training=training, schedule=order,
            steps=1,
        )  # fmt: skip

    def plan(self, **settings: Any) -> Plan:
        """Who does which part in the scenario with some settings."""
        there = self.at(**settings)
        return Plan(there.model, there.training, there.layout, there.schedule.chunks)

    def schedule(self, settings: Mapping[str, Any]) -> Schedule:
        """The schedule of some settings; chunks count where it has any choice of them."""
        chunks = settings.get("chunks", 1)
        plain = schedule(settings.get("schedule", "interleaved" if chunks > 1 else "1f1b"))
        return plain if plain.chunks == 1 else schedule(plain.name, max(plain.chunks, chunks))

    def strategy(self, stage: int) -> DataParallelism:
        """The scenario's strategy at its own ZeRO stage, the usual one at others (as `layout.data=zero2` means it)."""
        own = self.scenario.layout.data
        if own.stage == stage and not isinstance(own, NaiveDataParallel):
            return own
        return Zero(stage) if stage else Replicated()

    def _layers_per_stage(self, model: int, stages: int) -> tuple[int, ...] | None:
        """The scenario's own, where they are those of so many stages of its model."""
        own = self.scenario.layout.layers_per_stage
        return own if own is not None and model == 0 and len(own) == stages else None


def recompute(name: str) -> Recompute:
    """What is recomputed, by a name of the page's.

    >>> recompute("layers:2")
    FullRecompute(layers=2)
    """
    return RECOMPUTES[name] if name in RECOMPUTES else FullRecompute(int(name.removeprefix("layers:")))
