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
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.lowering.plans import SMALL, TRAINING, collectives, data_words, lowered, planned, told

UNITS = ["embedding", *["layer"] * 4, "head"]


def program(data: FullyShard, microbatches: int = 1, **training: object) -> RankProgram:
    changed = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False, **training)
    (only,) = lowered(planned(Layout(dp=4, data=data), changed)).programs
    return only


def test_each_unit_is_gathered_before_its_forward_and_again_before_its_backward() -> None:
    """Prefetch 1: two gathers ahead of the first unit, then one more for each unit that starts (Zhao et al. 3.3.2).

    The head is not gathered again: its backward follows its forward.
    """
    assert data_words(program(FullyShard())) == [
        "gather embedding", "gather layer", "F0",
        "gather layer", "F0", "gather layer", "F0", "gather layer", "F0", "gather head", "F0", "F0",
        "gather layer", "B0", "reduce head",
        *["gather layer", "B0", "reduce layer"] * 3,
        "gather embedding", "B0", "reduce layer", "B0", "reduce embedding",
        "optimizer",
    ]  # fmt: skip


def test_without_resharding_backward_gathers_nothing() -> None:
    words = data_words(program(FullyShard(reshard_after_forward=False)))
    assert Counter(word for word in words if word.startswith("gather")) == {
        "gather embedding": 1, "gather layer": 4, "gather head": 1,
    }  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_microbatch_gathers_twice_and_reduces_once(microbatches: int) -> None:
    """ZeRO section 7.2.2: 3 Psi a microbatch; less the head's second gather here. Payloads bf16 and fp32."""
    sent = collectives(program(FullyShard(), microbatches))
    gathered = sum(comm_op.payload for comm_op in sent if comm_op.collective is CollectiveType.ALL_GATHER)
    reduced = sum(item.payload for item in sent if item.collective is CollectiveType.REDUCE_SCATTER)
    assert gathered == 2 * microbatches * (2 * parameter_count(SMALL) - head_parameter_count(SMALL))
    assert reduced == 4 * microbatches * parameter_count(SMALL)
    assert all(element.comm_group == "dp" for element in sent)


@given(prefetch=st.integers(0, 8))
def test_at_most_prefetch_units_are_gathered_ahead(prefetch: int) -> None:
    """When compute reaches unit i, the gathers of units up to i + prefetch may run and no others.

    So a gather waits for the compute task that ends unit i - prefetch - 1: the compute before it in its pass.
    """
    only = program(FullyShard(prefetch=prefetch))
    computes = [number for number, task in enumerate(only.tasks) if isinstance(task, ComputeTask)]
    forward = computes[: len(UNITS)]
    gathers = [
        number
        for number, task in enumerate(only.tasks)
        if isinstance(task, CollectiveTask)
        and task.comm_op.collective is CollectiveType.ALL_GATHER
        and number < forward[-1]
    ]
    assert len(gathers) == len(UNITS)
    for place, number in enumerate(gathers):
        released = place - prefetch - 1
        assert only.tasks[number].depends_on == ((forward[released],) if released >= 0 else ())
        assert number in only.tasks[forward[place]].depends_on


def test_without_overlap_a_unit_is_gathered_when_the_one_before_it_is_done() -> None:
    assert data_words(program(FullyShard(overlap=False)))[:6] == [
        "gather embedding", "F0", "gather layer", "F0", "gather layer", "F0",
    ]  # fmt: skip


def test_a_pass_prefetches_nothing_for_the_next() -> None:
    """The gathers of the second microbatch wait for the first one's last backward."""
    only = program(FullyShard(prefetch=3), microbatches=2)
    first_microbatch = [
        number
        for number, task in enumerate(only.tasks)
        if isinstance(task, ComputeTask) and task.action and not task.action[2]
    ]
    last = max(first_microbatch)
    after = [task.depends_on for task in only.tasks[last:] if isinstance(task, CollectiveTask)]
    assert set(after[:5]) == {(last,)}


def copies(data: FullyShard, replicas: int = 4, **training: object) -> dict[str, float]:
    """Bytes that copies move in a forward and a backward of one microbatch."""
    changed = replace(TRAINING, global_batch=replicas, gradient_clipping=False, **training)
    (only,) = lowered(planned(Layout(dp=replicas, data=data), changed)).programs
    moved = {"F": 0.0, "B": 0.0}
    for task in only.tasks:
        if isinstance(task, ComputeTask) and task.action is not None:
            made = [operation.kernel for operation in task.segment.operations if operation.kernel]
            moved[task.action.kind.value] += sum(kernel.bytes for kernel in made if kernel.name.startswith("copy"))
    return moved


def test_what_is_gathered_is_copied_where_fsdp2_copies_it() -> None:
    """Each gathered bf16 parameter is read and written, 2 x 2 bytes; the head is gathered for its forward only."""
    whole, head = parameter_count(SMALL), head_parameter_count(SMALL)
    assert copies(FullyShard(copies=True)) == {"F": 4 * whole, "B": 4 * (whole - head)}
    assert copies(FullyShard(copies=True, reshard_after_forward=False)) == {"F": 4 * whole, "B": 0}


def test_nothing_is_copied_without_copies_or_without_others_to_gather_from() -> None:
    assert copies(FullyShard()) == {"F": 0, "B": 0}
    assert copies(FullyShard(copies=True), replicas=1) == {"F": 0, "B": 0}


def test_copies_are_made_once_where_forward_is_run_again_and_change_nothing_else() -> None:
    data = FullyShard(copies=True)
    assert copies(data, recompute=FullRecompute()) == copies(data)
    assert data_words(program(data)) == data_words(program(FullyShard()))
    assert collectives(program(data)) == collectives(program(FullyShard()))


def test_copies_come_before_the_kernels_that_read_them() -> None:
    for task in program(FullyShard(copies=True)).tasks:
        if isinstance(task, ComputeTask) and task.action:
            copied = [
                operation.kernel is not None and operation.kernel.name.startswith("copy")
                for operation in task.segment.operations
            ]
            assert not any(copied[1:])


def test_the_optimizer_waits_for_every_reduction() -> None:
    only = program(FullyShard(), microbatches=2)
    reductions = [
        number
        for number, task in enumerate(only.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.REDUCE_SCATTER
    ]
    assert len(reductions) == 2 * len(UNITS)
    assert only.tasks[-1].depends_on == tuple(reductions)


def test_recomputation_uses_the_gathered_parameters_of_its_backward() -> None:
    """The unit is gathered before its backward, forward runs again from it: no third gather."""
    plain, again = (collectives(program(FullyShard(), **options)) for options in ({}, {"recompute": FullRecompute()}))
    assert plain == again


def test_units_that_are_recomputed_are_told_apart_from_those_that_are_not() -> None:
    only = program(FullyShard(), recompute=FullRecompute(1))
    backward = [len(task.segment.operations) for task in only.tasks if isinstance(task, ComputeTask)][len(UNITS) :]
    _head, *kept, first, _embedding, _optimizer = backward  # layers 3, 2 and 1 keep what they need, layer 0 does not
    assert len(kept) == 3
    assert len(set(kept)) == 1
    assert first > kept[0]


def staged(data: FullyShard, microbatches: int = 3) -> list[Counter[str]]:
    """What each pipeline rank of two communicates for its weights, by name: (how often)."""
    training = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False)
    programs = lowered(planned(Layout(dp=4, pp=2, data=data), training)).programs
    return [Counter(collective.name for collective in collectives(program)) for program in programs]


def test_beside_a_pipeline_units_are_gathered_and_reduced_once_a_step() -> None:
    """torch.distributed.pipelining: no resharding and no gradient synchronisation before the last backward."""
    first, last = staged(FullyShard())
    assert first == {"gather embedding": 1, "gather layer": 2, "reduce embedding": 1, "reduce layer": 2}
    assert last == {"gather head": 1, "gather layer": 2, "reduce head": 1, "reduce layer": 2}


def test_beside_a_pipeline_the_last_backward_reduces() -> None:
    training = replace(TRAINING, global_batch=12, gradient_clipping=False)
    _, last = lowered(planned(Layout(dp=4, pp=2, data=FullyShard()), training)).programs
    passes = [word for word in data_words(last) if word.startswith(("B", "reduce"))]
    assert passes == [*["B0"] * 3, *["B1"] * 3, "B2", "reduce head", "B2", "reduce layer", "B2", "reduce layer"]


def test_resharding_and_reducing_always_can_be_asked_for_beside_a_pipeline() -> None:
    """Every microbatch gathers for both passes (the head once) and reduces."""
    first, last = staged(FullyShard(reshard_after_forward=True, reduce=ReductionFrequency.PER_MICROBATCH))
    assert first == {"gather embedding": 6, "gather layer": 12, "reduce embedding": 3, "reduce layer": 6}
    assert last == {"gather head": 3, "gather layer": 12, "reduce head": 3, "reduce layer": 6}


def test_no_sync_reduces_once_without_a_pipeline_and_gathers_always() -> None:
    """FSDP's `no_sync`, `set_requires_gradient_sync(False)`: parameters are still dropped after every pass."""
    words = Counter(data_words(program(FullyShard(reduce=ReductionFrequency.LAST_MICROBATCH), microbatches=3)))
    assert (words["reduce layer"], words["gather layer"], words["gather head"]) == (4, 3 * 8, 3)


ANY = st.builds(
    FullyShard,
    prefetch=st.integers(0, 8),
    reshard_after_forward=st.sampled_from([None, True, False]),
    copies=st.booleans(),
    shard=st.sampled_from([None, 2]),
    reduce=st.sampled_from([None, *ReductionFrequency]),
    all_reduce=st.sampled_from(ReductionFrequency),
    waits=st.booleans(),
)
ORDERS = st.sampled_from([(1, OneFOneB()), (2, OneFOneB()), (2, ZeroBubble(1)), (3, ZeroBubble(2))])


@given(ANY, ORDERS, st.booleans(), st.integers(1, 6))
def test_a_pass_like_one_before_is_what_it_is_unit_by_unit(
    data: FullyShard, order: tuple[int, Schedule], overlap: bool, microbatches: int
) -> None:
    pp, schedule = order
    layout = Layout(dp=4, pp=pp, data=data, pipeline_overlap=overlap)
    plan = planned(layout, replace(TRAINING, global_batch=4 * microbatches))
    shorter = told(lowered(plan, schedule))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsdpLowering, "_lower_cached", FsdpLowering._lower_units)
        assert shorter == told(lowered(plan, schedule))
