"""The explorer's tables give what the package computes, for any settings of its controls, by look-ups and sums."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.lowering.training_step import lower_step
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.mesh import DP_REPLICATE_GROUP, DP_SHARD_GROUP, EDP_GROUP, PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import process_groups
from clustersim.planning.explorer.expert_traffic import EP_OPS, ETP_OPS
from clustersim.planning.explorer.explorer_data import build_exploration_tables
from clustersim.planning.explorer.schedule_tables import dry_run_schedule, extrapolation_base, run_or_extrapolate
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, SendTask
from clustersim.results.memory_check import memory_timelines, peak_memory
from clustersim.scenario import Scenario
from clustersim.schedules.registry import build_schedule
from clustersim.schedules.validation import dry_run
from tests.planning.explorer_page import ZERO_STAGES, ExplorerPage
from tests.planning.explorer_scenarios import (
    MIXED_SCENARIOS,
    MOE_SCENARIOS,
    SCENARIOS,
    ExploredScenario,
    explore_scenario,
    few_choices,
)
from tests.schedules.pipeline_orders import peak_in_flight_microbatches
from tests.small_pipeline import pipeline_scenario

QUICK = ("llama", "gpt", "hybrid", "adapters", "latent", "mamba")


@pytest.fixture(
    scope="module",
    params=[(name, False) for name in QUICK]
    + [
        pytest.param(item, marks=pytest.mark.slow)
        for item in (*product((*SCENARIOS, "adapters", *MOE_SCENARIOS, *MIXED_SCENARIOS), [True]), ("secondary", False))
    ],
    ids=lambda param: f"{param[0]}, {'all' if param[1] else 'few'} choices",
)
def explored(request: Any) -> ExploredScenario:
    name, all_choices = request.param
    return explore_scenario(name, all_choices=all_choices)


def test_violations_match_the_error_messages(explored: ExploredScenario) -> None:
    """Message by message."""
    page, legal, seen_keys = ExplorerPage(explored.exploration), 0, Counter[str]()
    for settings in explored.random_settings(explored.sample_count):
        problems = page.problems(settings)
        try:
            explored.with_settings(settings)
            legal += 1
            assert problems == [], settings
        except InputError as error:
            assert [*map(without_remedy, problems)] == [*map(without_remedy, error_problems(error))], settings
            seen_keys.update(line.split(":")[0] for line in problems)
    assert legal > explored.sample_count // 10
    assert {"layout", "training.global_batch"} <= set(seen_keys)
    assert {"layout.tp", "layout.ep"} & set(seen_keys)


def error_problems(error: InputError) -> list[str]:
    """The problems of an error, one by one."""
    head, *problem_lines = str(error).splitlines()
    return [line.strip().removeprefix("- ") for line in problem_lines] or [head.removeprefix("scenario: ")]


def without_remedy(line: str) -> str:
    """A problem without the values that would fit, which only reading a file again can tell."""
    return line.split(";")[0]


def test_memory_of_every_category_and_rank_matches_the_ledger(explored: ExploredScenario) -> None:
    page, seen = ExplorerPage(explored.exploration), set()
    for settings, _ in explored.legal_settings[:40]:
        for zero in ZERO_STAGES:
            scenario = explored.with_zero_stage(settings, zero)
            page_memory = list(page.rank_memory({**settings, "zero": zero}))
            for rank_memory, ledger in zip(page_memory, memory_timelines(scenario), strict=True):
                expected = {
                    use.value: size
                    for use, size in ledger.peak_by_category().items()
                    if use is not MemoryCategory.OFFLOAD
                }
                assert rank_memory == pytest.approx(expected, rel=1e-9, abs=1.0), (settings, zero)
            assert max(sum(rank_memory.values()) for rank_memory in page_memory) == pytest.approx(
                peak_memory(scenario), rel=1e-12
            )
        seen |= {(key, value) for key, value in settings.items() if key in ("schedule", "recompute", "split", "model")}
    choices = explored.exploration.choices
    assert len(seen) >= 12 - (len(choices["model"]) == 1) - (len(choices["pp"]) == 1)


RING_FACTORS = {
    CollectiveType.ALL_REDUCE: 2,
    CollectiveType.ALL_GATHER: 1,
    CollectiveType.REDUCE_SCATTER: 1,
    CollectiveType.SHIFT: 1,
}


def ring_sent_bytes(program: RankProgram, comm_group: str, members: int) -> float:
    """Bytes that a rank sends on rings in a step, by the tasks of its program; without all-reduces of a few bytes."""
    total = 0.0
    for task in program.tasks:
        exchanges = task.segment.comm_ops if isinstance(task, ComputeTask) else ()
        if isinstance(task, CollectiveTask):
            exchanges = (task.comm_op,)
        if isinstance(task, SendTask):
            total += task.comm_op.payload if comm_group == "pp" else 0.0
        for comm_op in exchanges:
            if comm_op.comm_group == comm_group and comm_op.payload > 4.0 and comm_op.name not in (*EP_OPS, *ETP_OPS):
                total += RING_FACTORS[comm_op.collective] * comm_op.payload * (members - 1) / members
    return total


def expert_sent_bytes(program: RankProgram, scenario: Scenario) -> dict[str, float]:
    """Bytes sent for a rank's tokens in a step: to other expert ranks (ep), and between shards of an expert (etp)."""
    layout, (moe,) = scenario.layout, scenario.model.distinct_moes
    etp, experts_per_rank, total = layout.effective_etp, moe.experts // layout.ep, {"ep": 0.0, "etp": 0.0}
    segment_comm_ops = (task.segment.comm_ops for task in program.tasks if isinstance(task, ComputeTask))
    for used_comm_op in (comm_op for exchanges in segment_comm_ops for comm_op in exchanges):
        if used_comm_op.name in ETP_OPS:
            total["etp"] += used_comm_op.payload * (1 - 1 / etp)
        elif used_comm_op.collective in (CollectiveType.DISPATCH, CollectiveType.COMBINE):
            remote_copies = expert_reach_probability(moe, experts_per_rank) * (layout.ep * etp - 1)
            total["ep"] += used_comm_op.payload / moe.top_k * remote_copies
        elif used_comm_op.name in EP_OPS:
            ranks = layout.ep * (1 if used_comm_op.collective is CollectiveType.ALL_TO_ALL else etp)
            total["ep"] += used_comm_op.payload * (1 - 1 / ranks)
    return total


def expert_reach_probability(moe: MoeMlp, experts_per_rank: int) -> float:
    """Probability that a token has one of a rank's experts: groups are drawn first, then experts of these groups."""
    groups, limit = moe.router.num_groups, moe.router.group_topk or moe.router.num_groups
    if limit == groups:
        return 1 - comb(moe.experts - experts_per_rank, moe.top_k) / comb(moe.experts, moe.top_k)
    group_size = moe.experts // groups
    candidate_experts, probability = limit * group_size, 0.0
    for count in range(limit + 1):  # number of the rank's groups among the drawn ones
        rank_groups = max(1, experts_per_rank // group_size)
        ways = comb(rank_groups, count) * comb(groups - rank_groups, limit - count) / comb(groups, limit)
        probability += ways * (
            1
            - comb(candidate_experts - count * min(experts_per_rank, group_size), moe.top_k)
            / comb(candidate_experts, moe.top_k)
        )
    return probability


def small_programs(explored: ExploredScenario) -> Iterator[tuple[dict[str, Any], Scenario]]:
    """Settings whose programs are lowered quickly."""
    for settings, scenario in explored.legal_settings:
        if scenario.microbatch_count * scenario.layout.pp <= 300 and scenario.model.layer_count <= 60:
            yield settings, scenario


def test_sent_bytes_match_the_lowered_program(explored: ExploredScenario) -> None:
    """Bytes of every axis, against the lowered program of the same scenario."""
    page, seen_groups = ExplorerPage(explored.exploration), Counter[str]()
    for settings, scenario in small_programs(explored):
        layout = scenario.layout
        plan = Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)
        program = lower_step(plan, scenario.schedule.order(layout.pp, scenario.microbatch_count))
        members = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp * layout.cp, "pp": 1, "embedding": 2}
        hybrid_sizes = {
            comm_group.name: layout.group_size(comm_group)
            for comm_group in (DP_SHARD_GROUP, DP_REPLICATE_GROUP)
            if layout.is_hybrid_sharded
        }
        for rank in {0, layout.pp - 1, layout.pp // 2}:
            expected = {
                comm_group: ring_sent_bytes(program.programs[rank], comm_group, count)
                for comm_group, count in members.items()
            }
            expected["dp"] += sum(
                ring_sent_bytes(program.programs[rank], comm_group, count) for comm_group, count in hybrid_sizes.items()
            )
            if scenario.model.distinct_moes:
                edp = layout.group_size(EDP_GROUP) if layout.has_expert_mesh else 1
                expected |= {"edp": ring_sent_bytes(program.programs[rank], "edp", edp)}
                expected |= expert_sent_bytes(program.programs[rank], scenario)
                if not layout.has_expert_mesh:  # all weights are reduced in one group
                    sent_bytes = page.sent_bytes(settings, rank)
                    assert sent_bytes["dp"] + sent_bytes["edp"] == pytest.approx(expected["dp"], rel=1e-9)
                    expected |= {comm_group: sent_bytes[comm_group] for comm_group in ("dp", "edp")}
            assert page.sent_bytes(settings, rank) == pytest.approx(expected, rel=1e-9), (settings, rank)
            seen_groups.update(comm_group for comm_group, size in expected.items() if size)
            seen_groups.update(hybrid_sizes)
    offered = {axis for axis in ("tp", "cp", "dp", "pp") if explored.exploration.choices.get(axis) != (1,)}
    assert offered <= set(seen_groups)
    assert ("dp_shard" in seen_groups) == explored.scenario.layout.is_hybrid_sharded


ORDERS = [("1f1b", None), ("gpipe", None), *product(("interleaved", "bfs"), (2, 3, 5, 8))]


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_schedules_extrapolate_to_more_microbatches(name: str, chunks: int | None) -> None:
    """Extrapolated bubbles and memory peaks equal those of the full dry run with many microbatches."""
    schedule, extrapolated_count = build_schedule(name, chunks), 0
    for pp in (2, 3, 4, 6, 8):
        for microbatches in (1, 2, pp, 2 * pp, 3 * pp, 4 * pp, 5 * pp, 5 * pp + 1, 9 * pp, 13 * pp - 1, 16 * pp):
            try:
                order = schedule.order(pp, microbatches)
            except InputError:
                continue
            extrapolated, full_run = (
                run_or_extrapolate(schedule, pp, microbatches),
                dry_run_schedule(schedule, pp, microbatches),
            )
            assert extrapolated.makespan == pytest.approx(dry_run(order).makespan, rel=1e-12)
            assert extrapolated == full_run
            extrapolated_count += extrapolation_base(schedule, pp, microbatches) > 0
    assert extrapolated_count >= 10


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_moments_contain_the_memory_peak_of_any_stage_sizes(name: str, chunks: int | None) -> None:
    """For random bytes of stages: the maximum over the moments is that of the full order, action by action.

    Gradients of a stage are there from its first backward until its last has ended, a buffer once one reduces them.
    """
    schedule, rng = build_schedule(name, chunks), np.random.default_rng(0)
    for pp, microbatches in ((2, 2), (4, 4), (4, 8), (3, 12), (8, 16)):
        order, held = schedule.order(pp, microbatches), dry_run_schedule(schedule, pp, microbatches).held
        for rank, actions in enumerate(order):
            rank_stages = sorted({action.stage for action in actions})
            for _ in range(5):
                kept_bytes, transient_bytes, gradient_bytes = rng.exponential(size=(3, len(rank_stages)))
                buffer, current, peak, done = rng.exponential(), 0.0, 0.0, Counter[int]()
                for action in actions:
                    index = rank_stages.index(action.stage)
                    if action.kind.value == "F":
                        current += kept_bytes[index]
                        continue
                    done[index] += 1
                    current += gradient_bytes[index] * (done[index] == 1)
                    is_last = done[index] == microbatches
                    buffer_now = buffer if is_last or max(done.values()) == microbatches else 0.0
                    peak = max(peak, current + transient_bytes[index] + buffer_now)
                    current -= kept_bytes[index] + gradient_bytes[index] * is_last
                sizes = [*kept_bytes, *gradient_bytes, buffer]
                table_peak = max(transient_bytes[index] + np.dot(counts, sizes) for index, *counts in held[rank])
                assert table_peak == pytest.approx(peak, rel=1e-12)
        chunks_held = [[state[1 : 1 + schedule.placement(pp).max_chunks] for state in moments] for moments in held]
        assert tuple(max(map(sum, moments)) for moments in chunks_held) == peak_in_flight_microbatches(order)


def test_bubbles_match_a_dry_run(explored: ExploredScenario) -> None:
    for settings, scenario in small_programs(explored):
        complete = ExplorerPage(explored.exploration).complete_settings(settings)
        run = dry_run(scenario.schedule.order(scenario.layout.pp, scenario.microbatch_count))
        busy = 3 * scenario.microbatch_count * scenario.placement.max_chunks
        assert explored.exploration.tables.schedules.lookup(complete)["bubble"] == pytest.approx(
            1 - busy / run.makespan, abs=1e-12
        )


def test_stages_and_pipeline_neighbors_match_the_plan(explored: ExploredScenario) -> None:
    page = ExplorerPage(explored.exploration)
    for settings, scenario in explored.legal_settings[:30]:
        layout, complete = scenario.layout, page.complete_settings(settings)
        plan = Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)
        groups = process_groups(layout, plan.placement)
        partners, pp_coordinate = (
            explored.exploration.tables.partners.lookup(complete),
            layout.mesh.rank_coordinates(PIPELINE),
        )
        for rank, stages in enumerate(page.rank_stages(complete)):
            expected = [
                (pipeline_stage.layer_count, pipeline_stage.has_embedding, pipeline_stage.has_head)
                for pipeline_stage in plan.stages_on_rank(rank)
            ]
            assert [(stage["layers"], stage["embedding"], stage["head"]) for stage in stages] == expected
            first = sum(item.layer_count for item in plan.stages[: plan.stages_on_rank(rank)[0].index])
            assert stages[0]["first"] == first
            for comm_group in ("pp_next", "pp_previous") if layout.pp > 1 else ():
                pairs = groups[comm_group].members
                targets = {int(pp_coordinate[b]) for a, b in pairs[pp_coordinate[pairs[:, 0]] == rank]}
                assert set(partners[comm_group][rank]) == targets


def test_group_members_match_the_layout(explored: ExploredScenario) -> None:
    """Ranks are numbered along the order of axes, and members of a group differ only along its axes."""
    tables, page = explored.exploration.tables, ExplorerPage(explored.exploration)
    for settings, scenario in explored.legal_settings[:20]:
        complete, groups = page.complete_settings(settings), process_groups(scenario.layout, scenario.placement)
        for comm_group, axes in tables.roles.items():
            if comm_group not in groups:  # experts sharded like the dense parameters
                assert settings["ep"] == 1
                continue
            order = next(item for item in tables.orders if {*axes} <= {*item})
            strides = dict(zip(order, np.cumprod([1, *(complete[axis] for axis in order)]), strict=False))
            members = np.zeros(1, np.int64)
            for axis in axes:
                members = np.add.outer(np.arange(complete[axis]) * strides[axis], members).reshape(-1)
            assert members.tolist() == groups[comm_group].members[0].tolist()


def explore_sliding_window(**model: Any) -> ExploredScenario:
    """A scenario of Gemma 2's architecture, explored."""
    scenario = Scenario.from_mapping({**SCENARIOS["odd"], "model": {"preset": "gemma2-9b", "layers": 12, **model}})
    with few_choices():
        return ExploredScenario(scenario, build_exploration_tables(scenario))


@pytest.mark.parametrize("model", [{}, {"block": "parallel_norms", "no_rope_freq": 3, "qk_norm": "whole"}])
def test_layers_with_equal_memory_and_traffic_may_differ_in_compute(model: dict[str, Any]) -> None:
    """Windows and rotary heads change what is computed, and nothing that the page draws."""
    explored = explore_sliding_window(**model)
    assert len(explored.scenario.model.distinct_specs) > 1
    page, settings = ExplorerPage(explored.exploration), explored.exploration.start
    for rank_memory, ledger in zip(page.rank_memory(settings), memory_timelines(explored.scenario), strict=True):
        expected = {
            use.value: size for use, size in ledger.peak_by_category().items() if use is not MemoryCategory.OFFLOAD
        }
        assert rank_memory == pytest.approx(expected, rel=1e-9, abs=1.0)
    scenario = explored.scenario
    plan = Plan(scenario.model, scenario.training, scenario.layout, scenario.schedule.placement)
    program = lower_step(plan, scenario.schedule.order(scenario.layout.pp, scenario.microbatch_count))
    for rank in (0, 2, 5):
        sent_bytes = page.sent_bytes(settings, rank)
        for axis, members in (("tp", 2), ("pp", 1)):
            assert sent_bytes[axis] == pytest.approx(ring_sent_bytes(program.programs[rank], axis, members), rel=1e-9)


def test_buckets_of_full_model_chunks_match_the_ledger() -> None:
    """ZeRO-2 reducing every microbatch, with a pipeline: the first chunk has Megatron-LM's buckets, others one each."""
    data = {"zero": {"stage": 2, "reduce": "every_microbatch"}}
    mapping = {**SCENARIOS["odd"], "layout": {"tp": 2, "pp": 6, "dp": 2, "data": data}}
    scenario = Scenario.from_mapping({**mapping, "model": {"preset": "llama3-8b", "layers": 12}})
    with few_choices():
        explored = ExploredScenario(scenario, build_exploration_tables(scenario))
    page, settings = ExplorerPage(explored.exploration), explored.exploration.start
    bucket_bytes = [rank_memory["messages and buckets"] for rank_memory in page.rank_memory(settings)]
    assert bucket_bytes == pytest.approx(
        [memory_timeline.peak_by_category()[MemoryCategory.MESSAGES] for memory_timeline in memory_timelines(scenario)],
        rel=1e-9,
    )
    assert bucket_bytes[-1] > bucket_bytes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["layout.data={hsdp: {shard: 2}}", "layout.dp=8", "layout.pp=1"],
            "layout.data: cuts weights over 2 of the ranks",
        ),
        (["layout.order=[cp, tp, dp, pp]"], "does not begin with tp and end with pp"),
        (["model.experts.capacity_factor=1.5"], "take whole rows, as they have a capacity"),
    ],
)
def test_unsupported_moe_settings_are_refused(changes: list[str], message: str) -> None:
    model = "model={preset: mixtral-8x7b, layers: 8}"
    with pytest.raises(InputError, match=message):
        build_exploration_tables(pipeline_scenario(model, "layout.sequence_parallel=true", *changes))
