"""The page's tables say what the package says, for any settings of its controls, by look-ups and sums alone."""

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
from clustersim.schedules.validation import dry_run, peak_in_flight_microbatches
from tests.planning.explorer_page import ZERO, Page
from tests.planning.explorer_scenarios import MIXTURES, SAMPLES, SCENARIOS, Explored, explored, few_choices
from tests.small_pipeline import pipeline


@pytest.fixture(
    scope="module",
    params=[(name, False) for name in (*SCENARIOS, "adapters", *MIXTURES)]
    + [
        pytest.param(item, marks=pytest.mark.slow)
        for item in (*product((*SCENARIOS, "adapters", *MIXTURES), [True]), ("secondary", False))
    ],
    ids=lambda param: f"{param[0]}, {'all' if param[1] else 'few'} choices",
)
def known(request: Any) -> Explored:
    name, whole = request.param
    return explored(name, whole=whole)


def test_what_is_illegal_is_what_the_command_line_says(known: Explored) -> None:
    """Sentence by sentence; to a batch that is too small the page offers a larger one, never another layout."""
    page, legal, said = Page(known.exploration), 0, Counter[str]()
    for settings in known.samples(SAMPLES):
        told = page.problems(settings)
        try:
            known.at(settings)
            legal += 1
            assert told == [], settings
        except InputError as error:
            assert [*map(comparable, told)] == [*map(comparable, lines(error))], settings
            said.update(line.split(":")[0] for line in told)
    assert legal > SAMPLES // 10
    assert {"layout", "training.global_batch"} <= set(said)
    assert {"layout.tp", "layout.ep"} & set(said)


def lines(error: InputError) -> list[str]:
    """Its problems, one by one."""
    head, *others = str(error).splitlines()
    return [line.strip().removeprefix("- ") for line in others] or [head.removeprefix("scenario: ")]


def comparable(line: str) -> str:
    """A problem without the remedy that depends on the rest of the layout."""
    return line.split(";")[0] if "feed at most" in line else line


def test_every_part_of_every_rank_is_the_ledgers(known: Explored) -> None:
    page, seen = Page(known.exploration), set()
    for settings, _ in known.legal[:40]:
        for zero in ZERO:
            there = known.drawn(settings, zero)
            found = list(page.memory({**settings, "zero": zero}))
            for told, ledger in zip(found, memory_timelines(there), strict=True):
                parts = {
                    use.value: size
                    for use, size in ledger.peak_by_category().items()
                    if use is not MemoryCategory.OFFLOAD
                }
                assert told == pytest.approx(parts, rel=1e-9, abs=1.0), (settings, zero)
            assert max(sum(told.values()) for told in found) == pytest.approx(peak_memory(there), rel=1e-12)
        seen |= {(key, value) for key, value in settings.items() if key in ("schedule", "recompute", "split", "model")}
    assert len(seen) >= 12


ROUNDS = {
    CollectiveType.ALL_REDUCE: 2,
    CollectiveType.ALL_GATHER: 1,
    CollectiveType.REDUCE_SCATTER: 1,
    CollectiveType.SHIFT: 1,
}


def sent(program: RankProgram, role: str, members: int) -> float:
    """Bytes that a rank sends on rings in a step, by the tasks of its program; sums of a few bytes left out."""
    total = 0.0
    for task in program.tasks:
        exchanges = task.segment.comm_ops if isinstance(task, ComputeTask) else ()
        if isinstance(task, CollectiveTask):
            exchanges = (task.comm_op,)
        if isinstance(task, SendTask):
            total += task.comm_op.payload if role == "pp" else 0.0
        for exchange in exchanges:
            if exchange.comm_group == role and exchange.payload > 4.0 and exchange.name not in (*EP_OPS, *ETP_OPS):
                total += ROUNDS[exchange.collective] * exchange.payload * (members - 1) / members
    return total


def sent_to_experts(program: RankProgram, scenario: Scenario) -> dict[str, float]:
    """Bytes that other ranks get of a rank's rows in a step: to others' experts (ep), for parts of the same (etp)."""
    layout, (mixture,) = scenario.layout, scenario.model.distinct_moes
    cut, own, total = layout.effective_etp, mixture.experts // layout.ep, {"ep": 0.0, "etp": 0.0}
    every = (task.segment.comm_ops for task in program.tasks if isinstance(task, ComputeTask))
    for exchange in (comm_op for exchanges in every for comm_op in exchanges):
        if exchange.name in ETP_OPS:
            total["etp"] += exchange.payload * (1 - 1 / cut)
        elif exchange.collective in (CollectiveType.DISPATCH, CollectiveType.COMBINE):
            reached = likely(mixture, own) * (layout.ep * cut - 1)
            total["ep"] += exchange.payload / mixture.top_k * reached
        elif exchange.name in EP_OPS:
            ranks = layout.ep * (1 if exchange.collective is CollectiveType.ALL_TO_ALL else cut)
            total["ep"] += exchange.payload * (1 - 1 / ranks)
    return total


def likely(mixture: MoeMlp, own: int) -> float:
    """How likely a token has one of a rank's experts: so many of its groups are drawn, then one of theirs."""
    groups, limit = mixture.router.groups, mixture.router.limit or mixture.router.groups
    if limit == groups:
        return 1 - comb(mixture.experts - own, mixture.top_k) / comb(mixture.experts, mixture.top_k)
    each = mixture.experts // groups
    drawn, found = limit * each, 0.0
    for count in range(limit + 1):  # groups drawn of those that the rank has
        blocks = max(1, own // each)
        ways = comb(blocks, count) * comb(groups - blocks, limit - count) / comb(groups, limit)
        found += ways * (1 - comb(drawn - count * min(own, each), mixture.top_k) / comb(drawn, mixture.top_k))
    return found


def small(known: Explored) -> Iterator[tuple[dict[str, Any], Any]]:
    """Settings whose programs are made in no time."""
    for settings, scenario in known.legal:
        if scenario.microbatch_count * scenario.layout.pp <= 300 and scenario.model.layer_count <= 60:
            yield settings, scenario


def test_exchanges_are_those_of_the_program(known: Explored) -> None:
    """Bytes of every axis, against what lowering makes of the same scenario."""
    page, roles = Page(known.exploration), Counter[str]()
    for settings, scenario in small(known):
        layout = scenario.layout
        plan = Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)
        program = lower_step(plan, scenario.schedule.order(layout.pp, scenario.microbatches))
        members = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp * layout.cp, "pp": 1, "embedding": 2}
        parts = {role.name: layout.group_size(role) for role in (DP_SHARD_GROUP, DP_REPLICATE_GROUP) if layout.hybrid}
        for rank in {0, layout.pp - 1, layout.pp // 2}:
            expected = {role: sent(program.programs[rank], role, count) for role, count in members.items()}
            expected["dp"] += sum(sent(program.programs[rank], role, count) for role, count in parts.items())
            if scenario.model.mixtures:
                edp = layout.group_size(EDP_GROUP) if layout.has_expert_mesh else 1
                expected |= {"edp": sent(program.programs[rank], "edp", edp)}
                expected |= sent_to_experts(program.programs[rank], scenario)
                if not layout.has_expert_mesh:  # all weights are reduced as one
                    found = page.traffic(settings, rank)
                    assert found["dp"] + found["edp"] == pytest.approx(expected["dp"], rel=1e-9)
                    expected |= {role: found[role] for role in ("dp", "edp")}
            assert page.traffic(settings, rank) == pytest.approx(expected, rel=1e-9), (settings, rank)
            roles.update(role for role, size in expected.items() if size)
            roles.update(parts)
    assert {"tp", "cp", "dp", "pp"} <= set(roles)
    assert ("dp_shard" in roles) == known.scenario.layout.is_hybrid_sharded


ORDERS = [("1f1b", None), ("gpipe", None), *product(("interleaved", "bfs"), (2, 3, 5, 8))]


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_more_microbatches_follow_from_fewer(name: str, chunks: int | None) -> None:
    """What is told of many is what playing them in full says: the bubble, and the fullest moment of any stages."""
    of, extended = build_schedule(name, chunks), 0
    for pp in (2, 3, 4, 8, 12):
        for microbatches in (1, 2, pp, 2 * pp, 3 * pp, 4 * pp, 5 * pp, 5 * pp + 1, 9 * pp, 13 * pp - 1, 16 * pp):
            try:
                order = of.order(pp, microbatches)
            except InputError:
                continue
            told, whole = (
                run_or_extrapolate(of, pp, microbatches, dry_run_schedule),
                dry_run_schedule(of, pp, microbatches),
            )
            assert told.makespan == pytest.approx(dry_run(order).makespan, rel=1e-12)
            assert told == whole
            extended += extrapolation_base(of, pp, microbatches) > 0
    assert extended >= 10


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_moments_hold_the_fullest_of_any_stages(name: str, chunks: int | None) -> None:
    """For random bytes of stages: the maximum over the moments is that of the whole order, action by action."""
    of, chance = build_schedule(name, chunks), np.random.default_rng(0)
    for pp, microbatches in ((2, 2), (4, 4), (4, 8), (3, 12), (8, 16)):
        order, held = of.order(pp, microbatches), dry_run_schedule(of, pp, microbatches).held
        for rank, actions in enumerate(order):
            own = sorted({action.stage for action in actions})
            for _ in range(5):
                kept, passing = chance.exponential(size=(2, len(own)))
                now = most = 0.0
                for action in actions:
                    place = own.index(action.stage)
                    forward = action.kind.value == "F"
                    most = max(most, now + (kept if forward else passing)[place])
                    now += kept[place] if forward else -kept[place]
                told = max(passing[place] + np.dot(numbers, kept) for place, *numbers in held[rank])
                assert told == pytest.approx(most, rel=1e-12)
        assert tuple(max(sum(moment[1:]) for moment in moments) for moments in held) == peak_in_flight_microbatches(
            order
        )


def test_bubbles_are_those_of_a_dry_run(known: Explored) -> None:
    for settings, scenario in small(known):
        found = Page(known.exploration).settings(settings)
        run = dry_run(scenario.schedule.order(scenario.layout.pp, scenario.microbatches))
        busy = 3 * scenario.microbatches * scenario.placement.chunks
        assert known.exploration.tables.schedules.lookup(found)["bubble"] == pytest.approx(
            1 - busy / run.makespan, abs=1e-12
        )


def test_stages_and_partners_are_the_plans(known: Explored) -> None:
    page = Page(known.exploration)
    for settings, scenario in known.legal[:30]:
        layout, found = scenario.layout, page.settings(settings)
        plan = Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)
        groups = process_groups(layout, plan.placement)
        partners, along_pp = known.exploration.tables.partners.lookup(found), layout.mesh.rank_coordinates(PIPELINE)
        for rank, stages in enumerate(page.ranks(found)):
            expected = [
                (pipeline_stage.layer_count, pipeline_stage.has_embedding, pipeline_stage.has_head)
                for pipeline_stage in plan.stages_on_rank(rank)
            ]
            assert [(stage["layers"], stage["embedding"], stage["head"]) for stage in stages] == expected
            first = sum(item.layer_count for item in plan.stages[: plan.stages_on_rank(rank)[0].index])
            assert stages[0]["first"] == first
            for role in ("pp_next", "pp_previous") if layout.pp > 1 else ():
                pairs = groups[role].members
                to = {int(along_pp[b]) for a, b in pairs[along_pp[pairs[:, 0]] == rank]}
                assert set(partners[role][rank]) == to


def test_members_of_groups_are_the_layouts(known: Explored) -> None:
    """Ranks that are numbered along the order of axes, and differ along a role's axes only."""
    tables, page = known.exploration.tables, Page(known.exploration)
    for settings, scenario in known.legal[:20]:
        found, groups = page.settings(settings), process_groups(scenario.layout, scenario.placement)
        for role, axes in tables.roles.items():
            if role not in groups:  # experts that are spread like all else
                assert settings["ep"] == 1
                continue
            order = next(item for item in tables.orders if {*axes} <= {*item})
            strides = dict(zip(order, np.cumprod([1, *(found[axis] for axis in order)]), strict=False))
            members = np.zeros(1, np.int64)
            for axis in axes:
                members = np.add.outer(np.arange(found[axis]) * strides[axis], members).reshape(-1)
            assert members.tolist() == groups[role].members[0].tolist()


def windowed(**model: Any) -> Explored:
    """A scenario of Gemma 2's kind, explored."""
    scenario = Scenario.from_mapping({**SCENARIOS["odd"], "model": {"preset": "gemma2-9b", "layers": 12, **model}})
    with few_choices():
        return Explored(scenario, build_exploration_tables(scenario))


@pytest.mark.parametrize("model", [{}, {"block": "parallel_norms", "nope_every": 3, "qk_norm": "whole"}])
def test_layers_that_hold_and_send_the_same_may_differ(model: dict[str, Any]) -> None:
    """Windows and turned heads change what is computed, and nothing that the page draws."""
    known = windowed(**model)
    assert len(known.scenario.model.distinct_specs) > 1
    page, settings = Page(known.exploration), known.exploration.start
    for told, ledger in zip(page.memory(settings), memory_timelines(known.scenario), strict=True):
        parts = {
            use.value: size for use, size in ledger.peak_by_category().items() if use is not MemoryCategory.OFFLOAD
        }
        assert told == pytest.approx(parts, rel=1e-9, abs=1.0)
    scenario = known.scenario
    plan = Plan(scenario.model, scenario.training, scenario.layout, scenario.schedule.placement)
    program = lower_step(plan, scenario.schedule.order(scenario.layout.pp, scenario.microbatch_count))
    for rank in (0, 2, 5):
        found = page.traffic(settings, rank)
        for axis, members in (("tp", 2), ("pp", 1)):
            assert found[axis] == pytest.approx(sent(program.programs[rank], axis, members), rel=1e-9)


def test_buckets_of_whole_chunks_are_drawn_as_they_are_counted() -> None:
    """ZeRO-2 that reduces every microbatch beside a pipeline: the first chunk's are Megatron-LM's, others one each."""
    data = {"zero": {"stage": 2, "reduce": "every_microbatch"}}
    mapping = {**SCENARIOS["odd"], "layout": {"tp": 2, "pp": 6, "dp": 2, "data": data}}
    scenario = Scenario.from_mapping({**mapping, "model": {"preset": "llama3-8b", "layers": 12}})
    with few_choices():
        known = Explored(scenario, build_exploration_tables(scenario))
    page, settings = Page(known.exploration), known.exploration.start
    found = [told["messages and buckets"] for told in page.memory(settings)]
    assert found == pytest.approx(
        [memory_timeline.peak_by_category()[MemoryCategory.MESSAGES] for memory_timeline in memory_timelines(scenario)],
        rel=1e-9,
    )
    assert found[-1] > found[0]


def test_layers_that_hold_something_else_are_refused() -> None:
    mapping = {
        **SCENARIOS["odd"],
        "model": {"preset": "llama-tiny", "stack": [{"layers": 1, "ffn": 704}, {"layers": 7}]},
    }
    with pytest.raises(InputError, match="the layers of llama-tiny differ in what they hold, and the explorer's page"):
        build_exploration_tables(Scenario.from_mapping(mapping))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["layout.data={hsdp: {shard: 2}}", "layout.dp=8", "layout.pp=1"],
            "layout.data: cuts weights over 2 of the ranks",
        ),
        (["layout.order=[cp, tp, dp, pp]"], "does not begin with tp and end with pp"),
        (["model.experts.capacity=1.5"], "take whole rows, as they have a capacity"),
    ],
)
def test_what_the_page_does_not_know_beside_experts_is_refused(changes: list[str], said: str) -> None:
    model = "model={preset: mixtral-8x7b, layers: 8}"
    with pytest.raises(InputError, match=said):
        build_exploration_tables(pipeline(model, "layout.sequence_parallel=true", *changes))
