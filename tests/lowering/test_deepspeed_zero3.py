"""ZeRO-3 of DeepSpeed's first release: gathers by parameter, their overlap, and reductions."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from clustersim.model.training import FullRecompute, NoRecompute, Recompute
from clustersim.parallel.data_parallel_strategy import DeepspeedZero3Strategy
from clustersim.parallel.layout import Layout
from clustersim.program.action import ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.lowering.plans import SMALL, TRAINING, lower_plan, make_plan

RANKS = 4
H, F, LAYERS, VOCAB = 64, 128, 4, 256  # of SMALL: hidden, ffn
MATRICES = {"attention.qkv": 3 * H * H, "attention.out": H * H, "mlp.up": H * F, "mlp.down": F * H}


def zero3_program(recompute: Recompute = NoRecompute()) -> RankProgram:  # noqa: B008 - frozen
    layout = Layout(dp=RANKS, data=DeepspeedZero3Strategy())
    (lowered_program,) = lower_plan(
        make_plan(layout, replace(TRAINING, global_batch=RANKS, recompute=recompute))
    ).programs
    return lowered_program


def named_payloads(rank_program: RankProgram, kind: CollectiveType) -> list[tuple[str, float]]:
    """Names and bytes of a rank's collectives of a type, in issue order."""
    comm_ops = (task.comm_op for task in rank_program.tasks if isinstance(task, CollectiveTask))
    return [(comm_op.name, comm_op.payload) for comm_op in comm_ops if comm_op.collective is kind]


@pytest.mark.parametrize(("recompute", "others", "last"), [(NoRecompute(), 2, 2), (FullRecompute(), 3, 2)])
def test_matrices_are_gathered_for_forward_recompute_and_backward(recompute: Recompute, others: int, last: int) -> None:
    """Except the last matmul's, whose backward directly follows its recomputation; BF16, two bytes each."""
    gathered = Counter(named_payloads(zero3_program(recompute), CollectiveType.ALL_GATHER))
    for name, elements in MATRICES.items():
        assert gathered[f"gather {name}", 2.0 * elements] == LAYERS * (last if name == "mlp.down" else others)


def test_gradients_are_reduced_separately() -> None:
    """A layer has twelve: matrices and biases of four products, weights and biases of two norms; FP32 here."""
    reduced, plan = named_payloads(zero3_program(), CollectiveType.REDUCE_SCATTER), make_plan(Layout())
    assert sum(payload for _, payload in reduced) == 4.0 * plan.parameter_count(plan.stages[0])
    layer_payloads = [payload for name, payload in reduced if name.removeprefix("reduce ") in MATRICES]
    assert len(layer_payloads) == LAYERS * 12
    assert Counter(layer_payloads)[4.0 * MATRICES["attention.qkv"]] == LAYERS


def test_a_gather_overlaps_only_the_matmuls_of_the_previous_parameter() -> None:
    """Each waits for the previous gather and for all computation issued before it."""
    lowered_program = zero3_program()
    gathers = [
        (task_id, task) for task_id, task in enumerate(lowered_program.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.ALL_GATHER
    ]  # fmt: skip
    computes = [task_id for task_id, task in enumerate(lowered_program.tasks) if isinstance(task, ComputeTask)]
    for (earlier, _), (task_id, task) in pairwise(gathers):
        assert earlier in task.depends_on
        assert max(compute for compute in computes if compute < task_id) in task.depends_on
    matrix_gathers = [
        collective_task
        for _, collective_task in gathers
        if collective_task.comm_op.name in {f"gather {name}" for name in MATRICES}
    ]
    assert [matrix_gather.comm_op.name for matrix_gather in matrix_gathers[: len(MATRICES)]] == [
        f"gather {name}" for name in MATRICES
    ]


def test_host_calls_are_a_view_and_a_copy_per_rank_and_collective() -> None:
    lowered_program = zero3_program()
    segments = [task.segment for task in lowered_program.tasks if isinstance(task, ComputeTask)]
    calls = sum(
        operation.kernel.host_calls
        for segment in segments
        for operation in segment.operations
        if operation.kernel is not None
    )
    payloads = [
        *named_payloads(lowered_program, CollectiveType.ALL_GATHER),
        *named_payloads(lowered_program, CollectiveType.REDUCE_SCATTER),
    ]
    assert calls == 2 * RANKS * len(payloads)


def test_it_runs_the_kernels_of_full_sharding() -> None:
    """Only the copies of shards are added."""
    layouts = (Layout(dp=RANKS, data=data) for data in (DeepspeedZero3Strategy(), Layout().data))
    training = replace(TRAINING, global_batch=RANKS)
    zero3_operations, sharded_operations = (
        [
            operation for task in lower_plan(make_plan(layout, training, SMALL)).programs[0].tasks
            if isinstance(task, ComputeTask) and task.action is not None
            and task.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for operation in task.segment.operations
            if operation.kernel is not None and not operation.kernel.host_calls
        ]
        for layout in layouts
    )  # fmt: skip
    assert [zero3_operation.body for zero3_operation in zero3_operations] == [
        sharded_operation.body for sharded_operation in sharded_operations
    ]


@pytest.mark.parametrize("symmetry", ["auto", "off"])
def test_a_host_bound_step_takes_its_host_calls(symmetry: str) -> None:
    """With hosts that need a second per call the sequential calls bound the step."""
    mapping = {
        "model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"data": "deepspeed_zero3"},
        "training": {"sequence": 64, "global_batch": 8}, "cost": {"symmetry": symmetry},
    }  # fmt: skip
    scenario = Scenario.from_mapping(mapping)
    slow = simulate(replace(scenario, framework=replace(scenario.framework, eager_call_seconds=1.0)))
    without_calls = simulate(replace(scenario, framework=replace(scenario.framework, eager_call_seconds=0.0)))
    tasks = slow.program.programs[0].tasks
    kinds = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)
    calls = 2 * 8 * sum(isinstance(task, CollectiveTask) and task.comm_op.collective in kinds for task in tasks)
    assert calls <= slow.step_time <= calls + without_calls.step_time
