"""Laws of the shared network, on slow and oversubscribed ones where it is felt."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.library import load_library
from clustersim.cost import bottleneck_links
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.contention import UncontendedComm
from clustersim.cost.rank_equivalence import contended_classes
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.engine.scalar import shared_state
from clustersim.engine.scalar.fluid_action import VariableRateEndTimes
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import KERNEL_CATEGORIES, TimeCategory
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.engine.fake_links import LinkCost
from tests.engine.network.recording_network import Watched
from tests.laws.test_coalescing import equal
from tests.laws.test_trace import check_trace
from tests.laws.test_vectorized_engine import machines
from tests.laws.timelines import same
from tests.strategies import costed, mappings, scenarios

PLACES = ["one switch", "racks", "cards"]


@st.composite
def crowded(draw: st.DrawFn) -> Scenario:
    """Training steps of 2 to 16 GPUs on a shared network; most payloads take as long as their latencies, or longer."""
    mapping: dict[str, Any] = draw(mappings(draw(st.sampled_from(PLACES))))
    return Scenario.from_mapping(
        {**mapping, "cluster": draw(slower(mapping["cluster"])), "cost": {"network": "shared"}}
    )


@st.composite
def slower(draw: st.DrawFn, cluster: dict[str, Any]) -> dict[str, Any]:
    """The same nodes with slow NICs, one of them for one or two GPUs, below a more or less oversubscribed spine."""
    if "fabric" not in cluster:
        return cluster
    nic = {"per_node": draw(st.sampled_from([1, 2])), "bandwidth": draw(st.sampled_from(["1 Gbit/s", "10 Gbit/s"]))}
    fabric = {**cluster["fabric"], "ecmp": draw(st.sampled_from(["spread", "hashed"]))}
    if "spine" in fabric:
        fabric["spine"] = {**fabric["spine"], "oversubscription": draw(st.sampled_from([1, 2, 7]))}
    return {**cluster, "node": {**cluster["node"], "nic": nic}, "fabric": fabric}


@st.composite
def linked(draw: st.DrawFn) -> LinkCost:
    """A random program whose groups cross links, mostly in a regular way."""
    unit, count = draw(costed()), draw(st.integers(1, 5))
    routes: dict[str, list[list[int]]] = {}
    for role in sorted(unit.program.groups):
        rows = len(unit.program.groups[role].members)
        wide, hops = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 4), max_size=2, unique=True))
        routes[role] = [sorted({(row // wide + hop) % count for hop in hops}) for row in range(rows)]
        if draw(st.booleans()):
            routes[role][draw(st.integers(0, rows - 1))] = [draw(st.integers(0, count - 1))]
    return LinkCost(unit, count, routes, draw(st.sampled_from([0.0, 0.5])))


@given(linked(), st.data())
@examples(300)
def test_folded_is_unfolded_in_any_program_on_any_links(cost: LinkCost, data: st.DataObject) -> None:
    """With slow ranks and interference, too; every operation of a block, too, where several are one event."""
    program, sharing, own = cost.program, cost.sharing, data.draw(machines(cost.unit))
    blocks = SegmentCost(program, own, UncontendedComm(cost.unit, sharing))
    classes = contended_classes(program, cost.unit, sharing, cost.table, model_index=own.index_of_rank)
    event(f"{program.world_size} ranks in {classes.count} classes")
    apart, rest = singleton_classes(program, cost.links), (blocks, None)
    every = OperationTraceReader(
        program, apart, *rest, *simulate_program(program, apart, blocks, contention_map=sharing, coalesce=False)
    )
    once = OperationTraceReader(
        program, classes, *rest, *simulate_program(program, classes, blocks, contention_map=sharing)
    )
    event(f"exchanges inside blocks share links: {bool(sharing.contended)}")
    event(
        f"of operations between them some are slowed: {any(isinstance(end_time, VariableRateEndTimes) for end_time in once.operation_log.end_times)}"
    )
    same(once.trace, every.trace, relative=1e-9)
    check_trace(every.trace, program)
    equal(once, every, 1e-9 * every.trace.makespan)


@given(crowded())
@examples(80)
def test_folded_is_unfolded_in_training_steps_on_a_shared_network(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    alone = simulate(scenario.with_overrides("cost.network=uncontended"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    event(f"contention is felt: {abs(alone.step_time - folded.step_time) > 1e-9 * alone.step_time}")
    same(folded.trace, every.trace, relative=1e-9)


@given(crowded())
@examples(12)
def test_the_same_scenario_gives_the_same_bytes_on_a_shared_network(scenario: Scenario) -> None:
    first = simulate(scenario)
    simulate(scenario.with_overrides("cost.symmetry=off"))
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps(again.trace) == pickle.dumps(first.trace)


@given(crowded())
@examples(40)
def test_every_answer_adds_up_on_a_shared_network(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)
    assert sum(result.breakdown.mean_seconds().values()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)


@given(crowded(), st.booleans())
@examples(40)
def test_operations_fill_their_blocks_and_sum_to_the_breakdown(scenario: Scenario, coalesce: bool) -> None:
    """Kernels last as long as its parts of kernels, whoever shares links with the exchanges beside them."""
    result = simulate(scenario.with_overrides(f"cost.coalesce={str(coalesce).lower()}"))
    trace, rounding = result.trace, 1e-9 * result.trace.makespan
    event(f"exchanges inside blocks take longer: {bool(len(trace.contention.event))}")
    for rank in trace.simulated_ranks.tolist():
        of, kernels = result.operation_spans(rank), 0.0
        tasks = result.program.programs[int(result.program.program_index[rank])].tasks
        for row in trace.rank_events(rank, Stream.COMPUTE).tolist():
            task, mine = tasks[trace.task[row]], of.task == trace.task[row]
            if not isinstance(task, ComputeTask):
                continue
            lasting = (of.end - of.start)[mine]
            assert lasting.sum() + trace.waited[row] == pytest.approx(trace.end[row] - trace.start[row], abs=rounding)
            timing, alone = (
                result.cost.time_segment(rank, task.segment),
                [operation.kernel is None for operation in task.segment.operations],
            )
            kernels += float(np.where(alone, 0.0, lasting - timing.exposed_comm - of.exposed_delay[mine]).sum())
        parts = result.breakdown.rank_seconds(rank)
        said = result.scenario.steps * sum(
            parts[part.value] for part in (*KERNEL_CATEGORIES, TimeCategory.LAUNCH, TimeCategory.SLOWED)
        )
        assert kernels == pytest.approx(said, abs=rounding)


@given(crowded())
@examples(20)
def test_no_link_is_overloaded_and_all_bytes_arrive(scenario: Scenario) -> None:
    """Of the links that are simulated, in every stretch of time; each activity is busy for what it asked for."""
    made: list[Watched] = []

    class Noted(Watched):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    for symmetry in ("auto", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_state, "FluidNetwork", Noted)
            simulate(scenario.with_overrides(f"cost.symmetry={symmetry}"))
    assert len(made) == 2
    for network in made:
        network.check()


@given(crowded() | scenarios("one switch") | scenarios("racks") | scenarios("one domain"))
@examples(80)
def test_where_no_link_is_shared_shared_is_uncontended(scenario: Scenario) -> None:
    scenario = scenario.with_overrides("cost.network=shared")
    shared = simulate(scenario)
    apart = _nobody_shares(shared)
    event(f"nobody shares a link: {apart}")
    if apart:
        same(shared.trace, simulate(scenario.with_overrides("cost.network=uncontended")).trace, relative=1e-9)


def _nobody_shares(result: SimulationResult) -> bool:
    """Whether every link is crossed by one group of one role at most, and not twice at once by that."""
    cluster, groups = result.scenario.cluster, result.program.groups
    model = CollectiveCost(cluster.fabric, load_library(cluster.library), groups)
    every = {exchange for program in result.program.programs for exchange in program.comm_ops}
    crossed: dict[int, set[tuple[str, int]]] = {}
    for exchange in every:
        crossings = model.link_demand(exchange).link_loads
        for group, link in zip(crossings.group_index.tolist(), crossings.link_index.tolist(), strict=True):
            crossed.setdefault(link, set()).add((exchange.comm_group, group))
    return all(len(users) == 1 for users in crossed.values())


@given(crowded())
@examples(40)
def test_links_that_cannot_decide_change_nothing(scenario: Scenario) -> None:
    """They are left out before ranks are compared, so as many or fewer are simulated."""
    fewer = simulate(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bottleneck_links, "bottleneck_link_mask", lambda _, links, __: np.ones(len(links.kind), dtype=np.bool_)
        )
        every = simulate(scenario)
    event(f"fewer ranks simulated: {fewer.simulated_rank_count < every.simulated_rank_count}")
    assert fewer.simulated_rank_count <= every.simulated_rank_count
    same(fewer.trace, every.trace, relative=1e-9)
