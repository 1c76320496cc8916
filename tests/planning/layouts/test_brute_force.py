"""A search finds what brute force finds, with fewer simulations, and its lower bounds hold."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.bounds import step_lower_bound
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.simulation import simulate
from tests.conftest import examples
from tests.planning.layouts.search_scenarios import exhaustive_step_times, search_scenario, varied_overrides

VALUES: dict[str, list[str]] = {
    "layout.tp": ["1", "2", "4"],
    "layout.pp": ["1", "2", "4"],
    "layout.cp": ["1", "2"],
    "schedule": ["1f1b", "{interleaved: {chunks: 2}}", "zb-v", "gpipe"],
    "layout.data": ["ddp", "zero1", "fsdp", "{hsdp: {shard: 4}}"],
    "training.microbatch": ["1", "2", "4"],
    "training.recompute": ["none", "{layers: 1}", "{layers: 8}", "full"],
}
SPACES = st.lists(st.sampled_from([*VALUES]), min_size=1, max_size=3, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: st.lists(st.sampled_from(VALUES[key]), min_size=1, max_size=3, unique=True) for key in keys}
    )
)
SCENARIO_OVERRIDES: list[tuple[str, ...]] = [
    (),
    ("cost.network=uncontended",),
    ("degradations.slow=[{gpu: 3, speed: 0.8}]",),
    ("degradations.slow=[{gpu: 0-7, speed: 125 %}]",),
    ("steps=2",),
    ("training.precision=fp8",),
    ("framework={name: megatron, cuda_graphs: true}",),
    ("layout.async_tensor_model_parallel_allreduce=false",),
    ("layout.tp_comm_overlap=true",),
    ("cluster.name=dgx-a100",),
    ("degradations.jitter=0.02",),
    ("model.mamba={num_heads: 16, head_dim: 64, num_groups: 4}", "model.linear_attention_freq=2"),
    ("model.window=512", "model.window_attn_skip_freq=4"),
    ("cluster.node.nvlink.bandwidth=20 GB/s",),
]


@examples(40)
@given(vary=SPACES, top=st.integers(1, 5), moe=st.booleans(), other=st.sampled_from(SCENARIO_OVERRIDES))
def test_a_search_finds_what_brute_force_finds(
    vary: dict[str, list[str]], top: int, moe: bool, other: tuple[str, ...]
) -> None:
    """The best, and all that are tied with it, except equivalent layouts written differently, which are as fast."""
    scenario = search_scenario(*other, moe=moe)
    brute_force = exhaustive_step_times(scenario, vary)
    space = SearchSpace.restricted_to(scenario, vary)
    if not brute_force:
        return
    result = LayoutSearch(space, top, sensitivity=False).run()
    times = {
        varied_overrides(space, layout_result.overrides): layout_result.step_time for layout_result in result.simulated
    }
    assert all(brute_force[chosen] == seconds for chosen, seconds in times.items())
    best = min(brute_force.values())
    assert result.simulated[0].step_time == best
    worst = max(max(item.step_time for item in result.best), best * (1.0 + result.repeatability))
    missed = [seconds for chosen, seconds in brute_force.items() if chosen not in times and seconds < worst]
    assert all(any(seconds == pytest.approx(searched, rel=1e-9) for searched in times.values()) for seconds in missed)
    tied = [element for element in result.simulated if element.step_time <= best * (1.0 + result.repeatability)]
    assert result.recommended == min(tied, key=lambda layout: LayoutCandidate(layout.overrides).complexity_key)
    assert result.candidates == sum(pruned_layouts.count for pruned_layouts in result.pruned.values()) + len(
        result.bounded
    ) + len(times)


def test_the_recommendation_does_not_depend_on_top() -> None:
    """Microbatches of four are about 1 % slower than of eight: tied, and as smaller microbatches the plainer layout."""
    scenario = search_scenario(
        "layout={}", "cluster.gpus=1", "model.layers=8", "training.sequence=4096", "training.global_batch=16"
    )
    vary = {"training.microbatch": ["1", "2", "4", "8"]}
    results = [
        LayoutSearch(SearchSpace.restricted_to(scenario, vary), top, sensitivity=False).run() for top in (1, 2, 4)
    ]
    brute_force = exhaustive_step_times(scenario, vary)
    tie_limit = min(brute_force.values()) * (1.0 + results[0].repeatability)
    tied = {chosen for chosen, seconds in brute_force.items() if seconds <= tie_limit}
    assert tied == {frozenset({f"training.microbatch={microbatch}"}) for microbatch in (4, 8)}
    for result in results:
        assert {
            varied_overrides(SearchSpace.restricted_to(scenario, vary), layout_result.overrides)
            for layout_result in result.simulated
            if layout_result.tied
        } == tied
        assert "training.microbatch=4" in result.recommended.overrides


WITH_FAILURES = ("economics.tokens=100B", "reliability.rates=100")
SCHEDULES = ["1f1b", "gpipe", "{bfs: {chunks: 2}}", "zb-1p", "zb-2p", "zb-v", "dualpipe", "dualpipev"]


@examples(120)
@given(data=st.data(), moe=st.booleans(), other=st.sampled_from(SCENARIO_OVERRIDES))
def test_no_layout_is_faster_than_its_bound(data: st.DataObject, moe: bool, other: tuple[str, ...]) -> None:
    overrides = data.draw(st.sampled_from(candidates(moe))).overrides
    try:
        chosen = search_scenario(*other, *WITH_FAILURES, moe=moe).with_overrides(overrides, suggest=False)
    except InputError:
        return
    bound, result = step_lower_bound(chosen), simulate(chosen)
    assert bound.matmul_seconds + bound.memory_bound_seconds <= bound.seconds * (1 + 1e-9)
    assert bound.seconds <= result.step_time
    for objective in Objective:
        assert objective.lower_bound(chosen, bound) <= objective.score(result)


def test_the_energy_bound_holds_on_mixed_gpus() -> None:
    """An A100 PCIe draws 300 W for matmuls, an A100 SXM 400 W, at the same peak; the PCIe GPUs have 7 of 8 layers."""
    mixed_cluster = (
        "cluster={name: dgx-a100, gpus: 16, mixed: [{nodes: 0, accelerator: a100-pcie-80gb}]}",
        "model.layers=8",
    )
    wide_model = ("model.hidden=8192", "model.ffn=65536", "training.sequence=4096", "training.global_batch=512")
    layout = "layout={pp: 2, dp: 8, data: ddp, layers_per_stage: [7, 1]}"
    chosen = search_scenario(*mixed_cluster, *wide_model, layout)
    assert Objective.ENERGY.lower_bound(chosen, step_lower_bound(chosen)) <= Objective.ENERGY.score(simulate(chosen))


@cache
def candidates(moe: bool) -> list[LayoutCandidate]:
    """Candidates of the default space, with schedules that it does not include."""
    return [*SearchSpace.from_scenario(search_scenario(moe=moe), vary={"schedule": SCHEDULES}).candidates({})]


@pytest.mark.parametrize("other", [(), ("degradations.slow=[{gpu: 0-3, speed: 125 %}]",)])
def test_the_bound_is_tight_for_1f1b_without_communication(other: tuple[str, ...]) -> None:
    """One GPU per stage, no tensor parallelism or host: only messages between stages and the optimizer are left out."""
    overrides = ("layout.tp=1", "layout.pp=4", "layout.sequence_parallel=false", "cluster.gpus=4", "framework=ideal")
    chosen = search_scenario(*overrides, *other)
    result = simulate(chosen)
    category_seconds = result.breakdown.mean_seconds()
    other_seconds = (
        category_seconds["optimizer"] + category_seconds["exposed pp"] + category_seconds.get("exposed dp", 0.0)
    )
    # the step ends with the optimizer of the rank with the vocabulary, which takes longer than the mean of all
    assert step_lower_bound(chosen).seconds == pytest.approx(result.step_time - other_seconds, rel=0.03)
