"""Offload changes where data is kept and when it is copied, and nothing else."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.cost.jitter import Jitter
from clustersim.engine.engine import simulate_scalar
from clustersim.engine.vectorized.engine import VectorizedEngine
from clustersim.hardware.host_memory import HostMemory
from clustersim.memory.activations import Activations
from clustersim.model.offload import NO_OFFLOAD, ActivationOffload, HostUpdate, Offload, OptimizerOffload, ShardOffload
from clustersim.model.training import FullRecompute
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, NaiveDataParallel
from clustersim.program.task import CollectiveTask, ComputeTask, HostOp, HostOpKind
from clustersim.results.memory_check import peak_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Contention, Symmetry
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.schedules.zero_bubble_v import ZeroBubbleV
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.laws.test_coalescing import assert_equal_operations
from tests.laws.timelines import assert_same_trace
from tests.strategies import scenarios

FAST = HostMemory(1e12, 400e9, 50e9, 40e9, 1e-6, 0.5)
SLOW = HostMemory(1e12, 8e9, 2e9, 1e9, 1e-5, 0.5)
INFINITE = HostMemory(inf, inf, inf, inf, 0.0, 1.0)
ACTIVATIONS = (
    ActivationOffload(),
    ActivationOffload(layers=1),
    ActivationOffload(layers=2, prefetch=2),
    ActivationOffload(share=0.5),
    ActivationOffload(prefetch=3),
)
STATES = (OptimizerOffload(), OptimizerOffload(0.25), OptimizerOffload(gradients=True), ShardOffload())


@st.composite
def offload_scenarios(draw: st.DrawFn) -> Scenario:
    """A scenario that offloads activations, model states its layout allows, or both, to a fast or a slow host."""
    scenario = draw(scenarios().filter(lambda scenario: not isinstance(scenario.layout.data, NaiveDataParallel)))
    layout = scenario.layout
    sharded = isinstance(layout.data, FullyShard) and layout.dp * layout.cp > 1
    reduces_per_backward = layout.dp * layout.cp == 1 or layout.gradient_sync is GradientSync.EVERY_BACKWARD
    legal = [*STATES[:2], *STATES[2:3] * reduces_per_backward, *STATES[3:] * sharded]
    states = draw(st.none() | st.sampled_from(legal))
    activations = draw(st.sampled_from(ACTIVATIONS) if states is None else st.none() | st.sampled_from(ACTIVATIONS))
    update = HostUpdate.OVERLAPPED if states is None else draw(st.sampled_from(HostUpdate))
    offload = Offload(activations, states, update)
    scenario_with_offload = with_offload(scenario, draw(st.sampled_from([FAST, SLOW])), offload)
    assume(not find_problems(scenario_with_offload))  # there may be no stage with two layers
    return scenario_with_offload


def with_offload(scenario: Scenario, host: HostMemory, offload: Offload) -> Scenario:
    """The scenario with this offload and these hosts."""
    training = replace(scenario.training, offload=offload)
    return replace(scenario, training=training, cluster=replace(scenario.cluster, host_memory=host))


def only_activations(scenario: Scenario, host: HostMemory | None = None) -> Scenario:
    offload = Offload(scenario.training.offload.activations or ActivationOffload())
    return with_offload(scenario, scenario.cluster.host_memory or FAST if host is None else host, offload)


def without_interference(scenario: Scenario) -> Scenario:
    """The scenario without kernel interference and without launch overhead."""
    cost, framework = (
        replace(scenario.cost, interference=0.0),
        replace(scenario.framework, launch_seconds=0.0, backward_launch_seconds=0.0),
    )
    return replace(scenario, cost=cost, framework=framework)


def host_copy_bytes(result: SimulationResult, kind: HostOpKind, rank: int) -> list[float]:
    """Bytes of each host copy of a kind on a rank."""
    program = result.program.programs[int(result.program.program_index[rank])]
    comm_ops = [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]
    return [comm_op.payload for comm_op in comm_ops if isinstance(comm_op, HostOp) and comm_op.kind is kind]


@given(offload_scenarios())
@examples(60)
def test_offload_folded_equals_unfolded(scenario: Scenario) -> None:
    folded, unfolded_result = (
        simulate(scenario),
        simulate(replace(scenario, cost=replace(scenario.cost, symmetry=Symmetry.OFF))),
    )
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)


@given(offload_scenarios(), st.sampled_from(Contention))
@examples(60)
def test_offload_coalesced_equals_fine_grained(scenario: Scenario, network: Contention) -> None:
    coalesced, fine_grained = (
        simulate(replace(scenario, cost=replace(scenario.cost, coalesce=coalesce, network=network)))
        for coalesce in (True, False)
    )
    assert_same_trace(coalesced.trace, fine_grained.trace, relative=1e-9)
    assert_equal_operations(coalesced.operation_trace, fine_grained.operation_trace, 1e-9 * coalesced.step_time)


@given(offload_scenarios(), st.none() | st.just(Jitter(std=0.1)))
@examples(60)
def test_offload_vectorized_engine_equals_the_scalar_engine(scenario: Scenario, jitter: Jitter | None) -> None:
    prepared = build_simulation(replace(scenario, jitter=jitter))
    classes = singleton_classes(prepared.program)
    vectorized_trace = VectorizedEngine(prepared.program, classes, prepared.cost, jitter).simulate_all()
    if vectorized_trace is not None:
        scalar_trace, _ = simulate_scalar(prepared.program, classes, prepared.cost, jitter=jitter)
        assert_same_trace(vectorized_trace, scalar_trace, relative=1e-9)


@given(offload_scenarios())
@examples(60)
def test_time_categories_sum_to_the_step_on_every_rank(scenario: Scenario) -> None:
    result = simulate(scenario)
    for rank in range(result.rank_count):
        assert sum(result.breakdown.rank_seconds(rank).values()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)


@given(offload_scenarios())
@examples(80)
def test_an_infinitely_fast_host_equals_no_activation_offload(scenario: Scenario) -> None:
    """Launch overhead is zero, as splitting a launch-bound segment may cost time.

    Schedules that depend on how much of the activations waits for weight gradients are excluded: with less kept
    they differ.
    """
    assume(not isinstance(scenario.schedule, ZeroBubble))
    free = without_interference(only_activations(scenario, INFINITE))
    expected = simulate(with_offload(free, INFINITE, NO_OFFLOAD)).step_time
    assert simulate(free).step_time == pytest.approx(expected, rel=1e-9)


@given(offload_scenarios())
@examples(60)
def test_activation_copies_never_make_a_step_faster(scenario: Scenario) -> None:
    """They only add dependencies; that argument holds where no task slows another."""
    offloaded = without_interference(only_activations(scenario))
    baseline = simulate(with_offload(offloaded, FAST, NO_OFFLOAD)).step_time
    assert simulate(offloaded).step_time >= baseline * (1.0 - 1e-9)


@given(offload_scenarios())
@examples(60)
def test_copied_bytes_equal_the_dropped_activations(scenario: Scenario) -> None:
    """For every microbatch, to the host and back."""
    offloaded = only_activations(scenario)
    result, plan, baseline_plan = (
        simulate(offloaded),
        build_plan(offloaded),
        build_plan(with_offload(offloaded, FAST, NO_OFFLOAD)),
    )
    for pipeline_rank in range(plan.layout.pp):
        dropped = sum(
            Activations(baseline_plan).saved_bytes(stage) - Activations(plan).saved_bytes(stage)
            for stage in plan.stages_on_rank(pipeline_rank)
        )
        rank = int(np.flatnonzero(result.program.program_index == pipeline_rank)[0])
        for direction in (HostOpKind.D2H, HostOpKind.H2D):
            assert sum(host_copy_bytes(result, direction, rank)) == pytest.approx(
                plan.microbatches * dropped, rel=1e-12
            )


@given(offload_scenarios())
@examples(60)
def test_no_more_layers_are_on_the_device_than_there_are_buffers(scenario: Scenario) -> None:
    """From a layer's forward start to the end of its D2H copy, and from its H2D copy's start to its backward's end."""
    result = simulate(only_activations(scenario))
    activations = result.scenario.training.offload.activations
    assert activations is not None
    trace = result.trace
    for rank in trace.simulated_ranks.tolist():
        tasks = result.program.programs[int(result.program.program_index[rank])].tasks
        event_of_task = {int(trace.task[event_index]): event_index for event_index in trace.rank_events(rank).tolist()}
        changes: list[tuple[float, int]] = []
        for task_id, task in enumerate(tasks):
            match task:
                case ComputeTask(segment=segment) if any(operation.d2h_bytes for operation in segment.operations):
                    changes.append((float(trace.start[event_of_task[task_id]]), 1))
                case ComputeTask(segment=segment) if any(operation.is_last_use for operation in segment.operations):
                    changes.append((float(trace.end[event_of_task[task_id]]), -1))
                case CollectiveTask(comm_op=HostOp(kind=HostOpKind.D2H)):
                    changes.append((float(trace.end[event_of_task[task_id]]), -1))
                case CollectiveTask(comm_op=HostOp(kind=HostOpKind.H2D)):
                    changes.append((float(trace.start[event_of_task[task_id]]), 1))
        layers_on_device = np.cumsum([change for _, change in sorted(changes)])
        assert layers_on_device[-1] == 0
        assert layers_on_device.max() <= activations.buffer_count


@given(offload_scenarios())
@examples(60)
def test_offload_never_needs_more_device_memory(scenario: Scenario) -> None:
    """Buffers are counted as always allocated, so the peak may be at a time when they are not used.

    That is where backward is run in halves, and where a few layers keep less than the others.
    """
    for offloaded in (only_activations(scenario), scenario):
        plan, recompute, buffer_bytes = build_plan(offloaded), offloaded.training.recompute, 0.0
        if isinstance(offloaded.schedule, ZeroBubble | ZeroBubbleV) or (
            isinstance(recompute, FullRecompute) and recompute.layers
        ):
            buffer_bytes = max(
                Activations(plan).offload_buffer_bytes(plan.stages_on_rank(rank)) for rank in range(plan.layout.pp)
            )
        if (
            not offloaded.training.offload.offloads_shards
        ):  # shards in transit need buffers, which matter for a tiny model
            baseline_peak = peak_memory(with_offload(offloaded, FAST, NO_OFFLOAD))
            assert peak_memory(offloaded) <= baseline_peak * (
                1.0 + 1e-9
            ) + buffer_bytes * offloaded.framework.fragmentation_with(offloaded.training.recompute)
