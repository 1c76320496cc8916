"""How does the step time scale with GPUs and degrees? A few dozen steps simulated for the explorer page.

Weak scaling keeps the batch per replica, strong scaling the global batch; both change dp only. Layouts and
ZeRO stages are compared on the scenario's own GPUs and batch. All on a healthy cluster, one step each.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Final

from clustersim.common.errors import InputError
from clustersim.parallel.layout import Layout
from clustersim.parallel.token_dispatch import runs_on
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import ScalingPoint, ScalingStudy
from clustersim.results.utilization import bubble_fraction, exposed_fraction
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

GPU_COUNT_RATIOS: Final = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""GPU counts as fractions (numerator, denominator) of the scenario's."""
MAX_STUDY_LAYOUTS: Final = 10
MAX_STUDY_PASSES: Final = 2**13  # maximum of microbatches x stages per simulated step: a second or two
_PLAIN_OVERRIDES: Final = ("steps=1", "degradations={}", "cost.symmetry=auto")
_ZERO_STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class StepVariant:
    """A step to simulate. None: as in the scenario."""

    gpus: int
    tp: int
    pp: int
    dp: int
    batch: int
    encoder_dp: int | None = None
    zero: int | None = None
    ep: int | None = None
    dispatcher: TokenDispatcher | None = None


@dataclass(frozen=True, slots=True)
class _StudyPlan:
    """A study before its steps are simulated: (label, variant) of each."""

    name: str
    title: str
    description: str
    variants: tuple[tuple[str, StepVariant], ...]


def step_tasks(scenario: Scenario) -> dict[StepVariant, Callable[[], ScalingPoint]]:
    """What simulates each step of the studies."""
    variants = (variant for study in _plan_studies(scenario) for _, variant in study.variants)
    return {variant: partial(_simulate_point, scenario, variant) for variant in variants}


def assemble_studies(scenario: Scenario, points: Mapping[StepVariant, ScalingPoint]) -> tuple[ScalingStudy, ...]:
    """All studies of a scenario from their simulated steps."""
    baseline = _baseline(scenario)
    return tuple(
        ScalingStudy(
            study.name,
            study.title,
            study.description,
            tuple(
                replace(points[variant], label=label, is_baseline=variant == baseline)
                for label, variant in study.variants
            ),
        )
        for study in _plan_studies(scenario)
    )


def _plan_studies(scenario: Scenario) -> Iterator[_StudyPlan]:
    layout, batch, baseline = scenario.layout.as_configured, scenario.training.global_batch, _baseline(scenario)
    scaled = list(_scaled_variants(baseline))
    fixed = f"tp {layout.tp}, pp {layout.pp}" + (f", cp {layout.cp}" if layout.cp > 1 else "")
    yield _StudyPlan(
        "weak",
        "batch grows with the GPUs",
        f"Weak scaling: {fixed} stay, dp and the batch grow with the GPUs.",
        tuple(
            (_layout_label(step_variant), replace(step_variant, batch=batch * step_variant.dp // layout.dp))
            for step_variant in scaled
        ),
    )
    yield _StudyPlan(
        "strong",
        "batch stays",
        f"Strong scaling: {fixed} and the batch of {batch:,} sequences stay, dp grows with the GPUs.",
        tuple((_layout_label(layout_scenario), layout_scenario) for layout_scenario in scaled),
    )
    yield _StudyPlan(
        "layouts",
        "layout",
        f"Layouts near the scenario's on its {baseline.gpus:,} GPUs with its batch of {batch:,} sequences.",
        tuple((_layout_label(nearby_layout), nearby_layout) for nearby_layout in _nearby_layouts(scenario, baseline)),
    )
    if scenario.model.distinct_routed_moes:
        yield _StudyPlan(
            "experts",
            "where experts are",
            f"Experts over more and fewer ranks, and each dispatcher, all else as it is: etp {layout.effective_etp}.",
            tuple(
                (_experts_label(scenario, expert_variant), expert_variant)
                for expert_variant in _expert_variants(scenario, baseline)
            ),
        )
    if layout.dp * layout.cp > 1:
        yield _StudyPlan(
            "zero",
            "ZeRO stage",
            "The scenario with each ZeRO stage, all else as it is.",
            tuple((label, replace(baseline, zero=zero)) for label, zero in _zero_stages(scenario)),
        )


def _baseline(scenario: Scenario) -> StepVariant:
    layout = scenario.layout.as_configured
    sizes = layout.tp, layout.pp, layout.dp, scenario.training.global_batch, layout.encoder_dp
    return StepVariant(scenario.cluster.gpu_count, *sizes)


def _layout_label(variant: StepVariant) -> str:
    return f"tp {variant.tp} pp {variant.pp} dp {variant.dp}"


def _scaled_variants(baseline: StepVariant) -> Iterator[StepVariant]:
    """The scenario on fewer and more GPUs, where dp, batch and an encoder's own GPUs scale by the same ratio."""
    encoder_dp = baseline.encoder_dp
    for numerator, denominator in GPU_COUNT_RATIOS:
        if any(size * numerator % denominator for size in (baseline.dp, baseline.batch, encoder_dp or 0)):
            continue
        yield replace(
            baseline,
            gpus=baseline.gpus * numerator // denominator,
            dp=baseline.dp * numerator // denominator,
            encoder_dp=encoder_dp and encoder_dp * numerator // denominator,
        )


def _nearby_layouts(scenario: Scenario, baseline: StepVariant) -> list[StepVariant]:
    """Layouts on the same GPUs that are nearest to the scenario's, in powers of two of tp and pp."""
    layout, own_stages = scenario.layout, int(baseline.encoder_dp is not None)
    replicas, stages = (baseline.gpus - layout.encoder_ranks) // layout.cp, baseline.pp - own_stages
    candidates = [
        replace(baseline, tp=tp, pp=pp + own_stages, dp=replicas // (tp * pp))
        for tp in {baseline.tp, *(2**power for power in range(7))}
        for pp in {stages, *(2**power for power in range(10)), *(stages * 2, stages * 4)}
        if replicas % (tp * pp) == 0
        and tp <= max(baseline.tp, scenario.cluster.gpus_per_node)
        and pp <= scenario.model.layer_count
    ]
    nearest = sorted(candidates, key=lambda layout: (_distance(layout, baseline), layout.tp, layout.pp))[
        :MAX_STUDY_LAYOUTS
    ]
    return sorted(nearest, key=lambda layout: (layout.tp, layout.pp))


def _expert_variants(scenario: Scenario, baseline: StepVariant) -> Iterator[StepVariant]:
    """Expert parallelism over 1/4, 1/2, 1, 2 and 4 times the ranks, and the other token dispatchers.

    DeepEP's kernels by UCCL differ over EFA alone.
    """
    ep, dispatcher = scenario.layout.ep, scenario.layout.dispatcher
    for degree in (ep // 4, ep // 2, ep, 2 * ep, 4 * ep):
        if degree:
            yield baseline if degree == ep else replace(baseline, ep=degree)
    yield from (
        replace(baseline, dispatcher=token_dispatcher)
        for token_dispatcher in TokenDispatcher
        if token_dispatcher not in (dispatcher, TokenDispatcher.DEEPEP_UCCL)
        and runs_on(token_dispatcher, scenario.cluster.accelerator)
    )


def _experts_label(scenario: Scenario, variant: StepVariant) -> str:
    layout = scenario.layout.as_configured
    return f"ep {variant.ep or layout.ep}, {(variant.dispatcher or layout.dispatcher).value}"


def _distance(one: StepVariant, other: StepVariant) -> float:
    return abs(log2(one.tp / other.tp)) + abs(log2(one.pp / other.pp))


def _zero_stages(scenario: Scenario) -> Iterator[tuple[str, int | None]]:
    """(name, stage) of every ZeRO stage; None for the scenario's own."""
    strategy = scenario.layout.data
    for stage, name in enumerate(("DDP (ZeRO 0)", "ZeRO 1", "ZeRO 2", "ZeRO 3")):
        yield name, None if strategy.zero_stage == stage and not strategy.is_single_process else stage


def _overrides(scenario: Scenario, variant: StepVariant) -> Iterator[str]:
    """The overrides that turn the scenario into a variant."""
    layout: Layout = scenario.layout.as_configured
    yield from _PLAIN_OVERRIDES
    yield f"cluster.gpus={variant.gpus}"
    yield f"layout.cp={layout.cp}"
    for axis in ("tp", "pp", "dp"):
        yield f"layout.{axis}={getattr(variant, axis)}"
    if variant.encoder_dp is not None:
        yield f"layout.encoder_tp={layout.encoder_layout.tp}"
        yield f"layout.encoder_dp={variant.encoder_dp}"
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
        yield f"layout.data={_ZERO_STRATEGIES[variant.zero]}"


def _simulate_point(scenario: Scenario, variant: StepVariant) -> ScalingPoint:
    """A simulated step, or the reason why there is none."""
    try:
        changed = scenario.with_overrides(_overrides(scenario, variant))
    except InputError as error:
        return ScalingPoint("", variant.gpus, missing_reason=_error_reason(scenario, error))
    passes, max_passes = _stage_passes(changed), max(MAX_STUDY_PASSES, _stage_passes(scenario))
    if passes > max_passes:
        return ScalingPoint(
            "",
            variant.gpus,
            missing_reason=f"{passes:,} passes of microbatches take long; {max_passes:,} are the most here",
        )
    result = simulate(changed)
    return ScalingPoint(
        label="",
        gpus=variant.gpus,
        step_time=result.step_time,
        tokens_per_gpu=result.tokens_per_second / result.rank_count,
        mfu=result.mfu,
        mfu_causal=result.mfu_causal,
        bubble_fraction=bubble_fraction(result.breakdown),
        exposed_fraction=exposed_fraction(result.breakdown),
        peak_memory=result.peak_memory,
        fits=result.fits_in_memory,
    )


def _stage_passes(scenario: Scenario) -> int:
    """Microbatches times stages, to which simulation time is proportional."""
    return scenario.microbatch_count * len(scenario.placement.stage_ranks)


def _error_reason(scenario: Scenario, error: InputError) -> str:
    """The first line of the error without the file name."""
    first = str(error).splitlines()[0]
    return first.removeprefix(f"{scenario.path or scenario.name}: ")
