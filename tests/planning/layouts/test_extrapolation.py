"""Steps of many microbatches extrapolated from fewer, accurately enough to exclude layouts from the best."""

from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace, extrapolation
from clustersim.planning.layouts.extrapolation import MAX_OVERESTIMATE, extrapolate_step
from clustersim.planning.layouts.objective import Objective
from clustersim.results.search_result import SearchResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.conftest import examples
from tests.planning.layouts.search_scenarios import exhaustive_step_times, search_scenario, varied_overrides

LONG_STEP = ("training.microbatch=1", "model.layers=8")
SCHEDULES = [
    "1f1b",
    "{interleaved: {chunks: 2}}",
    "zb-v",
    "dualpipe",
    "dualpipev",
]
SCENARIO_OVERRIDES = [
    (),
    ("cost.network=uncontended",),
    ("degradations.slow=[{gpu: 3, speed: 0.8}]",),
    ("training.precision=fp8",),
    ("layout.tp_comm_overlap=true",),
]


@pytest.fixture
def extrapolate_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extrapolate models of few layers as well, which are simulated quickly."""
    monkeypatch.setattr(extrapolation, "MIN_LAYER_PASSES", 0)


@pytest.mark.usefixtures("extrapolate_small_models")
def test_a_single_gpu_step_is_linear_in_the_microbatches() -> None:
    """Without communication t(m) = a + b m up to rounding, and so is each category."""
    single_gpu = ("layout={tp: 1, pp: 1, dp: 1, data: ddp}", "cluster.gpus=1", "training.global_batch=43", *LONG_STEP)
    chosen = search_scenario(*single_gpu)
    estimate, full = extrapolate_step(chosen), simulate(chosen)
    assert estimate is not None
    assert estimate.short_result.scenario.microbatch_count == 12
    assert estimate.step_time == pytest.approx(full.step_time, rel=1e-12)
    assert estimate.breakdown.mean_seconds() == pytest.approx(full.breakdown.mean_seconds(), rel=1e-9, abs=1e-15)
    assert estimate.economics.energy_per_step == pytest.approx(full.economics.energy_per_step, rel=1e-9)
    assert estimate.economics.cost_per_trillion_tokens == pytest.approx(full.economics.cost_per_trillion_tokens)
    assert estimate.tokens_per_second == pytest.approx(full.tokens_per_second)
    assert estimate.mfu == pytest.approx(full.mfu)


@examples(60)
@given(data=st.data(), moe=st.booleans(), other=st.sampled_from(SCENARIO_OVERRIDES), more=st.integers(0, 12))
def test_the_estimate_exceeds_the_step_by_at_most_the_limit(
    data: st.DataObject, moe: bool, other: tuple[str, ...], more: int
) -> None:
    tp, pp = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    strategy = data.draw(st.sampled_from(["ddp", "zero1", "fsdp", "{hsdp: {shard: 2}}"]))
    dp = data.draw(st.sampled_from([item for item in (1, 2, 4) if item * tp * pp <= 16]))
    layout = f"tp: {tp}, pp: {pp}, dp: {dp}, data: {strategy}, sequence_parallel: {'true' if tp > 1 else 'false'}"
    sizes = (f"cluster.gpus={max(tp * pp * dp, 4)}", f"training.global_batch={(max(36, 9 * pp) + more) * dp}")
    schedule = data.draw(st.sampled_from(SCHEDULES))
    recompute = data.draw(st.sampled_from(["none", "full", "{layers: 1}"]))
    overrides = (
        f"layout={{{layout}}}",
        f"schedule={schedule}",
        f"training.recompute={recompute}",
        *sizes,
        *LONG_STEP,
        *other,
    )
    try:
        chosen = search_scenario(*overrides, moe=moe)
    except InputError:
        assume(False)
    with patch.object(extrapolation, "MIN_LAYER_PASSES", 0):
        estimate = extrapolate_step(chosen)
    assume(estimate is not None)
    assert estimate is not None
    full = simulate(chosen)
    assert estimate.step_time * (1.0 - MAX_OVERESTIMATE) <= full.step_time
    assert estimate.peak_memory == pytest.approx(full.peak_memory, rel=1e-12)
    assert estimate.memory_capacity == full.memory_capacity
    if Objective.ENERGY.allows_estimates(chosen):
        assert (
            estimate.economics.energy_per_step * (1.0 - Objective.ENERGY.estimate_margin)
            <= full.economics.energy_per_step
        )
    assert sum(estimate.breakdown.mean_seconds().values()) == pytest.approx(estimate.step_time)
    assert estimate.mfu * estimate.step_time == pytest.approx(full.mfu * full.step_time)


@pytest.mark.usefixtures("extrapolate_small_models")
def test_energy_is_extrapolated_as_accurately_as_the_step() -> None:
    """Except with a GPU of half the speed: waiting for it changes from the fourth microbatch on."""
    chosen = search_scenario("layout={tp: 1, dp: 8, data: zero2}", *LONG_STEP, "training.global_batch=1024")
    slow = chosen.with_overrides(["degradations.slow=[{gpu: 3, speed: 0.5}]"])
    assert [Objective.ENERGY.allows_estimates(scenario) for scenario in (chosen, slow)] == [True, False]
    for item in (chosen, slow):
        estimate, full = extrapolate_step(item), simulate(item)
        assert estimate is not None
        assert estimate.step_time == pytest.approx(full.step_time, rel=1e-6)
        error = estimate.economics.energy_per_step / full.economics.energy_per_step - 1.0
        assert (abs(error) < MAX_OVERESTIMATE) == (item is chosen)


@pytest.mark.usefixtures("extrapolate_small_models")
@pytest.mark.parametrize(
    "other",
    [
        ("training.global_batch=35",),
        ("steps=2",),
        ("degradations.jitter=0.05",),
        (
            "degradations.traffic=[{gpus: [0, 1], bytes: 1 MB, every: 1 ms}]",
            "cluster.gpus=2",
            "layout.dp=2",
            "training.global_batch=80",
        ),
        ("schedule=zb-1p", "layout.pp=2", "cluster.gpus=2"),
        (  # in 12 rounds of 17 microbatches
            "schedule={interleaved: {chunks: 2}}",
            "layout.pp=16",
            "cluster.gpus=16",
            "model.layers=32",
            "training.global_batch=204",
        ),
    ],
)
def test_steps_without_a_steady_state_are_not_extrapolated(other: tuple[str, ...]) -> None:
    base = ("layout={tp: 1, pp: 1, dp: 1, data: ddp}", "cluster.gpus=1", "training.global_batch=40", *LONG_STEP)
    assert extrapolate_step(search_scenario(*base)) is not None
    assert extrapolate_step(search_scenario(*base, *other)) is None


@pytest.mark.usefixtures("extrapolate_small_models")
def test_random_expert_load_is_not_extrapolated() -> None:
    even = search_scenario("layout={ep: 2, dp: 2}", "cluster.gpus=2", "training.global_batch=80", *LONG_STEP, moe=True)
    uneven = even.with_overrides(["training.expert_load={coefficient_of_variation: 0.4}"])
    assert extrapolate_step(even) is not None
    assert extrapolate_step(uneven) is None


VARY = {
    "layout.tp": ["1", "2"],
    "layout.pp": ["1", "2"],
    "schedule": ["1f1b", "dualpipev"],
    "layout.data": ["ddp", "fsdp"],
    "training.microbatch": ["1", "2"],
}


def many_microbatches_scenario(batch: int) -> Scenario:
    """A scenario with many microbatches."""
    return search_scenario(f"training.global_batch={batch}", "cluster.gpus=4", "model.layers=8")


def search_layouts(batch: int, top: int, store: Path | None = None, workers: int = 1) -> SearchResult:
    """Search over its layouts."""
    space = SearchSpace.restricted_to(many_microbatches_scenario(batch), VARY)
    return LayoutSearch(space, top, workers=workers, store=store, sensitivity=False).run()


@pytest.mark.usefixtures("extrapolate_small_models")
@pytest.mark.parametrize("top", [2, 3])
def test_a_search_with_extrapolation_finds_what_brute_force_finds(top: int) -> None:
    """Except for equivalent layouts written differently, which are as fast."""
    brute_force, space, result = (
        exhaustive_step_times(many_microbatches_scenario(384), VARY),
        SearchSpace.restricted_to(many_microbatches_scenario(384), VARY),
        search_layouts(384, top),
    )
    times = {
        varied_overrides(space, layout_result.overrides): layout_result.step_time
        for layout_result in result.simulated
        if not layout_result.extrapolated
    }
    assert all(brute_force[chosen] == seconds for chosen, seconds in times.items())
    assert result.best[0].step_time == min(brute_force.values())
    assert not any(item.extrapolated for item in result.simulated if item.tied or item in result.best)
    worst = result.best[-1].step_time
    missed = [seconds for chosen, seconds in brute_force.items() if chosen not in times and seconds < worst]
    assert all(any(seconds == pytest.approx(searched, rel=1e-9) for searched in times.values()) for seconds in missed)
    estimated = [element for element in result.simulated if element.extrapolated]
    assert estimated
    for entry in estimated:
        assert entry.step_time == pytest.approx(brute_force[varied_overrides(space, entry.overrides)], rel=1e-2)


@pytest.mark.slow
def test_extrapolated_results_are_equal_from_a_store_and_on_two_workers(tmp_path: Path) -> None:
    """With so many microbatches that nothing needs to be patched, which other processes would not see."""
    first = search_layouts(2048, 2, tmp_path)
    assert any(layout_result.extrapolated for layout_result in first.simulated)
    for other in (search_layouts(2048, 2, tmp_path), search_layouts(2048, 2, workers=2)):
        assert other.simulated == first.simulated
        assert other.bounded == first.bounded
