"""Invariants of the shared network, on slow and oversubscribed ones where contention matters."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.library_files import load_library
from clustersim.cost import bottleneck_links
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.contention import UncontendedComm
from clustersim.cost.rank_equivalence import contended_classes
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.engine.scalar import shared_state
from clustersim.engine.scalar.segment_action import VariableRateEndTimes
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import KERNEL_CATEGORIES, TimeCategory
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.engine.fake_links import LinkCost
from tests.engine.network.recording_network import RecordingNetwork
from tests.laws.test_coalescing import assert_equal_operations
from tests.laws.test_trace import check_trace
from tests.laws.test_vectorized_engine import device_models
from tests.laws.timelines import assert_same_trace
from tests.strategies import costed_programs, mappings, scenarios

FABRICS = ["one switch", "racks", "cards"]


@st.composite
def contended_scenarios(draw: st.DrawFn) -> Scenario:
    """Training steps of 2 to 16 GPUs on a shared network; most payloads take as long as their latencies, or longer."""
    mapping: dict[str, Any] = draw(mappings(draw(st.sampled_from(FABRICS))))
    return Scenario.from_mapping(
        {**mapping, "cluster": draw(slowed_clusters(mapping["cluster"])), "cost": {"network": "shared"}}
    )


@st.composite
def slowed_clusters(draw: st.DrawFn, cluster: dict[str, Any]) -> dict[str, Any]:
    """The same nodes with slow NICs, one of them for one or two GPUs, below a more or less oversubscribed spine."""
    if "fabric" not in cluster:
        return cluster
    nic = {"per_node": draw(st.sampled_from([1, 2])), "bandwidth": draw(st.sampled_from(["1 Gbit/s", "10 Gbit/s"]))}
    fabric = {**cluster["fabric"], "ecmp": draw(st.sampled_from(["spread", "hashed"]))}
    if "spine" in fabric:
        fabric["spine"] = {**fabric["spine"], "oversubscription": draw(st.sampled_from([1, 2, 7]))}
    return {**cluster, "node": {**cluster["node"], "nic": nic}, "fabric": fabric}


@st.composite
def link_programs(draw: st.DrawFn) -> LinkCost:
    """A random program whose groups cross links, mostly in a regular way."""
    unit, count = draw(costed_programs()), draw(st.integers(1, 5))
    routes: dict[str, list[list[int]]] = {}
    for comm_group in sorted(unit.program.groups):
        group_count = len(unit.program.groups[comm_group].members)
        groups_per_link, hops = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 4), max_size=2, unique=True))
        routes[comm_group] = [
            sorted({(group_index // groups_per_link + hop) % count for hop in hops})
            for group_index in range(group_count)
        ]
        if draw(st.booleans()):
            routes[comm_group][draw(st.integers(0, group_count - 1))] = [draw(st.integers(0, count - 1))]
    return LinkCost(unit, count, routes, draw(st.sampled_from([0.0, 0.5])))


@given(link_programs(), st.data())
@examples(300)
def test_folded_equals_unfolded_in_random_programs_on_random_links(cost: LinkCost, data: st.DataObject) -> None:
    """With slow ranks and interference; compares every operation of segments that run as one event."""
    program, sharing, models = cost.program, cost.contention, data.draw(device_models(cost.unit))
    segment_cost = SegmentCost(program, models, UncontendedComm(cost.unit, sharing))
    classes = contended_classes(program, cost.unit, sharing, cost.table, model_index=models.index_of_rank)
    event(f"{program.world_size} ranks in {classes.count} classes")
    singletons, reader_arguments = singleton_classes(program, cost.link_count), (segment_cost, None)
    unfolded_reader = OperationTraceReader(
        program,
        singletons,
        *reader_arguments,
        *simulate_program(program, singletons, segment_cost, contention_map=sharing, coalesce=False),
    )
    folded_reader = OperationTraceReader(
        program, classes, *reader_arguments, *simulate_program(program, classes, segment_cost, contention_map=sharing)
    )
    event(f"comm ops inside segments share links: {bool(sharing.contended)}")
    event(
        "of operations between them some are slowed: "
        f"{any(isinstance(end_time, VariableRateEndTimes) for end_time in folded_reader.operation_log.end_times)}"
    )
    assert_same_trace(folded_reader.trace, unfolded_reader.trace, relative=1e-9)
    check_trace(unfolded_reader.trace, program)
    assert_equal_operations(folded_reader, unfolded_reader, 1e-9 * unfolded_reader.trace.makespan)


@given(contended_scenarios())
@examples(80)
def test_folded_equals_unfolded_in_training_steps_on_a_shared_network(scenario: Scenario) -> None:
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    uncontended = simulate(scenario.with_overrides("cost.network=uncontended"))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    event(f"contention is felt: {abs(uncontended.step_time - folded.step_time) > 1e-9 * uncontended.step_time}")
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)


@given(contended_scenarios())
@examples(12)
def test_the_same_scenario_gives_the_same_bytes_on_a_shared_network(scenario: Scenario) -> None:
    first = simulate(scenario)
    simulate(scenario.with_overrides("cost.symmetry=off"))
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps(again.trace) == pickle.dumps(first.trace)


@given(contended_scenarios())
@examples(40)
def test_breakdowns_and_critical_paths_sum_on_a_shared_network(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)
    assert sum(result.breakdown.mean_seconds().values()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)


@given(contended_scenarios(), st.booleans())
@examples(40)
def test_operations_fill_their_segments_and_sum_to_the_breakdown(scenario: Scenario, coalesce: bool) -> None:
    """Kernel durations sum to the kernel categories, whoever shares links with concurrent collectives."""
    result = simulate(scenario.with_overrides(f"cost.coalesce={str(coalesce).lower()}"))
    trace, rounding = result.trace, 1e-9 * result.trace.makespan
    event(f"comm ops inside segments take longer: {bool(len(trace.contention.event))}")
    for rank in trace.simulated_ranks.tolist():
        spans, kernel_seconds = result.operation_spans(rank), 0.0
        tasks = result.program.programs[int(result.program.program_index[rank])].tasks
        for event_index in trace.rank_events(rank, Stream.COMPUTE).tolist():
            task, in_task = tasks[trace.task[event_index]], spans.task == trace.task[event_index]
            if not isinstance(task, ComputeTask):
                continue
            durations = (spans.end - spans.start)[in_task]
            assert durations.sum() + trace.waited[event_index] == pytest.approx(
                trace.end[event_index] - trace.start[event_index], abs=rounding
            )
            timing, without_kernel = (
                result.cost.time_segment(rank, task.segment),
                [operation.kernel is None for operation in task.segment.operations],
            )
            kernel_seconds += float(
                np.where(without_kernel, 0.0, durations - timing.exposed_comm - spans.exposed_delay[in_task]).sum()
            )
        categories = result.breakdown.rank_seconds(rank)
        expected = result.scenario.steps * sum(
            categories[category.value] for category in (*KERNEL_CATEGORIES, TimeCategory.LAUNCH, TimeCategory.SLOWED)
        )
        assert kernel_seconds == pytest.approx(expected, abs=rounding)


@given(contended_scenarios())
@examples(20)
def test_no_link_is_overloaded_and_all_bytes_arrive(scenario: Scenario) -> None:
    """On the simulated links, in every time interval; each flow is active for its demand."""
    networks: list[RecordingNetwork] = []

    class CollectedNetwork(RecordingNetwork):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            networks.append(self)

    for symmetry in ("auto", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_state, "FluidNetwork", CollectedNetwork)
            simulate(scenario.with_overrides(f"cost.symmetry={symmetry}"))
    assert len(networks) == 2
    for network in networks:
        network.check_invariants()


@given(contended_scenarios() | scenarios("one switch") | scenarios("racks") | scenarios("one domain"))
@examples(80)
def test_a_shared_network_without_sharing_equals_uncontended(scenario: Scenario) -> None:
    scenario = scenario.with_overrides("cost.network=shared")
    shared = simulate(scenario)
    has_no_sharing = _shares_no_link(shared)
    event(f"nobody shares a link: {has_no_sharing}")
    if has_no_sharing:
        assert_same_trace(
            shared.trace, simulate(scenario.with_overrides("cost.network=uncontended")).trace, relative=1e-9
        )


def _shares_no_link(result: SimulationResult) -> bool:
    """Whether every link is crossed by at most one group of one kind, and by that not twice at once."""
    cluster, groups = result.scenario.cluster, result.program.groups
    model = CollectiveCost(cluster.fabric, load_library(cluster.library), groups)
    comm_ops = {comm_op for rank_program in result.program.programs for comm_op in rank_program.comm_ops}
    crossed: dict[int, set[tuple[str, int]]] = {}
    for comm_op in comm_ops:
        link_loads = model.link_demand(comm_op).link_loads
        for group, link in zip(link_loads.group_index.tolist(), link_loads.link_index.tolist(), strict=True):
            crossed.setdefault(link, set()).add((comm_op.comm_group, group))
    return all(len(users) == 1 for users in crossed.values())


@given(contended_scenarios())
@examples(40)
def test_dropping_non_bottleneck_links_changes_nothing(scenario: Scenario) -> None:
    """They are dropped before ranks are compared, so no more ranks are simulated."""
    pruned = simulate(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bottleneck_links, "bottleneck_link_mask", lambda _, links, __: np.ones(len(links.kind), dtype=np.bool_)
        )
        unpruned = simulate(scenario)
    event(f"fewer ranks simulated: {pruned.simulated_rank_count < unpruned.simulated_rank_count}")
    assert pruned.simulated_rank_count <= unpruned.simulated_rank_count
    assert_same_trace(pruned.trace, unpruned.trace, relative=1e-9)
