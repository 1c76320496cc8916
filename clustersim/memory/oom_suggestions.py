"""What would make a scenario fit? Changes that bring the peak down, from the cheapest in time to the dearest.

Each kind of change is a ladder; its first rung that is legal and fits is told. Candidates keep the number of GPUs and
the batch. Where no change does alone, those that do together with full recomputation are told.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes
from clustersim.model.offload import ActivationOffload, Offload, OptimizerOffload
from clustersim.model.recompute_modules import Module
from clustersim.model.training import (
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOperations,
    SelectiveRecompute,
    Training,
)
from clustersim.parallel.data_parallel_strategy import STRATEGY_BY_ZERO_STAGE
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MOST = 4
_SPARSE = frozenset({Module.EXPERTS_ACTIVATION, Module.LATENT_UP})
_RUNGS = (
    frozenset({Module.EXPERTS_ACTIVATION}),
    frozenset({Module.LAYERNORM, Module.LATENT_UP}),
    frozenset({Module.SHARED_EXPERTS, Module.MLP}),
    frozenset({Module.MIXTURE}),
)
PeakOf = Callable[[Plan], Bytes]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that may fit, and in words what it changes."""

    words: str
    plan: Plan


def remedies(plan: Plan, capacity: Bytes, peak_of: PeakOf, *, domain: int) -> list[str]:
    """Sentences that name a change and the peak after it.

    peak_of: raises InputError for a plan that is not legal; domain: GPUs of one NVLink domain, the most tensor-parallel
    ranks that are proposed.
    """
    again = _trained(plan, recompute=FullRecompute())
    alone = (_recompute(plan), _smaller(plan), _quantized(plan), *_other_ladders(plan, domain))
    paired = (_with_full(ladder) for ladder in _other_ladders(again, domain))
    for ladders in (alone, paired):
        fitting = (found for ladder in ladders if (found := _first(ladder, capacity, peak_of)) is not None)
        told = list(islice(fitting, MOST))
        if told:
            return told
    return ["no single change of recomputation, sharding, degrees or offload fits; use more GPUs or a smaller model"]


def _first(ladder: Iterator[Candidate], capacity: Bytes, peak_of: PeakOf) -> str | None:
    """The first candidate that is legal and fits, in words."""
    for candidate in ladder:
        try:
            peak = peak_of(candidate.plan)
        except InputError:
            continue
        if peak <= capacity:
            return f"{candidate.words} would fit ({format_bytes(peak)} of {format_bytes(capacity)})"
    return None


def _with_full(ladder: Iterator[Candidate]) -> Iterator[Candidate]:
    return (replace(candidate, words=f"training.recompute=full with {candidate.words}") for candidate in ladder)


def _recompute(plan: Plan) -> Iterator[Candidate]:
    """More and more recomputation."""
    now = plan.training.recompute
    layers = max(stage.layer_count for stage in plan.stages)
    done = max(map(plan.recomputed_layer_count, plan.stages))
    if isinstance(now, NoRecompute):
        yield Candidate("training.recompute=selective", _trained(plan, recompute=SelectiveRecompute()))
    yield from _modules(plan)
    selective = isinstance(now, SelectiveRecompute | SelectiveOperations)
    mode = "training.recompute=full " if selective else ""
    for count in range(done + 1, layers):
        yield Candidate(f"{mode}training.recompute.layers={count}", _trained(plan, recompute=FullRecompute(count)))
    if done < layers:
        yield Candidate("training.recompute=full", _trained(plan, recompute=FullRecompute()))


def _modules(plan: Plan) -> Iterator[Candidate]:
    """More and more modules of layers with experts or latent attention, beside those that are recomputed now.

    First what is cheap to make again, then whole mixtures, whose tokens travel again.
    """
    there = {item.module for layer in plan.layer_by_spec.values() for part in layer.operators for item in part.within}
    match plan.training.recompute:
        case SelectiveRecompute(modules):
            now = modules
        case NoRecompute():
            now = frozenset[Module]()
        case _:
            return
    for more in _RUNGS if there & _SPARSE else ():
        found = now | (more & there)
        if found != now:
            words = ",".join(module.value for module in Module if module in found)
            yield Candidate(
                f"training.recompute.modules=[{words}]", _trained(plan, recompute=SelectiveRecompute(found))
            )
            now = found


def _smaller(plan: Plan) -> Iterator[Candidate]:
    """Smaller microbatches."""
    if plan.training.microbatch > 1:
        yield Candidate("training.microbatch=1", _trained(plan, microbatch=1))


def _quantized(plan: Plan) -> Iterator[Candidate]:
    """Frozen matrices in 4 bits."""
    lora = plan.training.lora
    if lora is not None and lora.base is None:
        training = replace(plan.training, lora=replace(lora, base=DType.NF4))
        yield Candidate("training.lora.base=nf4", replace(plan, training=training))


def _other_ladders(plan: Plan, domain: int) -> tuple[Iterator[Candidate], ...]:
    return _split_sequence(plan), _sharding(plan), _wider(plan, domain), _deeper(plan), _offload(plan)


def _split_sequence(plan: Plan) -> Iterator[Candidate]:
    """Norms and residuals on parts of the sequence."""
    if plan.layout.tp > 1 and not plan.layout.sequence_parallel:
        yield Candidate("layout.sequence_parallel=true", _spread(plan, replace(plan.layout, sequence_parallel=True)))


def _sharding(plan: Plan) -> Iterator[Candidate]:
    """More and more of the states sharded, as far as frameworks do so: with a pipeline, optimizer states only.

    What ZeRO-2 and FSDP hold beside a pipeline is whole during the step (`parallel.data_parallel_strategy`), so they would help no more.
    """
    most = 1 if plan.layout.is_pipelined else 3
    if any(group.dp_size > 1 for group in plan.parameter_groups):
        for stage in range(plan.layout.data.zero_stage + 1, most + 1):
            yield Candidate(
                f"layout.data=zero{stage}", _spread(plan, replace(plan.layout, data=STRATEGY_BY_ZERO_STAGE[stage]()))
            )


def _wider(plan: Plan, domain: int) -> Iterator[Candidate]:
    """Tensor parallelism in place of data parallelism, inside the NVLink domain."""
    layout = plan.layout
    for factor in (2, 4, 8):
        if layout.as_configured.dp % factor == 0 and layout.tp * factor <= domain:
            wider = replace(layout, tp=layout.tp * factor, dp=layout.dp // factor)
            yield Candidate(_words(wider), _spread(plan, wider))


def _deeper(plan: Plan) -> Iterator[Candidate]:
    """Pipeline parallelism in place of data parallelism."""
    layout = plan.layout
    again_even = " layout.layers_per_stage=even" if layout.layers_per_stage else ""
    for factor in (2, 4, 8):
        if layout.as_configured.dp % factor == 0:
            deeper = replace(layout, pp=layout.pp * factor, dp=layout.dp // factor, layers_per_stage=None)
            yield Candidate(_words(deeper) + again_even, _spread(plan, deeper))


def _offload(plan: Plan) -> Iterator[Candidate]:
    """The optimizer on the host, or activations."""
    offload = plan.training.offload
    if offload.states is None:
        there = replace(offload, states=OptimizerOffload())
        yield Candidate("training.offload.optimizer=true", _trained(plan, offload=there))
    if offload.activations is None:
        there = replace(offload, activations=ActivationOffload())
        yield Candidate("training.offload.activations=all", _trained(plan, offload=there))


def _words(layout: Layout) -> str:
    written = layout.as_configured
    return f"layout.tp={written.tp} layout.pp={written.pp} layout.dp={written.dp}"


def _trained(plan: Plan, **changes: Recompute | Offload | int) -> Plan:
    training: Training = replace(plan.training, **changes)  # type: ignore[arg-type]
    return replace(plan, training=training)


def _spread(plan: Plan, layout: Layout) -> Plan:
    return replace(plan, layout=layout)
