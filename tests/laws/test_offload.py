"""What goes to the host and back changes where things are and when they happen, and nothing else."""

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
from clustersim.model.offload import NO_OFFLOAD, ActivationOffload, Offload, OptimizerOffload, ShardOffload
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
from tests.laws.test_coalescing import equal
from tests.laws.timelines import same
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
def offloading(draw: st.DrawFn) -> Scenario:
    """A scenario that offloads activations, what its layout has of states, or both, to a fast host or a slow one."""
    scenario = draw(scenarios().filter(lambda each: not isinstance(each.layout.data, NaiveDataParallel)))
    layout = scenario.layout
    sharded = isinstance(layout.data, FullyShard) and layout.dp * layout.cp > 1
    reduced = layout.dp * layout.cp == 1 or layout.gradient_sync is GradientSync.EVERY_BACKWARD
    legal = [*STATES[:2], *STATES[2:3] * reduced, *STATES[3:] * sharded]
    states = draw(st.none() | st.sampled_from(legal))
    activations = draw(st.sampled_from(ACTIVATIONS) if states is None else st.none() | st.sampled_from(ACTIVATIONS))
    made = on(scenario, draw(st.sampled_from([FAST, SLOW])), Offload(activations, states))
    assume(not find_problems(made))  # there may be no stage with two layers
    return made


def on(scenario: Scenario, host: HostMemory, offload: Offload) -> Scenario:
    """The scenario with offload to such hosts."""
    training = replace(scenario.training, offload=offload)
    return replace(scenario, training=training, cluster=replace(scenario.cluster, host_memory=host))


def only_activations(scenario: Scenario, host: HostMemory | None = None) -> Scenario:
    offload = Offload(scenario.training.offload.activations or ActivationOffload())
    return on(scenario, scenario.cluster.host_memory or FAST if host is None else host, offload)


def undisturbed(scenario: Scenario) -> Scenario:
    """Kernels take their time, whatever is beside them, and hosts launch them at once."""
    cost, framework = (
        replace(scenario.cost, interference=0.0),
        replace(scenario.framework, launch_seconds=0.0, backward_launch_seconds=0.0),
    )
    return replace(scenario, cost=cost, framework=framework)


def hosted(answer: SimulationResult, work: HostOpKind, rank: int) -> list[float]:
    """Bytes of what a rank does of a kind with its host."""
    program = answer.program.programs[int(answer.program.program_index[rank])]
    exchanges = [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]
    return [exchange.payload for exchange in exchanges if isinstance(exchange, HostOp) and exchange.kind is work]


@given(offloading())
@examples(60)
def test_folded_is_unfolded(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(replace(scenario, cost=replace(scenario.cost, symmetry=Symmetry.OFF)))
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    same(folded.trace, every.trace, relative=1e-9)


@given(offloading(), st.sampled_from(Contention))
@examples(60)
def test_coalesced_is_fine_grained(scenario: Scenario, network: Contention) -> None:
    whole, fine = (
        simulate(replace(scenario, cost=replace(scenario.cost, coalesce=coalesce, network=network)))
        for coalesce in (True, False)
    )
    same(whole.trace, fine.trace, relative=1e-9)
    equal(whole.operation_trace, fine.operation_trace, 1e-9 * whole.step_time)


@given(offloading(), st.none() | st.just(Jitter(std=0.1)))
@examples(60)
def test_cohorts_are_ranks_one_by_one(scenario: Scenario, jitter: Jitter | None) -> None:
    made = build_simulation(replace(scenario, jitter=jitter))
    classes = singleton_classes(made.program)
    cohorts = VectorizedEngine(made.program, classes, made.cost, jitter).simulate_all()
    if cohorts is not None:
        one_by_one, _ = simulate_scalar(made.program, classes, made.cost, jitter=jitter)
        same(cohorts, one_by_one, relative=1e-9)


@given(offloading())
@examples(60)
def test_parts_sum_to_the_step_on_every_rank(scenario: Scenario) -> None:
    answer = simulate(scenario)
    for rank in range(answer.rank_count):
        assert sum(answer.breakdown.rank_seconds(rank).values()) == pytest.approx(answer.step_time, rel=1e-9)
    assert sum(answer.critical_path_breakdown.values()) == pytest.approx(answer.step_time, rel=1e-9)


@given(offloading())
@examples(80)
def test_an_infinitely_fast_host_is_no_offload_of_activations(scenario: Scenario) -> None:
    """A block takes its kernels' time; where it takes its launches', cutting it may cost, so launches take nothing.

    Not so for orders that ask how much of what is kept waits for weight gradients: with less kept they are others.
    """
    assume(not isinstance(scenario.schedule, ZeroBubble))
    free = undisturbed(only_activations(scenario, INFINITE))
    expected = simulate(on(free, INFINITE, NO_OFFLOAD)).step_time
    assert simulate(free).step_time == pytest.approx(expected, rel=1e-9)


@given(offloading())
@examples(60)
def test_copies_of_activations_never_make_a_step_shorter(scenario: Scenario) -> None:
    """They only make tasks wait for more; that holds where no task slows another."""
    offloads = undisturbed(only_activations(scenario))
    without = simulate(on(offloads, FAST, NO_OFFLOAD)).step_time
    assert simulate(offloads).step_time >= without * (1.0 - 1e-9)


@given(offloading())
@examples(60)
def test_what_is_copied_is_what_the_device_no_longer_keeps(scenario: Scenario) -> None:
    """For every microbatch, to the host and back."""
    offloads = only_activations(scenario)
    answer, plan, whole = simulate(offloads), build_plan(offloads), build_plan(on(offloads, FAST, NO_OFFLOAD))
    for pipeline_rank in range(plan.layout.pp):
        dropped = sum(
            Activations(whole).saved_bytes(stage) - Activations(plan).saved_bytes(stage)
            for stage in plan.stages_on_rank(pipeline_rank)
        )
        rank = int(np.flatnonzero(answer.program.program_index == pipeline_rank)[0])
        for way in (HostOpKind.D2H, HostOpKind.H2D):
            assert sum(hosted(answer, way, rank)) == pytest.approx(plan.microbatches * dropped, rel=1e-12)


@given(offloading())
@examples(60)
def test_no_more_layers_are_on_the_device_than_there_are_buffers(scenario: Scenario) -> None:
    """From the start of a layer's forward to the end of its copy out, and from the copy back to its backward's end."""
    answer = simulate(only_activations(scenario))
    activations = answer.scenario.training.offload.activations
    assert activations is not None
    trace = answer.trace
    for rank in trace.simulated_ranks.tolist():
        tasks = answer.program.programs[int(answer.program.program_index[rank])].tasks
        rows = {int(trace.task[row]): row for row in trace.rank_events(rank).tolist()}
        changes: list[tuple[float, int]] = []
        for number, task in enumerate(tasks):
            match task:
                case ComputeTask(segment=block) if any(operation.d2h_bytes for operation in block.operations):
                    changes.append((float(trace.start[rows[number]]), 1))
                case ComputeTask(segment=block) if any(operation.is_last_use for operation in block.operations):
                    changes.append((float(trace.end[rows[number]]), -1))
                case CollectiveTask(comm_op=HostOp(kind=HostOpKind.D2H)):
                    changes.append((float(trace.end[rows[number]]), -1))
                case CollectiveTask(comm_op=HostOp(kind=HostOpKind.H2D)):
                    changes.append((float(trace.start[rows[number]]), 1))
        held = np.cumsum([change for _, change in sorted(changes)])
        assert held[-1] == 0
        assert held.max() <= activations.buffer_count


@given(offloading())
@examples(60)
def test_offload_never_needs_more_of_the_device(scenario: Scenario) -> None:
    """Buffers are counted as always there, so the fullest moment may be one in which they are not used.

    That is where backward is run in halves, and where a few layers keep less than the others.
    """
    for item in (only_activations(scenario), scenario):
        plan, recompute, more = build_plan(item), item.training.recompute, 0.0
        if isinstance(item.schedule, ZeroBubble | ZeroBubbleV) or (
            isinstance(recompute, FullRecompute) and recompute.layers
        ):
            more = max(
                Activations(plan).offload_buffer_bytes(plan.stages_on_rank(rank)) for rank in range(plan.layout.pp)
            )
        if not item.training.offload.offloads_shards:  # shards on their way need buffers, which a tiny model notices
            without = peak_memory(on(item, FAST, NO_OFFLOAD))
            assert peak_memory(item) <= without * (1.0 + 1e-9) + more * item.framework.fragmentation
