"""What would make a scenario fit? Changes that bring the peak down, from the cheapest in time to the dearest.

Each candidate keeps the number of GPUs and the batch. The first few that are legal and fit are told; where no change
does alone, those that do together with full recomputation.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from clustersim.errors import InputError
from clustersim.parallel.data import NaiveDataParallel, Replicated, Zero
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.units import Bytes, format_bytes
from clustersim.workload.training import FullRecompute, NoRecompute, SelectiveRecompute, Training

MOST = 4


def remedies(plan: Plan, capacity: Bytes, peak_of: Callable[[Plan], Bytes]) -> list[str]:
    """Sentences that name a change and the peak after it; peak_of raises InputError for a plan that is not legal."""
    for candidates in (_single(plan), _paired(plan)):
        peaks = ((words, _peak(changed, peak_of)) for words, changed in candidates)
        fitting = ((words, peak) for words, peak in peaks if peak is not None and peak <= capacity)
        told = list(islice(fitting, MOST))
        if told:
            return [f"{words} would fit ({format_bytes(peak)} of {format_bytes(capacity)})" for words, peak in told]
    return ["no single change of recomputation, sharding or degrees fits; use more GPUs or a smaller model"]


def _peak(plan: Plan, peak_of: Callable[[Plan], Bytes]) -> Bytes | None:
    """The peak, or None where the plan is not legal."""
    try:
        return peak_of(plan)
    except InputError:
        return None


def _single(plan: Plan) -> Iterator[tuple[str, Plan]]:
    yield from _recompute(plan)
    yield from _sharding(plan)
    yield from _degrees(plan)


def _paired(plan: Plan) -> Iterator[tuple[str, Plan]]:
    again = _with_training(plan, replace(plan.training, recompute=FullRecompute()))
    for words, changed in (*_sharding(again), *_degrees(again)):
        yield f"training.recompute=full with {words}", changed


def _recompute(plan: Plan) -> Iterator[tuple[str, Plan]]:
    training = plan.training
    if isinstance(training.recompute, NoRecompute):
        yield "training.recompute=selective", _with_training(plan, replace(training, recompute=SelectiveRecompute()))
    if training.recompute != FullRecompute():
        yield "training.recompute=full", _with_training(plan, replace(training, recompute=FullRecompute()))
    if training.microbatch > 1:
        yield "training.microbatch=1", _with_training(plan, replace(training, microbatch=1))


def _sharding(plan: Plan) -> Iterator[tuple[str, Plan]]:
    layout = plan.layout
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "layout.sequence_parallel=true", _with_layout(plan, replace(layout, sequence_parallel=True))
    if plan.replicas == 1:
        return
    now = {Replicated: 0, NaiveDataParallel: 0}.get(type(layout.data), getattr(layout.data, "stage", 0))
    for stage in range(now + 1, 4):
        yield f"layout.data=zero{stage}", _with_layout(plan, replace(layout, data=Zero(stage)))


def _degrees(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """More tensor or pipeline parallelism in place of data parallelism."""
    layout = plan.layout
    for factor in (2, 4, 8):
        if layout.dp % factor:
            return
        wider = replace(layout, tp=layout.tp * factor, dp=layout.dp // factor)
        if wider.tp <= 8:  # one node's NVLink
            yield _words(wider), _with_layout(plan, wider)
        deeper = replace(layout, pp=layout.pp * factor, dp=layout.dp // factor, layers_per_stage=None)
        again_even = " layout.layers_per_stage=even" if layout.layers_per_stage else ""
        yield _words(deeper) + again_even, _with_layout(plan, deeper)


def _words(layout: Layout) -> str:
    return f"layout.tp={layout.tp} layout.pp={layout.pp} layout.dp={layout.dp}"


def _with_training(plan: Plan, training: Training) -> Plan:
    return replace(plan, training=training)


def _with_layout(plan: Plan, layout: Layout) -> Plan:
    return replace(plan, layout=layout)
