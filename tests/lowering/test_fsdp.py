"""ZeRO-3 and FSDP: gathers and reductions unit by unit."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.lowering.fsdp import FsdpLowering
from clustersim.model.training import FullRecompute
from clustersim.model.transformer import head_parameter_count, parameter_count
from clustersim.parallel.data_parallel_strategy import FullyShard, ReductionFrequency
from clustersim.parallel.layout import Layout
from clustersim.program.action import ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.lowering.plans import (
    SMALL,
    TRAINING,
    collectives,
    comparable_tasks,
    data_parallel_task_names,
    lower_plan,
    make_plan,
)

UNITS = ["embedding", *["layer"] * 4, "head"]


def fsdp_program(data: FullyShard, microbatches: int = 1, **training: object) -> RankProgram:
    training_config = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False, **training)
    (rank_program,) = lower_plan(make_plan(Layout(dp=4, data=data), training_config)).programs
    return rank_program


def test_units_are_gathered_before_forward_and_before_backward() -> None:
    """Prefetch 1: two gathers ahead of the first unit, then one more for each unit that starts (Zhao et al. 3.3.2).

    The head is not gathered again: its backward follows its forward.
    """
    assert data_parallel_task_names(fsdp_program(FullyShard())) == [
        "gather embedding", "gather layer", "F0",
        "gather layer", "F0", "gather layer", "F0", "gather layer", "F0", "gather head", "F0", "F0",
        "gather layer", "B0", "reduce head",
        *["gather layer", "B0", "reduce layer"] * 3,
        "gather embedding", "B0", "reduce layer", "B0", "reduce embedding",
        "optimizer",
    ]  # fmt: skip


def test_without_resharding_backward_gathers_nothing() -> None:
    names = data_parallel_task_names(fsdp_program(FullyShard(reshard_after_forward=False)))
    assert Counter(name for name in names if name.startswith("gather")) == {
        "gather embedding": 1, "gather layer": 4, "gather head": 1,
    }  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_microbatch_gathers_twice_and_reduces_once(microbatches: int) -> None:
    """ZeRO section 7.2.2: 3 Psi a microbatch; less the head's second gather here. Payloads bf16 and fp32."""
    comm_ops = collectives(fsdp_program(FullyShard(), microbatches))
    gathered = sum(comm_op.payload for comm_op in comm_ops if comm_op.collective is CollectiveType.ALL_GATHER)
    reduced = sum(item.payload for item in comm_ops if item.collective is CollectiveType.REDUCE_SCATTER)
    assert gathered == 2 * microbatches * (2 * parameter_count(SMALL) - head_parameter_count(SMALL))
    assert reduced == 4 * microbatches * parameter_count(SMALL)
    assert all(element.comm_group == "dp" for element in comm_ops)


@given(prefetch=st.integers(0, 8))
def test_at_most_prefetch_units_are_gathered_ahead(prefetch: int) -> None:
    """When compute reaches unit i, the gathers of units up to i + prefetch may run and no others.

    So a gather waits for the compute task that ends unit i - prefetch - 1: the compute before it in its pass.
    """
    rank_program = fsdp_program(FullyShard(prefetch=prefetch))
    computes = [task_id for task_id, task in enumerate(rank_program.tasks) if isinstance(task, ComputeTask)]
    forward = computes[: len(UNITS)]
    gathers = [
        task_id
        for task_id, task in enumerate(rank_program.tasks)
        if isinstance(task, CollectiveTask)
        and task.comm_op.collective is CollectiveType.ALL_GATHER
        and task_id < forward[-1]
    ]
    assert len(gathers) == len(UNITS)
    for unit_index, task_id in enumerate(gathers):
        released = unit_index - prefetch - 1
        assert rank_program.tasks[task_id].depends_on == ((forward[released],) if released >= 0 else ())
        assert task_id in rank_program.tasks[forward[unit_index]].depends_on


def test_without_overlap_a_gather_waits_for_the_previous_unit() -> None:
    assert data_parallel_task_names(fsdp_program(FullyShard(overlap=False)))[:6] == [
        "gather embedding", "F0", "gather layer", "F0", "gather layer", "F0",
    ]  # fmt: skip


def test_without_overlap_a_unit_waits_for_the_reduction_of_the_one_before() -> None:
    """The gather behind a reduction is on its stream, so each backward but the first begins after a reduction."""
    tasks = fsdp_program(FullyShard(overlap=False)).tasks
    reductions = {
        task_id
        for task_id, task in enumerate(tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.REDUCE_SCATTER
    }
    computes = [task for task in tasks if isinstance(task, ComputeTask) and task.action]
    backwards = [task for task in computes if task.action and task.action.kind is ActionKind.BACKWARD]
    waits = [len(reductions.intersection(task.depends_on)) for task in backwards if task.depends_on]
    assert waits == [1] * (len(UNITS) - 1)


def test_single_parameters_are_gathered_and_reduced_operator_by_operator() -> None:
    """As many bytes as unit by unit; a layer has six operators with parameters, both ends two."""
    by_unit, singly = (collectives(fsdp_program(FullyShard(single_parameters=single))) for single in (False, True))
    payloads = [
        {kind: sum(comm_op.payload for comm_op in comm_ops if comm_op.collective is kind) for kind in CollectiveType}
        for comm_ops in (by_unit, singly)
    ]
    assert payloads[0] == payloads[1]
    reductions = [comm_op for comm_op in singly if comm_op.collective is CollectiveType.REDUCE_SCATTER]
    counts = Counter(comm_op.name for comm_op in reductions)
    assert counts == {"reduce embedding": 2, "reduce layer": 4 * 6, "reduce head": 2}


def test_a_pass_prefetches_nothing_for_the_next() -> None:
    """The gathers of the second microbatch wait for the first one's last backward."""
    rank_program = fsdp_program(FullyShard(prefetch=3), microbatches=2)
    first_microbatch = [
        task_id
        for task_id, task in enumerate(rank_program.tasks)
        if isinstance(task, ComputeTask) and task.action and not task.action[2]
    ]
    last = max(first_microbatch)
    dependencies = [task.depends_on for task in rank_program.tasks[last:] if isinstance(task, CollectiveTask)]
    assert set(dependencies[:5]) == {(last,)}


def copied_bytes(data: FullyShard, replicas: int = 4, **training: object) -> dict[str, float]:
    """Bytes that copies move in a forward and a backward of one microbatch."""
    training_config = replace(TRAINING, global_batch=replicas, gradient_clipping=False, **training)
    (rank_program,) = lower_plan(make_plan(Layout(dp=replicas, data=data), training_config)).programs
    bytes_by_pass = {"F": 0.0, "B": 0.0}
    for task in rank_program.tasks:
        if isinstance(task, ComputeTask) and task.action is not None:
            kernels = [operation.kernel for operation in task.segment.operations if operation.kernel]
            bytes_by_pass[task.action.kind.value] += sum(
                kernel.bytes for kernel in kernels if kernel.name.startswith("copy")
            )
    return bytes_by_pass


def test_gathered_parameters_are_copied_as_in_fsdp2() -> None:
    """Each gathered bf16 parameter is read and written, 2 x 2 bytes; the head is gathered for its forward only."""
    all_parameters, head_count = parameter_count(SMALL), head_parameter_count(SMALL)
    assert copied_bytes(FullyShard(copies=True)) == {"F": 4 * all_parameters, "B": 4 * (all_parameters - head_count)}
    assert copied_bytes(FullyShard(copies=True, reshard_after_forward=False)) == {"F": 4 * all_parameters, "B": 0}


def test_nothing_is_copied_without_the_option_or_without_replicas() -> None:
    assert copied_bytes(FullyShard()) == {"F": 0, "B": 0}
    assert copied_bytes(FullyShard(copies=True), replicas=1) == {"F": 0, "B": 0}


def test_recomputation_copies_once_and_copies_change_nothing_else() -> None:
    data = FullyShard(copies=True)
    assert copied_bytes(data, recompute=FullRecompute()) == copied_bytes(data)
    assert data_parallel_task_names(fsdp_program(data)) == data_parallel_task_names(fsdp_program(FullyShard()))
    assert collectives(fsdp_program(data)) == collectives(fsdp_program(FullyShard()))


def test_copies_come_before_the_kernels_that_read_them() -> None:
    for task in fsdp_program(FullyShard(copies=True)).tasks:
        if isinstance(task, ComputeTask) and task.action:
            is_copy = [
                operation.kernel is not None and operation.kernel.name.startswith("copy")
                for operation in task.segment.operations
            ]
            assert not any(is_copy[1:])


def test_the_optimizer_waits_for_all_reductions() -> None:
    rank_program = fsdp_program(FullyShard(), microbatches=2)
    reductions = [
        task_id
        for task_id, task in enumerate(rank_program.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.REDUCE_SCATTER
    ]
    assert len(reductions) == 2 * len(UNITS)
    assert rank_program.tasks[-1].depends_on == tuple(reductions)


def test_recomputation_uses_the_gathered_parameters_of_its_backward() -> None:
    """The unit is gathered before its backward, and recomputation reuses it: no third gather."""
    plain, recomputed = (
        collectives(fsdp_program(FullyShard(), **options)) for options in ({}, {"recompute": FullRecompute()})
    )
    assert plain == recomputed


def test_only_selected_units_are_recomputed() -> None:
    rank_program = fsdp_program(FullyShard(), recompute=FullRecompute(1))
    backward = [len(task.segment.operations) for task in rank_program.tasks if isinstance(task, ComputeTask)][
        len(UNITS) :
    ]
    _head, *kept, recomputed, _embedding, _optimizer = (
        backward  # layers 3, 2 and 1 keep what they need, layer 0 does not
    )
    assert len(kept) == 3
    assert len(set(kept)) == 1
    assert recomputed > kept[0]


def collective_counts(data: FullyShard, microbatches: int = 3) -> list[Counter[str]]:
    """Counts of data-parallel collectives by name, for each of two pipeline ranks."""
    training = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False)
    programs = lower_plan(make_plan(Layout(dp=4, pp=2, data=data), training)).programs
    return [Counter(collective.name for collective in collectives(program)) for program in programs]


def test_with_a_pipeline_units_are_gathered_and_reduced_once_a_step() -> None:
    """torch.distributed.pipelining: no resharding and no gradient synchronisation before the last backward."""
    first_rank, last_rank = collective_counts(FullyShard())
    assert first_rank == {"gather embedding": 1, "gather layer": 2, "reduce embedding": 1, "reduce layer": 2}
    assert last_rank == {"gather head": 1, "gather layer": 2, "reduce head": 1, "reduce layer": 2}


def test_with_a_pipeline_the_last_backward_reduces() -> None:
    training = replace(TRAINING, global_batch=12, gradient_clipping=False)
    _, last_rank = lower_plan(make_plan(Layout(dp=4, pp=2, data=FullyShard()), training)).programs
    passes = [word for word in data_parallel_task_names(last_rank) if word.startswith(("B", "reduce"))]
    assert passes == [*["B0"] * 3, *["B1"] * 3, "B2", "reduce head", "B2", "reduce layer", "B2", "reduce layer"]


def test_resharding_and_reducing_per_microbatch_work_with_a_pipeline() -> None:
    """Every microbatch gathers for both passes (the head once) and reduces."""
    first_rank, last_rank = collective_counts(
        FullyShard(reshard_after_forward=True, reduce=ReductionFrequency.PER_MICROBATCH)
    )
    assert first_rank == {"gather embedding": 6, "gather layer": 12, "reduce embedding": 3, "reduce layer": 6}
    assert last_rank == {"gather head": 3, "gather layer": 12, "reduce head": 3, "reduce layer": 6}


def test_no_sync_reduces_once_without_a_pipeline_and_gathers_always() -> None:
    """FSDP's `no_sync`, `set_requires_gradient_sync(False)`: parameters are still dropped after every pass."""
    counts = Counter(
        data_parallel_task_names(fsdp_program(FullyShard(reduce=ReductionFrequency.LAST_MICROBATCH), microbatches=3))
    )
    assert (counts["reduce layer"], counts["gather layer"], counts["gather head"]) == (4, 3 * 8, 3)


STRATEGIES = st.builds(
    FullyShard,
    prefetch=st.integers(0, 8),
    reshard_after_forward=st.sampled_from([None, True, False]),
    copies=st.booleans(),
    shard=st.sampled_from([None, 2]),
    reduce=st.sampled_from([None, *ReductionFrequency]),
    all_reduce=st.sampled_from(ReductionFrequency),
    waits_for_reduction=st.booleans(),
)
ORDERS = st.sampled_from([(1, OneFOneB()), (2, OneFOneB()), (2, ZeroBubble(1)), (3, ZeroBubble(2))])


@given(STRATEGIES, ORDERS, st.booleans(), st.integers(1, 6))
def test_repeated_passes_equal_unit_by_unit_lowering(
    data: FullyShard, order: tuple[int, Schedule], overlap: bool, microbatches: int
) -> None:
    pp, schedule = order
    layout = Layout(dp=4, pp=pp, data=data, overlap_p2p_comm=overlap)
    plan = make_plan(layout, replace(TRAINING, global_batch=4 * microbatches))
    with_reuse = comparable_tasks(lower_plan(plan, schedule))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsdpLowering, "_lower_cached", FsdpLowering._lower_units)
        assert with_reuse == comparable_tasks(lower_plan(plan, schedule))
