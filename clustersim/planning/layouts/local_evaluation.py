"""How good is a layout of replicas that train by themselves, and how good can it be at best?

Inner steps are simulated once for a layout, and every variant of the settings of local training follows from them
(`outer_variants`). The score is that of what all replicas do together: the step time is the time in which they train on
a global batch, outer exchange included, so that steps of jobs in step compare with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.interning import IdentityKey
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.planning.layouts.bounds import step_lower_bound
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.outer_variants import OuterVariant
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.reliability.local_training import LocalTraining
from clustersim.reliability.outer_all_reduce import OuterAllReduce
from clustersim.reliability.outer_exchange import exposed_seconds
from clustersim.reliability.replica_memory import distinct_replicas
from clustersim.reliability.replica_places import replica_places
from clustersim.results.memory_check import memory_fit_probability
from clustersim.results.outer_rounds import OuterRounds
from clustersim.results.search_result import LayoutResult
from clustersim.scenario import Scenario
from clustersim.scenario.diloco import DilocoSettings, StepBudget
from clustersim.scenario.resolved import ResolvedScenario

_ROUNDING_MARGIN: Final = 1.0 - 1e-9
_EXCHANGES: Final = LruCache[list["_VariantExchange"]](64, size=unit_size)


def evaluate_variants(
    scenario: Scenario,
    variants: Sequence[OuterVariant],
    objective: Objective,
    candidate: LayoutCandidate,
    headroom: float,
) -> LayoutResult:
    """A layout with its best variant, and all of them as its variants."""
    training = LocalTraining(scenario)
    results = [local_result(training, variant, objective, candidate, headroom) for variant in variants]
    best = min(results, key=lambda result: result.score)
    return replace(best, overrides=candidate.overrides, variants=tuple(results))


def local_result(
    training: LocalTraining, variant: OuterVariant, objective: Objective, candidate: LayoutCandidate, headroom: float
) -> LayoutResult:
    """What a search records of a layout with one of its variants."""
    scenario = training.scenario
    rounds = training.rounds(variant.apply(_settings(scenario)))
    index = rounds.replicas.index(rounds.pacer)
    inner = training.inner_steps[index].result
    seconds = seconds_per_batch(scenario, rounds)
    ratio = seconds / inner.step_time
    low, high = inner.step_time_interval
    price, quotes = rounds.price_per_second, inner.economics.price_quotes
    cost = None if price is None else price.amount / rounds.tokens_per_second * 1e12
    return LayoutResult(
        overrides=(*candidate.overrides, *variant.overrides),
        job=candidate.job_index,
        gpus=scenario.cluster.gpu_count,
        cluster=scenario.cluster.name,
        score=objective.local_score(scenario, seconds, cost),
        step_time=seconds,
        interval=(low * ratio, high * ratio),
        tokens_per_gpu=rounds.tokens_per_second / scenario.cluster.gpu_count,
        mfu=inner.mfu / ratio,
        mfu_causal=inner.mfu_causal / ratio,
        peak_memory=rounds.peak_memory,
        memory=rounds.memory_capacity,
        fit_probability=memory_fit_probability(scenario, rounds.peak_memory, rounds.memory_capacity, None),
        required_headroom=headroom,
        cost=cost,
        currency="" if price is None else price.currency,
        price_kind="" if price is None or not quotes or quotes[0] is None else quotes[0].kind.value,
        breakdown=dict(_breakdown(rounds, inner.breakdown.mean_seconds())),
    )


def seconds_per_batch(scenario: ResolvedScenario, rounds: OuterRounds) -> Seconds:
    """Time in which all replicas together train on a global batch."""
    return scenario.training.global_batch * scenario.training.sequence / rounds.tokens_per_second


def _breakdown(rounds: OuterRounds, inner: dict[str, Seconds]) -> Iterator[tuple[str, Seconds]]:
    """Time categories of an inner step of the replica that sets the pace, and its share of what else a round takes."""
    yield from ((category, seconds) for category, seconds in inner.items() if seconds > 0.0)
    waits, steps = rounds.waits(rounds.pacer), rounds.inner_steps(rounds.pacer)
    for category, seconds in (("slowed by the exchange", waits.slowed), ("outer exchange", waits.exchange)):
        if seconds > 0.0:
            yield category, seconds / steps


def local_lower_bound(resolved: ResolvedScenario, variants: Sequence[OuterVariant]) -> Seconds:
    """Lower bound of the time for a global batch, of the best variant."""
    steps = [step_lower_bound(replica).seconds for replica in distinct_replicas(resolved)]
    settings = _settings(resolved)
    if settings.quorum is not None or settings.step_budget is not StepBudget.SAME:
        return min(steps) * _ROUNDING_MARGIN
    layers, slowest = resolved.model.layer_count, max(steps)
    return min(waiting.round_bound(slowest, layers) for waiting in _waits(resolved, variants)) * _ROUNDING_MARGIN


@dataclass(frozen=True, slots=True)
class _VariantExchange:
    """Settings of local training with their exchange: seconds of all layers at once, and latency."""

    settings: DilocoSettings
    seconds: Seconds
    latency: Seconds

    def round_bound(self, step: Seconds, layers: int) -> Seconds:
        """An inner step's share of a round of the slowest replica, given its lower bound.

        What is exposed shrinks by at most the overlapped steps as a step takes longer, so a round never does, as long
        as exchanges of a round do not meet.
        """
        settings = self.settings
        if settings.fragments * settings.overlap > settings.inner_steps:
            return step
        return step + exposed_seconds(settings, step, layers, self.seconds, self.latency) / settings.inner_steps


def _waits(resolved: ResolvedScenario, variants: Sequence[OuterVariant]) -> list[_VariantExchange]:
    """The exchange among all replicas of each variant; the same for all layouts."""
    cluster, settings = resolved.cluster, _settings(resolved)
    key = tuple(map(IdentityKey, (cluster.machine, cluster.fabric, resolved.model))), settings, tuple(variants)
    return _EXCHANGES.get_or_compute(key, lambda: _variant_exchanges(resolved, variants))


def _variant_exchanges(resolved: ResolvedScenario, variants: Sequence[OuterVariant]) -> list[_VariantExchange]:
    all_settings = [variant.apply(_settings(resolved)) for variant in variants]
    slots, machine = replica_places(resolved), resolved.cluster.machine
    exchanges = {
        outer_format: OuterAllReduce(resolved, machine, slots, outer_format)
        for outer_format in {settings.outer_gradients for settings in all_settings}
    }
    return [
        _VariantExchange(settings, exchange.transfer_seconds, exchange.latency)
        for settings in all_settings
        for exchange in (exchanges[settings.outer_gradients],)
    ]


def _settings(resolved: ResolvedScenario) -> DilocoSettings:
    """Its settings of local training, which it has."""
    if resolved.diloco is None:
        raise TypeError(f"{resolved.name} trains in step")
    return resolved.diloco
