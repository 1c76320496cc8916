"""Why are settings impossible? The sentences of `scenario.checks`, each over the settings that it depends on.

What a remedy says beside is as in a scenario that is plain otherwise: to a batch that is too small, that is always a
larger one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

from clustersim.analysis.exploration import Table
from clustersim.planning.explore_space import Space
from clustersim.scenario import Scenario, checks
from clustersim.workload.transformer import Positions

_Check = Callable[[Scenario], Iterator[str]]
_UNCUT: Final = 1  # heads of a model that tensor parallelism cannot cut


def rules(space: Space, refused: Table) -> tuple[tuple[Table, ...], ...]:
    """Tables of sentences, in groups, of which the first that says anything is told. refused: those of schedules."""
    cut = _cuts(space), _layers(space), _recomputed(space)
    return (_degrees(space),), (*cut, *_batch(space), refused, *_sequence(space))


def _said(scenario: Scenario, *check: _Check) -> list[str] | None:
    return [problem for each in check for problem in each(scenario)] or None


def _chosen(space: Space, *keys: str) -> dict[str, Any]:
    return {key: space.choices[key] for key in keys}


def _degrees(space: Space) -> Table:
    def ask(gpus: int, tp: int, cp: int, pp: int) -> list[str] | None:
        dp = max(1, gpus // (tp * cp * pp))  # as a file without dp has it
        return _said(space.at(gpus=gpus, tp=tp, cp=cp, pp=pp, dp=dp), checks.check_degrees)

    return Table.of(ask, **_chosen(space, "gpus", "tp", "cp", "pp"))


def _cuts(space: Space) -> Table:
    def ask(model: int, tp: int) -> list[str] | None:
        return _said(space.at(model=model, tp=tp), checks.check_heads, checks.check_widths)

    return Table.of(ask, **_chosen(space, "model", "tp"))


def _layers(space: Space) -> Table:
    rooms = sorted({gpus // (tp * cp) for gpus in space.gpus for tp in space.ints("tp") for cp in space.ints("cp")})

    @cache
    def wrong(model: int, pp: int, chunks: int) -> bool:
        return _said(space.at(model=model, pp=pp, chunks=chunks), checks.check_layers) is not None

    def ask(model: int, pp: int, chunks: int, room: int) -> list[str] | None:
        if room % pp or not wrong(model, pp, chunks):
            return None
        return _said(space.at(model=model, pp=pp, chunks=chunks, gpus=room), checks.check_layers)

    return Table.of(ask, **_chosen(space, "model", "pp"), chunks=space.chunks, room=rooms)


def _recomputed(space: Space) -> Table:
    some = [way for way in space.choices["recompute"] if str(way).startswith("layers:")]

    def ask(model: int, pp: int, chunks: int, recompute: str) -> list[str] | None:
        return _said(space.at(model=model, pp=pp, chunks=chunks, recompute=recompute), checks.check_recomputed)

    return Table.of(ask, **_chosen(space, "model", "pp"), chunks=space.chunks, recompute=some)


def _batch(space: Space) -> Iterator[Table]:
    """Whether microbatches divide it, and whether a step has too many passes."""
    uncut = replace(space, models=(replace(space.scenario.model, heads=_UNCUT, kv_heads=_UNCUT),))
    stages = sorted({pp * chunks for pp in space.ints("pp") for chunks in space.chunks})

    def shared(dp: int, microbatch: int, batch: int) -> list[str] | None:
        return _said(uncut.at(dp=dp, microbatch=microbatch, batch=batch), checks.check_batch)

    def passes(stages: int, microbatches: int, batch: int) -> list[str] | None:
        if batch % microbatches:
            return None
        return _said(space.at(pp=stages, dp=batch // microbatches, batch=batch), checks.check_batch)

    yield Table.of(shared, dp=space.replicas, **_chosen(space, "microbatch", "batch"))
    yield Table.of(passes, stages=stages, microbatches=space.microbatches, batch=space.choices["batch"])


def _sequence(space: Space) -> Iterator[Table]:
    """Whether the model has so many positions, and whether ranks divide them."""

    def positions(model: int, sequence: int) -> list[str] | None:
        return _said(space.at(model=model, sequence=sequence), checks.check_sequence)

    def parts(sequence: int, cp: int, tp: int, split: bool) -> list[str] | None:
        return _said(rotary.at(sequence=sequence, cp=cp, tp=tp, split=split), checks.check_sequence)

    rotary = replace(space, models=(replace(space.scenario.model, positions=Positions.ROTARY),))
    yield Table.of(positions, **_chosen(space, "model", "sequence"))
    yield Table.of(parts, **_chosen(space, "sequence", "cp", "tp", "split"))
