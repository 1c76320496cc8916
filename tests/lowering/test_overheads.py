"""What a framework does beside the model stands where its code has it, and nowhere if it is off."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel
from clustersim.model.overheads import NO_OVERHEADS, BatchTransfer, LossReport
from clustersim.model.precision_recipe import mixed_precision
from clustersim.parallel.data_parallel_strategy import Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CommOp, ComputeTask, Stream
from tests.lowering.plans import SMALL, TRAINING, collectives, lowered, planned, told

FP16 = replace(TRAINING, recipe=mixed_precision(DType.FP16, gradients=DType.FP16))
LAYOUT = Layout(tp=2, pp=2, dp=2, sequence_parallel=True)
MICROBATCHES = 4  # 8 sequences over dp 2


def _plan(layout: Layout = LAYOUT, **overheads: Any) -> Plan:
    return planned(layout, replace(FP16, overheads=replace(NO_OVERHEADS, **overheads)))


def _blocks(program: RankProgram) -> list[str]:
    return [task.segment.name for task in program.tasks if isinstance(task, ComputeTask)]


def _kernels(program: RankProgram) -> Iterator[Kernel]:
    tasks = (task for task in program.tasks if isinstance(task, ComputeTask))
    yield from (
        operation.kernel for task in tasks for operation in task.segment.operations if operation.kernel is not None
    )


def _named(program: RankProgram, name: str) -> list[Kernel]:
    return [kernel for kernel in _kernels(program) if kernel.name == name]


def test_gradients_are_zeroed_first() -> None:
    for rank, program in enumerate(lowered(_plan(zeroing=True)).programs):
        plan = _plan()
        assert _blocks(program)[0] == "zero gradients"
        (zeroed,) = _named(program, "gradients.zero")
        assert zeroed.bytes == 2 * sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))


@pytest.mark.parametrize("overlap", [True, False])
def test_every_reduced_gradient_is_averaged_once(overlap: bool) -> None:
    layout = replace(LAYOUT, data=Zero1(overlap=overlap))
    for rank, program in enumerate(lowered(_plan(layout, averaging=True)).programs):
        plan = _plan(layout)
        held = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        assert sum(kernel.bytes for kernel in _named(program, "gradients.average")) == 2 * 2 * held
        prepared = [
            n for n, task in enumerate(program.tasks) if getattr(task, "segment", None) and _is(task, "prepare")
        ]
        reduced = [task for task in program.tasks if _exchange(task).startswith("reduce gradients")]
        assert [task.depends_on for task in reduced] == [(number,) for number in prepared]


def _is(task: Any, name: str) -> bool:
    return bool(task.block.name.startswith(name))


def _exchange(task: Any) -> str:
    return getattr(getattr(task, "exchange", None), "name", "")


def test_a_scaled_loss_costs_a_pass_and_an_all_reduce_before_the_norm() -> None:
    program = lowered(_plan(unscaling=True, widening=True)).programs[0]
    assert _blocks(program)[-3:] == ["unscale gradients", "gradient norm", "optimizer"]
    names = [exchange.name for exchange in collectives(program)]
    assert names[-2:] == ["found infinite", "gradient norm"]
    held = sum(_plan().parameter_count(stage) for stage in _plan().stages_on_rank(0))
    widened, unscaled = (_named(program, f"optimizer.{name}")[0].bytes / held for name in ("widen", "unscale"))
    assert (widened, unscaled) == (2 + 4, 4 + 4)  # what is unscaled is the copy
    assert _named(program, "optimizer.gradient_norm")[0].bytes == 4 * held  # and so is what the norm reads


def test_without_clipping_the_optimizer_widens_its_gradients_itself() -> None:
    plan = _plan(widening=True)
    unclipped = replace(plan, training=replace(plan.training, gradient_clipping=False))
    last = [task for task in lowered(unclipped).programs[0].tasks if isinstance(task, ComputeTask)][-1]
    assert [operation.kernel.name for operation in last.segment.operations if operation.kernel] == [
        "optimizer.widen",
        "optimizer.step",
    ]


@pytest.mark.parametrize(
    ("report", "times"), [(LossReport.NEVER, 0), (LossReport.STEP, 1), (LossReport.MICROBATCH, MICROBATCHES)]
)
def test_the_ranks_with_the_head_average_the_loss(report: LossReport, times: int) -> None:
    first, last = lowered(_plan(loss=report)).programs
    names = [exchange.name for exchange in collectives(last)]
    assert names.count("average loss") == times
    assert "average loss" not in [exchange.name for exchange in collectives(first)]


def test_the_next_pass_waits_for_the_average_of_a_microbatch() -> None:
    _, last = lowered(_plan(loss=LossReport.MICROBATCH)).programs
    for number, task in enumerate(last.tasks):
        if _exchange(task) == "average loss":
            following = next(item for item in last.tasks[number:] if isinstance(item, ComputeTask))
            assert number in following.depends_on


@pytest.mark.parametrize(("batches", "inner"), [(BatchTransfer.PACKED, MICROBATCHES), (BatchTransfer.SEPARATE, 0)])
def test_a_batch_comes_before_its_forward_at_every_stage_or_at_the_ends(batches: BatchTransfer, inner: int) -> None:
    programs = lowered(_plan(replace(LAYOUT, pp=4), batches=batches)).programs
    assert [_blocks(program).count("batch") for program in programs] == [MICROBATCHES, inner, inner, MICROBATCHES]
    computes = [task for task in programs[0].tasks if isinstance(task, ComputeTask)]
    for task, following in pairwise(computes):
        if task.segment.name == "batch":
            assert following.action is not None
            assert following.action.kind is ActionKind.FORWARD


def test_a_batch_is_sent_only_where_tensors_are_split() -> None:
    sent = {tp: _exchanges_of_batch(_plan(Layout(tp=tp, dp=2), batches=BatchTransfer.PACKED)) for tp in (1, 2)}
    assert [comm_op.payload for comm_op in sent[2]] == [5 * 8, 65 * 8]
    assert sent[1] == []


def _exchanges_of_batch(plan: Plan) -> list[CommOp]:
    tasks = (task for task in lowered(plan).programs[0].tasks if isinstance(task, ComputeTask))
    return list(next(task for task in tasks if task.segment.name == "batch").segment.comm_ops)


def test_norms_and_the_biases_behind_them_are_summed_over_tensor_parallel_ranks() -> None:
    """Two layers of a stage: two norms of 2 h and two biases of h each; the last stage has the final norm, too."""
    first, last = lowered(_plan(norm_sums=True)).programs
    hidden = SMALL.hidden
    for program, elements, tensors in ((first, 2 * 6 * hidden, 12), (last, 2 * 6 * hidden + 2 * hidden, 14)):
        (block,) = [task.segment for task in program.tasks if isinstance(task, ComputeTask) and _is(task, "sum norms")]
        flatten, summed, unflatten = block.operations
        assert summed.comm_op is not None
        assert summed.comm_op.payload == 2 * elements
        assert (flatten.kernel and flatten.kernel.bytes) == 2 * 2 * elements
        assert (unflatten.kernel and unflatten.kernel.launches) == tensors


def test_whole_sequences_sum_no_norms() -> None:
    whole = replace(LAYOUT, sequence_parallel=False)
    assert told(lowered(_plan(whole, norm_sums=True))) == told(lowered(_plan(whole)))


def test_all_that_is_beside_a_pass_is_on_the_compute_stream() -> None:
    program = lowered(_plan(zeroing=True, averaging=True, unscaling=True, batches=BatchTransfer.PACKED)).programs[0]
    for task, stream in zip(program.tasks, program.streams, strict=True):
        assert isinstance(task, ComputeTask) is (stream is Stream.COMPUTE)
