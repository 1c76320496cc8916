"""How does the step time change with GPUs and degrees? A few dozen steps, simulated for the explorer page.

Weak scaling keeps the batch of each replica, strong scaling the whole batch; both change dp alone. Layouts and ZeRO
stages are compared on the scenario's own GPUs and batch. All on a healthy cluster, one step each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Final

from clustersim.common.errors import InputError
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.layout import Layout
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import Point, Study
from clustersim.results.utilization import bubble_fraction, exposed_fraction
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SCALES: Final = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""Numbers of GPUs, as parts (numerator, denominator) of the scenario's."""
MOST_LAYOUTS: Final = 10
MOST_PASSES: Final = 2**13  # of microbatches through stages, that are simulated: a second or two
_PLAIN: Final = ("steps=1", "disturbances={}", "cost.symmetry=auto")
_ZERO: Final = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class _Variant:
    """A step to be simulated, by what it may change. None: as in the scenario."""

    gpus: int
    tp: int
    pp: int
    dp: int
    batch: int
    zero: int | None = None
    ep: int | None = None
    dispatcher: TokenDispatcher | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A study before its steps are simulated: each with its label."""

    name: str
    title: str
    words: str
    variants: tuple[tuple[str, _Variant], ...]


def count(scenario: Scenario) -> int:
    """How many steps `studies` simulates."""
    return len({variant for asked in _asked(scenario) for _, variant in asked.variants})


def studies(scenario: Scenario, done: Callable[[int], None]) -> tuple[Study, ...]:
    """All studies of a scenario; `done` is told how many steps are simulated."""
    known: dict[_Variant, Point] = {}
    own = _own(scenario)

    def point(label: str, variant: _Variant) -> Point:
        if variant not in known:
            known[variant] = _point(scenario, variant)
            done(len(known))
        return replace(known[variant], label=label, own=variant == own)

    return tuple(
        Study(asked.name, asked.title, asked.words, tuple(point(*item) for item in asked.variants))
        for asked in _asked(scenario)
    )


def _asked(scenario: Scenario) -> Iterator[_Asked]:
    layout, batch, own = scenario.layout.as_configured, scenario.training.global_batch, _own(scenario)
    sizes = list(_sizes(own))
    fixed = f"tp {layout.tp}, pp {layout.pp}" + (f", cp {layout.cp}" if layout.cp > 1 else "")
    yield _Asked(
        "weak",
        "batch grows with the GPUs",
        f"Weak scaling: {fixed} stay, dp and the batch grow with the GPUs.",
        tuple((_label(size), replace(size, batch=batch * size.dp // layout.dp)) for size in sizes),
    )
    yield _Asked(
        "strong",
        "batch stays",
        f"Strong scaling: {fixed} and the batch of {batch:,} sequences stay, dp grows with the GPUs.",
        tuple((_label(variant), variant) for variant in sizes),
    )
    yield _Asked(
        "layouts",
        "layout",
        f"Layouts near the scenario's on its {own.gpus:,} GPUs with its batch of {batch:,} sequences.",
        tuple((_label(item), item) for item in _layouts(scenario, own)),
    )
    if any(distinct_moe.single_dense_mlp is None for distinct_moe in scenario.model.distinct_moes):
        yield _Asked(
            "experts",
            "where experts are",
            f"Experts over more and fewer ranks, and each dispatcher, all else as it is: etp {layout.effective_etp}.",
            tuple((_experts_label(scenario, element), element) for element in _spread(scenario, own)),
        )
    if layout.dp * layout.cp > 1:
        yield _Asked(
            "zero",
            "ZeRO stage",
            "The scenario with each ZeRO stage, all else as it is.",
            tuple((words, replace(own, zero=zero)) for words, zero in _stages(scenario)),
        )


def _own(scenario: Scenario) -> _Variant:
    layout = scenario.layout.as_configured
    return _Variant(scenario.cluster.gpu_count, layout.tp, layout.pp, layout.dp, scenario.training.global_batch)


def _label(variant: _Variant) -> str:
    return f"tp {variant.tp} pp {variant.pp} dp {variant.dp}"


def _sizes(own: _Variant) -> Iterator[_Variant]:
    """The scenario on fewer and more GPUs, as far as dp can follow."""
    for many, of in SCALES:
        if own.dp * many % of == 0 and own.batch * many % of == 0:
            yield replace(own, gpus=own.gpus * many // of, dp=own.dp * many // of)


def _layouts(scenario: Scenario, own: _Variant) -> list[_Variant]:
    """The layouts of the same GPUs that are nearest to the scenario's, by factors of two of tp and pp."""
    replicas = own.gpus // scenario.layout.cp
    found = [
        replace(own, tp=tp, pp=pp, dp=replicas // (tp * pp))
        for tp in {own.tp, *(2**power for power in range(7))}
        for pp in {own.pp, *(2**power for power in range(10)), *(own.pp * 2, own.pp * 4)}
        if replicas % (tp * pp) == 0
        and tp <= max(own.tp, scenario.cluster.gpus_per_node)
        and pp <= scenario.model.layer_count
    ]
    nearest = sorted(found, key=lambda each: (_distance(each, own), each.tp, each.pp))[:MOST_LAYOUTS]
    return sorted(nearest, key=lambda each: (each.tp, each.pp))


def _spread(scenario: Scenario, own: _Variant) -> Iterator[_Variant]:
    """Experts over twice and half, four times and a quarter of the ranks, and the other dispatchers."""
    ep, now = scenario.layout.ep, scenario.layout.dispatcher
    for degree in (ep // 4, ep // 2, ep, 2 * ep, 4 * ep):
        if degree:
            yield own if degree == ep else replace(own, ep=degree)
    yield from (
        replace(own, dispatcher=token_dispatcher) for token_dispatcher in TokenDispatcher if token_dispatcher is not now
    )


def _experts_label(scenario: Scenario, variant: _Variant) -> str:
    layout = scenario.layout.as_configured
    return f"ep {variant.ep or layout.ep}, {(variant.dispatcher or layout.dispatcher).value}"


def _distance(one: _Variant, other: _Variant) -> float:
    return abs(log2(one.tp / other.tp)) + abs(log2(one.pp / other.pp))


def _stages(scenario: Scenario) -> Iterator[tuple[str, int | None]]:
    """Every stage in words; the scenario's own as it is."""
    own = scenario.layout.data
    for stage, name in enumerate(("DDP (ZeRO 0)", "ZeRO 1", "ZeRO 2", "ZeRO 3")):
        yield name, None if own.zero_stage == stage and not isinstance(own, NaiveDataParallel) else stage


def _changes(scenario: Scenario, variant: _Variant) -> Iterator[str]:
    """What makes a variant of the scenario."""
    layout: Layout = scenario.layout.as_configured
    yield from _PLAIN
    yield f"cluster.gpus={variant.gpus}"
    yield f"layout.cp={layout.cp}"
    for axis in ("tp", "pp", "dp"):
        yield f"layout.{axis}={getattr(variant, axis)}"
    yield f"training.global_batch={variant.batch}"
    if variant.pp != layout.pp:
        yield "layout.layers_per_stage=even"
    if variant.pp == 1 and scenario.placement.max_chunks > 1:
        yield "schedule=1f1b"
    if variant.ep is not None:
        yield f"layout.ep={variant.ep}"
        yield f"layout.etp={layout.effective_etp}"
    if variant.dispatcher is not None:
        yield f"layout.dispatcher={variant.dispatcher.value}"
    if variant.zero is not None:
        yield f"layout.data={_ZERO[variant.zero]}"


def _point(scenario: Scenario, variant: _Variant) -> Point:
    """A simulated step, or why there is none."""
    try:
        changed = scenario.with_overrides(_changes(scenario, variant))
    except InputError as error:
        return Point("", variant.gpus, missing=_reason(scenario, error))
    passes, most = _passes(changed), max(MOST_PASSES, _passes(scenario))
    if passes > most:
        return Point(
            "", variant.gpus, missing=f"{passes:,} passes of microbatches take long; {most:,} are the most here"
        )
    result = simulate(changed)
    return Point(
        label="",
        gpus=variant.gpus,
        step_time=result.step_time,
        tokens_per_gpu=result.tokens_per_second / result.rank_count,
        mfu=result.mfu(),
        mfu_causal=result.mfu_causal(),
        bubble=bubble_fraction(result.breakdown),
        exposed=exposed_fraction(result.breakdown),
        peak=result.peak_memory,
        fits=result.fits_in_memory,
    )


def _passes(scenario: Scenario) -> int:
    """Microbatches through stages, which is what a simulation's time grows with."""
    return scenario.microbatch_count * len(scenario.placement.stage_ranks)


def _reason(scenario: Scenario, error: InputError) -> str:
    """The error without the name of the file."""
    first = str(error).splitlines()[0]
    return first.removeprefix(f"{scenario.path or scenario.name}: ")
