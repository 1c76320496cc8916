"""A step of many microbatches follows from one of fewer, near enough to tell that it is not among the best."""

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
from tests.planning.layouts.search_scenarios import every, job, varied

LONG = ("training.microbatch=1", "model.layers=8")
SCHEDULES = [
    "1f1b",
    "{interleaved: {chunks: 2}}",
    "zb-v",
    "dualpipe",
    "dualpipev",
]
OTHERS = [
    (),
    ("cost.network=uncontended",),
    ("disturbances.slow=[{gpu: 3, speed: 0.8}]",),
    ("training.precision=fp8",),
    ("layout.tensor_overlap=true",),
]


@pytest.fixture
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are simulated in no time."""
    monkeypatch.setattr(extrapolation, "MIN_LAYER_PASSES", 0)


@pytest.mark.usefixtures("small_models_too")
def test_a_gpu_alone_takes_as_long_for_each_microbatch_more() -> None:
    """Nothing is communicated: t(m) = a + b m to rounding, and so is each part of it."""
    alone = ("layout={tp: 1, pp: 1, dp: 1, data: ddp}", "cluster.gpus=1", "training.global_batch=43", *LONG)
    chosen = job(*alone)
    estimate, whole = extrapolate_step(chosen), simulate(chosen)
    assert estimate is not None
    assert estimate.short_result.scenario.microbatch_count == 12
    assert estimate.step_time == pytest.approx(whole.step_time, rel=1e-12)
    assert estimate.breakdown.mean_seconds() == pytest.approx(whole.breakdown.mean_seconds(), rel=1e-9, abs=1e-15)
    assert estimate.economics.energy_per_step == pytest.approx(whole.economics.energy_per_step, rel=1e-9)
    assert estimate.economics.cost_per_trillion_tokens == pytest.approx(whole.economics.cost_per_trillion_tokens)
    assert estimate.tokens_per_second == pytest.approx(whole.tokens_per_second)
    assert estimate.mfu() == pytest.approx(whole.mfu())


@examples(60)
@given(data=st.data(), mixture=st.booleans(), other=st.sampled_from(OTHERS), more=st.integers(0, 12))
def test_it_is_hardly_ever_too_long(data: st.DataObject, mixture: bool, other: tuple[str, ...], more: int) -> None:
    tp, pp = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    strategy = data.draw(st.sampled_from(["ddp", "zero1", "fsdp", "{hsdp: {shard: 2}}"]))
    dp = data.draw(st.sampled_from([item for item in (1, 2, 4) if item * tp * pp <= 16]))
    layout = f"tp: {tp}, pp: {pp}, dp: {dp}, data: {strategy}, sequence_parallel: {'true' if tp > 1 else 'false'}"
    sizes = (f"cluster.gpus={max(tp * pp * dp, 4)}", f"training.global_batch={(max(36, 9 * pp) + more) * dp}")
    schedule = data.draw(st.sampled_from(SCHEDULES))
    recompute = data.draw(st.sampled_from(["none", "full", "{layers: 1}"]))
    own = (f"layout={{{layout}}}", f"schedule={schedule}", f"training.recompute={recompute}", *sizes, *LONG, *other)
    try:
        chosen = job(*own, mixture=mixture)
    except InputError:
        assume(False)
    with patch.object(extrapolation, "MIN_LAYER_PASSES", 0):
        estimate = extrapolate_step(chosen)
    assume(estimate is not None)
    assert estimate is not None
    whole = simulate(chosen)
    assert estimate.step_time * (1.0 - MAX_OVERESTIMATE) <= whole.step_time
    assert estimate.peak_memory == pytest.approx(whole.peak_memory, rel=1e-12)
    assert estimate.memory_capacity == whole.memory_capacity
    if Objective.ENERGY.allows_estimates(chosen):
        assert (
            estimate.economics.energy_per_step * (1.0 - Objective.ENERGY.estimate_margin)
            <= whole.economics.energy_per_step
        )
    assert sum(estimate.breakdown.mean_seconds().values()) == pytest.approx(estimate.step_time)
    assert estimate.mfu() * estimate.step_time == pytest.approx(whole.mfu() * whole.step_time)


@pytest.mark.usefixtures("small_models_too")
def test_energy_is_as_near_as_the_step() -> None:
    """But beside a GPU of half the speed: the others wait for it in another way from the fourth microbatch on."""
    chosen = job("layout={tp: 1, dp: 8, data: zero2}", *LONG, "training.global_batch=1024")
    slow = chosen.with_overrides(["disturbances.slow=[{gpu: 3, speed: 0.5}]"])
    assert [Objective.ENERGY.allows_estimates(scenario) for scenario in (chosen, slow)] == [True, False]
    for item in (chosen, slow):
        estimate, whole = extrapolate_step(item), simulate(item)
        assert estimate is not None
        assert estimate.step_time == pytest.approx(whole.step_time, rel=1e-6)
        off = estimate.economics.energy_per_step / whole.economics.energy_per_step - 1.0
        assert (abs(off) < MAX_OVERESTIMATE) == (item is chosen)


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize(
    "other",
    [
        ("training.global_batch=35",),
        ("steps=2",),
        ("disturbances.jitter=0.05",),
        (
            "disturbances.traffic=[{gpus: [0, 1], bytes: 1 MB, every: 1 ms}]",
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
def test_what_is_not_known_to_be_steady_is_not_estimated(other: tuple[str, ...]) -> None:
    base = ("layout={tp: 1, pp: 1, dp: 1, data: ddp}", "cluster.gpus=1", "training.global_batch=40", *LONG)
    assert extrapolate_step(job(*base)) is not None
    assert extrapolate_step(job(*base, *other)) is None


@pytest.mark.usefixtures("small_models_too")
def test_loads_that_differ_are_not_estimated() -> None:
    even = job("layout={ep: 2, dp: 2}", "cluster.gpus=2", "training.global_batch=80", *LONG, mixture=True)
    uneven = even.with_overrides(["training.expert_load={variation: 0.4}"])
    assert extrapolate_step(even) is not None
    assert extrapolate_step(uneven) is None


VARY = {
    "layout.tp": ["1", "2"],
    "layout.pp": ["1", "2"],
    "schedule": ["1f1b", "dualpipev"],
    "layout.data": ["ddp", "fsdp"],
    "training.microbatch": ["1", "2"],
}


def long_job(batch: int) -> Scenario:
    """A job with many microbatches."""
    return job(f"training.global_batch={batch}", "cluster.gpus=4", "model.layers=8")


def found(batch: int, top: int, folder: Path | None = None, workers: int = 1) -> SearchResult:
    """The best of its layouts."""
    space = SearchSpace.restricted_to(long_job(batch), VARY)
    return LayoutSearch(space, top, workers=workers, store=folder, sensitivity=False).run()


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize("top", [2, 3])
def test_a_search_that_estimates_finds_what_trying_all_finds(top: int) -> None:
    """But for layouts that are another in other words, which are as fast as that one."""
    tried, space, answer = every(long_job(384), VARY), SearchSpace.restricted_to(long_job(384), VARY), found(384, top)
    times = {
        varied(space, layout_result.overrides): layout_result.step_time
        for layout_result in answer.simulated
        if not layout_result.extended
    }
    assert all(tried[chosen] == seconds for chosen, seconds in times.items())
    assert answer.best[0].step_time == min(tried.values())
    assert not any(item.extended for item in answer.simulated if item.tied or item in answer.best)
    worst = answer.best[-1].step_time
    missed = [seconds for chosen, seconds in tried.items() if chosen not in times and seconds < worst]
    assert all(any(seconds == pytest.approx(there, rel=1e-9) for there in times.values()) for seconds in missed)
    estimated = [element for element in answer.simulated if element.extended]
    assert estimated
    for entry in estimated:
        assert entry.step_time == pytest.approx(tried[varied(space, entry.overrides)], rel=1e-2)


def test_it_is_the_same_from_a_folder_and_on_two_workers(tmp_path: Path) -> None:
    """Of so many microbatches that nothing needs to be patched, which other processes would not see."""
    once = found(2048, 2, tmp_path)
    assert any(layout_result.extended for layout_result in once.simulated)
    for other in (found(2048, 2, tmp_path), found(2048, 2, workers=2)):
        assert other.simulated == once.simulated
        assert other.bounded == once.bounded
