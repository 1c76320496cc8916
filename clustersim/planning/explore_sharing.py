"""What does ZeRO make of a parameter, and what else lies in memory for the whole step?

Bytes of a parameter are `Footprint`'s for each number of replicas. What gradients and parameters send is what lowering
makes of small plans, for one and for two microbatches: each more adds as much.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np

from clustersim.analysis.exploration import Table
from clustersim.memory.activations import LAYER_PARTS, Activations, Part
from clustersim.memory.footprint import Category, Footprint
from clustersim.memory.ledger import Ledger
from clustersim.parallel.data import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import NAMES
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.planning.explore_rows import ROUNDS, exchanges, programs
from clustersim.planning.explore_sizes import COLUMNS, PARAMETERS, Row
from clustersim.planning.explore_space import Space
from clustersim.workload.presets import preset
from clustersim.workload.stack import LayerRun
from clustersim.workload.training import Training

_SHARDED: Final = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
_LENGTH: Final = 128
_TIED: Final = "gpt2-small"  # its embedding's matrix is the logits', too


def sharing(space: Space) -> Table:
    """By number format, ZeRO stage and replicas.

    resident: bytes of a parameter, by category; bucket: bytes of gradients that wait at most, and those of a parameter;
    gathers: whether parameters are gathered; there: [columns] 0 for parts of activations that are counted elsewhere;
    dp: bytes that a parameter sends, for no and for one microbatch [2][columns]; tied: part of a tied gradient.
    """
    dp_of = cache(lambda precision, zero: _sent(space, precision, zero))

    def ask(precision: int, zero: int, replicas: int) -> dict[str, Any]:
        plan = space.plan(precision=precision, zero=zero, dp=replicas, batch=replicas, sequence=_LENGTH)
        stays, sent = _footprint(space, plan), dp_of(precision, zero)
        count = plan.parameters(plan.stages[0])
        (group,), of = plan.parameter_groups, Activations(plan)
        sizes = {part.value: of.size(part, *(plan.model.specs if part in LAYER_PARTS else ())) for part in Part}
        return {
            "resident": {use.value: stays.resident(0)[use] / count for use in _SHARDED},
            "bucket": [stays.bucket(group, np.inf), stays.bucket(group, 1.0)],
            "gathers": stays.gathered(plan.stages) > 0,
            "there": [int(sizes.get(name, 1) != 0) for name in COLUMNS],
            "dp": [[each * (1 - 1 / replicas) for each in row] for row in sent[:2]],
            "tied": 1 - sent[2] * (1 - 1 / replicas),
        }

    return space.table(ask, "precision", "zero", "replicas")


def _footprint(space: Space, plan: Plan) -> Footprint:
    return Footprint(plan, space.scenario.framework, space.scenario.cluster.accelerator.context_bytes)


def _sent(space: Space, precision: int, zero: int) -> tuple[Row, Row, float]:
    """Buffers that a parameter goes round in, without and with one microbatch; what sharding takes off a tied one."""
    one, two = (_weights(space, precision, zero, microbatches) for microbatches in (1, 2))
    tied = [_buffers(_small(space, precision, stage, 1, pp=2), "embedding")[0] for stage in (0, zero)]
    return [2 * a - b for a, b in zip(one, two, strict=True)], one, 2 * (1 - tied[1] / tied[0])


def _weights(space: Space, precision: int, zero: int, microbatches: int) -> Row:
    """Buffers for each parameter: those of a stage without ends are a layer's, what others have more is their end's."""
    plan = _small(space, precision, zero, microbatches, pp=3)
    first, middle, last = _buffers(plan, "dp")
    (only,) = _buffers(_small(space, precision, zero, microbatches, pp=1), "dp")
    embedding = first - middle
    ends = plan.embedding.parameters, plan.head.parameters, plan.tied_head.parameters
    (layer,) = plan.layers.values()
    found = middle / layer.parameters, embedding / ends[0], (last - middle) / ends[1], (only - first) / ends[2]
    return [dict(zip(PARAMETERS, found, strict=True)).get(name, 0) for name in COLUMNS]


def _small(space: Space, precision: int, zero: int, microbatches: int, *, pp: int) -> Plan:
    """A plan of two replicas with a layer on each pipeline rank."""
    training = Training(_LENGTH, 2 * microbatches, recipe=space.precisions[precision])
    return Plan(preset(_TIED), training, Layout(dp=2, pp=pp, data=space.strategy(zero), layers_per_stage=(1,) * pp))


def _buffers(plan: Plan, role: str) -> list[float]:
    """Bytes that go round between the replicas of each pipeline rank."""
    sent = (filter(lambda each: each.group == role, exchanges(program)) for program in programs(plan))
    return [sum(ROUNDS[each.collective] * each.payload for each in found) for found in sent]


def gathered(space: Space) -> Table:
    """Bytes that a pipeline rank of [layers] gathers, where it does."""

    def ask(model: int, precision: int, tp: int, gathers: bool, embedding: bool, head: bool) -> list[float] | None:
        if (model, tp) not in space.cuts:
            return None
        stays = footprint(model, precision, tp)
        (spec,) = stays.plan.model.specs
        counts = (max(layers, 1 - embedding - head) for layers in range(lengths))
        stages = (Stage(1 - embedding, (LayerRun(spec, count),) * bool(count), embedding, head) for count in counts)
        return [stays.gathered((stage,)) if gathers else 0.0 for stage in stages]

    strategy = space.strategy(3)
    # more layers add as much as the last one did
    lengths = strategy.ahead + 3 if isinstance(strategy, FullyShard) else 1

    @cache
    def footprint(model: int, precision: int, tp: int) -> Footprint:
        return _footprint(
            space, space.plan(model=model, precision=precision, tp=tp, pp=2, zero=3, dp=2, sequence=_LENGTH * tp)
        )

    names = {name: space.values[name] for name in ("model", "precision", "tp")}
    return Table.of(ask, **names, gathers=(False, True), embedding=(False, True), head=(False, True))


def buffers(space: Space) -> Iterator[Table]:
    """Bytes of the process groups of each axis, by its degree."""
    communicator = space.scenario.framework.communicator
    for axis in NAMES:
        yield space.table(lambda **one: _footprint(space, space.plan(**one)).groups * communicator, axis)


def receives(space: Space) -> Table:
    """Messages that a rank awaits at once."""

    def ask(pp: int, chunks: int) -> float:
        plan = space.plan(pp=pp, chunks=chunks)
        return _footprint(space, plan).receives / plan.activation

    return space.table(ask, "pp", "chunks")


def fragmentation(space: Space) -> dict[str, float]:
    """What the allocator loses of each byte, by what it is used for."""
    factor = space.scenario.framework.fragmentation
    alone = {
        use: Ledger(np.zeros(1), np.array([float(use is Category.ACTIVATIONS)]), {use: 1.0}, factor) for use in Category
    }
    return {use.value: one.at_peak()[Category.FRAGMENTATION] for use, one in alone.items()}
