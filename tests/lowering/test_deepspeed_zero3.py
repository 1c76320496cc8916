"""ZeRO-3 of DeepSpeed's first release: which parameters are gathered, how often, beside what, and what is reduced."""

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
from tests.lowering.plans import SMALL, TRAINING, lowered, planned

RANKS = 4
H, F, LAYERS, VOCAB = 64, 128, 4, 256  # of SMALL: hidden, ffn
MATRICES = {"attention.qkv": 3 * H * H, "attention.out": H * H, "mlp.up": H * F, "mlp.down": F * H}


def program(recompute: Recompute = NoRecompute()) -> RankProgram:  # noqa: B008 - frozen
    layout = Layout(dp=RANKS, data=DeepspeedZero3Strategy())
    (found,) = lowered(planned(layout, replace(TRAINING, global_batch=RANKS, recompute=recompute))).programs
    return found


def sent(found: RankProgram, kind: CollectiveType) -> list[tuple[str, float]]:
    """Names and bytes of a rank's collectives, in the order in which it issues them."""
    exchanges = (task.comm_op for task in found.tasks if isinstance(task, CollectiveTask))
    return [(exchange.name, exchange.payload) for exchange in exchanges if exchange.collective is kind]


@pytest.mark.parametrize(("recompute", "others", "last"), [(NoRecompute(), 2, 2), (FullRecompute(), 3, 2)])
def test_each_matrix_is_gathered_for_forward_recomputation_and_backward(
    recompute: Recompute, others: int, last: int
) -> None:
    """But the last product's, whose backward follows its recomputation at once; BF16, two bytes each."""
    gathered = Counter(sent(program(recompute), CollectiveType.ALL_GATHER))
    for name, elements in MATRICES.items():
        assert gathered[f"gather {name}", 2.0 * elements] == LAYERS * (last if name == "mlp.down" else others)


def test_every_gradient_is_reduced_by_itself() -> None:
    """A layer has twelve: matrices and biases of four products, weights and biases of two norms; FP32 here."""
    reduced, plan = sent(program(), CollectiveType.REDUCE_SCATTER), planned(Layout())
    assert sum(payload for _, payload in reduced) == 4.0 * plan.parameter_count(plan.stages[0])
    of_layers = [payload for name, payload in reduced if name.removeprefix("reduce ") in MATRICES]
    assert len(of_layers) == LAYERS * 12
    assert Counter(of_layers)[4.0 * MATRICES["attention.qkv"]] == LAYERS


def test_a_gather_runs_beside_the_products_of_the_parameter_before_it_and_no_further_ahead() -> None:
    """Each waits for the one before it and for all that was computed when it was begun."""
    found = program()
    gathers = [
        (place, task) for place, task in enumerate(found.tasks)
        if isinstance(task, CollectiveTask) and task.comm_op.collective is CollectiveType.ALL_GATHER
    ]  # fmt: skip
    computes = [place for place, task in enumerate(found.tasks) if isinstance(task, ComputeTask)]
    for (earlier, _), (place, task) in pairwise(gathers):
        assert earlier in task.depends_on
        assert max(compute for compute in computes if compute < place) in task.depends_on
    forward = [
        collective_task
        for _, collective_task in gathers
        if collective_task.comm_op.name in {f"gather {name}" for name in MATRICES}
    ]
    assert [item.comm_op.name for item in forward[: len(MATRICES)]] == [f"gather {name}" for name in MATRICES]


def test_the_host_makes_a_view_and_a_copy_for_each_rank_at_every_collective() -> None:
    found = program()
    blocks = [task.segment for task in found.tasks if isinstance(task, ComputeTask)]
    calls = sum(
        operation.kernel.host_calls
        for block in blocks
        for operation in block.operations
        if operation.kernel is not None
    )
    collectives = [*sent(found, CollectiveType.ALL_GATHER), *sent(found, CollectiveType.REDUCE_SCATTER)]
    assert calls == 2 * RANKS * len(collectives)


def test_it_computes_what_full_sharding_does() -> None:
    """Only the copies of parts come on top."""
    layouts = (Layout(dp=RANKS, data=data) for data in (DeepspeedZero3Strategy(), Layout().data))
    training = replace(TRAINING, global_batch=RANKS)
    ours, plain = (
        [
            operation for task in lowered(planned(layout, training, SMALL)).programs[0].tasks
            if isinstance(task, ComputeTask) and task.action is not None
            and task.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for operation in task.segment.operations
            if operation.kernel is not None and not operation.kernel.host_calls
        ]
        for layout in layouts
    )  # fmt: skip
    assert [our.body for our in ours] == [item.body for item in plain]


@pytest.mark.parametrize("symmetry", ["auto", "off"])
def test_a_step_takes_host_loops_and_products_and_what_they_do_not_hide(symmetry: str) -> None:
    """On a network as fast as can be, hosts that need a second for a call set the pace: one after the other."""
    written = {
        "model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"data": "zero3_by_parameter"},
        "training": {"sequence": 64, "global_batch": 8}, "cost": {"symmetry": symmetry},
    }  # fmt: skip
    scenario = Scenario.from_mapping(written)
    slow = simulate(replace(scenario, framework=replace(scenario.framework, eager_call_seconds=1.0)))
    plain = simulate(replace(scenario, framework=replace(scenario.framework, eager_call_seconds=0.0)))
    tasks = slow.program.programs[0].tasks
    kinds = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)
    calls = 2 * 8 * sum(isinstance(task, CollectiveTask) and task.comm_op.collective in kinds for task in tasks)
    assert calls <= slow.step_time <= calls + plain.step_time
