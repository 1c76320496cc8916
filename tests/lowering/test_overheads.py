"""Framework overheads are lowered where the framework's code has them, and not at all if disabled."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.model.kernels import Kernel
from clustersim.model.overheads import NO_OVERHEADS, BatchTransfer, LossReport
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.unattributed import PASS_OVERHEAD, STEP_OVERHEAD
from clustersim.parallel.data_parallel_strategy import Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CommOp, ComputeTask, Stream
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.lowering.plans import SMALL, TRAINING, collectives, comparable_tasks, lower_plan, make_plan

FP16 = replace(TRAINING, recipe=mixed_precision(DType.FP16, gradients=DType.FP16))
LAYOUT = Layout(tp=2, pp=2, dp=2, sequence_parallel=True)
MICROBATCHES = 4  # 8 sequences over dp 2


def _plan_with_overheads(layout: Layout = LAYOUT, **overheads: Any) -> Plan:
    return make_plan(layout, replace(FP16, overheads=replace(NO_OVERHEADS, **overheads)))


def _segment_names(program: RankProgram) -> list[str]:
    return [task.segment.name for task in program.tasks if isinstance(task, ComputeTask)]


def _kernels(program: RankProgram) -> Iterator[Kernel]:
    tasks = (task for task in program.tasks if isinstance(task, ComputeTask))
    yield from (
        operation.kernel for task in tasks for operation in task.segment.operations if operation.kernel is not None
    )


def _kernels_named(program: RankProgram, name: str) -> list[Kernel]:
    return [kernel for kernel in _kernels(program) if kernel.name == name]


def test_gradients_are_zeroed_first() -> None:
    for rank, program in enumerate(lower_plan(_plan_with_overheads(zero_grad=True)).programs):
        plan = _plan_with_overheads()
        assert _segment_names(program)[0] == "zero gradients"
        (zeroed,) = _kernels_named(program, "gradients.zero")
        assert zeroed.bytes == 2 * sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))


@pytest.mark.parametrize("overlap", [True, False])
def test_reduced_gradients_are_averaged_once(overlap: bool) -> None:
    layout = replace(LAYOUT, data=Zero1(overlap=overlap))
    for rank, program in enumerate(lower_plan(_plan_with_overheads(layout, prescale_gradients=True)).programs):
        plan = _plan_with_overheads(layout)
        rank_parameters = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        assert sum(kernel.bytes for kernel in _kernels_named(program, "gradients.average")) == 2 * 2 * rank_parameters
        prepared = [
            index
            for index, task in enumerate(program.tasks)
            if getattr(task, "segment", None) and _segment_starts_with(task, "prepare")
        ]
        reduced = [task for task in program.tasks if _comm_op_name(task).startswith("reduce gradients")]
        assert [task.depends_on for task in reduced] == [(task_id,) for task_id in prepared]


def _segment_starts_with(task: Any, name: str) -> bool:
    return bool(task.segment.name.startswith(name))


def _comm_op_name(task: Any) -> str:
    return getattr(getattr(task, "comm_op", None), "name", "")


def test_a_scaled_loss_costs_a_pass_and_an_all_reduce_before_the_norm() -> None:
    program = lower_plan(_plan_with_overheads(unscale_gradients=True, upcast_gradients=True)).programs[0]
    assert _segment_names(program)[-3:] == ["unscale gradients", "gradient norm", "optimizer"]
    names = [comm_op.name for comm_op in collectives(program)]
    assert names[-2:] == ["found infinite", "gradient norm"]
    rank_parameters = sum(
        _plan_with_overheads().parameter_count(stage) for stage in _plan_with_overheads().stages_on_rank(0)
    )
    widened, unscaled = (
        _kernels_named(program, f"optimizer.{name}")[0].bytes / rank_parameters for name in ("widen", "unscale")
    )
    assert (widened, unscaled) == (2 + 4, 4 + 4)  # the copy is unscaled
    assert _kernels_named(program, "optimizer.gradient_norm")[0].bytes == 4 * rank_parameters  # and the norm reads it


def test_without_clipping_the_optimizer_upcasts_its_gradients() -> None:
    plan = _plan_with_overheads(upcast_gradients=True)
    unclipped = replace(plan, training=replace(plan.training, gradient_clipping=False))
    last = [task for task in lower_plan(unclipped).programs[0].tasks if isinstance(task, ComputeTask)][-1]
    assert [operation.kernel.name for operation in last.segment.operations if operation.kernel] == [
        "optimizer.widen",
        "optimizer.step",
    ]


@pytest.mark.parametrize(
    ("report", "times"), [(LossReport.NEVER, 0), (LossReport.STEP, 1), (LossReport.MICROBATCH, MICROBATCHES)]
)
def test_the_ranks_with_the_head_average_the_loss(report: LossReport, times: int) -> None:
    first, last = lower_plan(_plan_with_overheads(loss_averaging=report)).programs
    names = [comm_op.name for comm_op in collectives(last)]
    assert names.count("average loss") == times
    assert "average loss" not in [comm_op.name for comm_op in collectives(first)]


def test_the_next_pass_waits_for_the_average_of_a_microbatch() -> None:
    _, last = lower_plan(_plan_with_overheads(loss_averaging=LossReport.MICROBATCH)).programs
    for task_id, task in enumerate(last.tasks):
        if _comm_op_name(task) == "average loss":
            following = next(item for item in last.tasks[task_id:] if isinstance(item, ComputeTask))
            assert task_id in following.depends_on


@pytest.mark.parametrize(("batches", "inner"), [(BatchTransfer.PACKED, MICROBATCHES), (BatchTransfer.SEPARATE, 0)])
def test_batches_precede_their_forward_on_all_or_the_end_stages(batches: BatchTransfer, inner: int) -> None:
    programs = lower_plan(_plan_with_overheads(replace(LAYOUT, pp=4), batch_transfer=batches)).programs
    assert [_segment_names(program).count("batch") for program in programs] == [
        MICROBATCHES,
        inner,
        inner,
        MICROBATCHES,
    ]
    computes = [task for task in programs[0].tasks if isinstance(task, ComputeTask)]
    for task, following in pairwise(computes):
        if task.segment.name == "batch":
            assert following.action is not None
            assert following.action.kind is ActionKind.FORWARD


def test_a_batch_is_broadcast_only_under_tensor_parallelism() -> None:
    comm_ops_by_tp = {
        tp: _batch_comm_ops(_plan_with_overheads(Layout(tp=tp, dp=2), batch_transfer=BatchTransfer.PACKED))
        for tp in (1, 2)
    }
    assert [comm_op.payload for comm_op in comm_ops_by_tp[2]] == [5 * 8, 65 * 8]
    assert comm_ops_by_tp[1] == []


def _batch_comm_ops(plan: Plan) -> list[CommOp]:
    tasks = (task for task in lower_plan(plan).programs[0].tasks if isinstance(task, ComputeTask))
    return list(next(task for task in tasks if task.segment.name == "batch").segment.comm_ops)


def test_norm_and_bias_gradients_are_reduced_over_tensor_ranks() -> None:
    """Two layers of a stage: two norms of 2 h and two biases of h each; the last stage has the final norm, too."""
    first, last = lower_plan(_plan_with_overheads(allreduce_layernorm_grads=True)).programs
    hidden = SMALL.hidden
    for program, elements, tensors in ((first, 2 * 6 * hidden, 12), (last, 2 * 6 * hidden + 2 * hidden, 14)):
        (segment,) = [
            task.segment
            for task in program.tasks
            if isinstance(task, ComputeTask) and _segment_starts_with(task, "sum norms")
        ]
        flatten, summed, unflatten = segment.operations
        assert summed.comm_op is not None
        assert summed.comm_op.payload == 2 * elements
        assert (flatten.kernel and flatten.kernel.bytes) == 2 * 2 * elements
        assert (unflatten.kernel and unflatten.kernel.launches) == tensors


def test_without_sequence_parallelism_norms_are_not_reduced() -> None:
    unsharded = replace(LAYOUT, sequence_parallel=False)
    assert comparable_tasks(
        lower_plan(_plan_with_overheads(unsharded, allreduce_layernorm_grads=True))
    ) == comparable_tasks(lower_plan(_plan_with_overheads(unsharded)))


def test_overhead_kernels_are_on_the_compute_stream() -> None:
    program = lower_plan(
        _plan_with_overheads(
            zero_grad=True, prescale_gradients=True, unscale_gradients=True, batch_transfer=BatchTransfer.PACKED
        )
    ).programs[0]
    for task, stream in zip(program.tasks, program.streams, strict=True):
        assert isinstance(task, ComputeTask) is (stream is Stream.COMPUTE)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}])
def test_work_of_no_operator_is_added_to_passes_and_steps(layout: dict[str, int]) -> None:
    """M forwards a rank, each 2 s longer, and 3 s at the end of the step; a pipeline also waits for the first one."""
    mapping = {
        "model": {"preset": "llama3-8b", "layers": 2}, "cluster": {"name": "dgx-h100", "gpus": layout.get("pp", 1)},
        "layout": layout, "training": {"sequence": 1024, "global_batch": 4, "microbatch": 1},
    }  # fmt: skip
    scenario = Scenario.from_mapping(mapping, default_name="small")
    samples = tuple(
        KernelSample.of_kernel(kernel, TimeStatistics(seconds, seconds, seconds, 1))
        for kernel, seconds in ((PASS_OVERHEAD, 2.0), (STEP_OVERHEAD, 3.0))
    )
    record = CalibrationRecord(DeviceInfo("h100-sxm-80gb", ""), MeasurementConditions("", "", ""), samples)
    plain, longer = (
        simulate(replace(scenario, cost=replace(scenario.cost, record=used))).step_time
        for used in (replace(record, kernels=()), record)
    )
    first_stage = layout.get("pp", 1) - 1
    assert longer - plain == pytest.approx(4 * 2.0 + 3.0 + 2.0 * first_stage, rel=0.01)
