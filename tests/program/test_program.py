"""Small facts about programs: who is in which group, and what a rank takes part in."""

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import ProcessGroups, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    CommOverlap,
    ComputeTask,
    Operation,
    ReceiveTask,
    Segment,
    SendTask,
    Stream,
    WorkType,
)

KERNEL = Kernel("kernel", KernelKind.MATMUL, DType.BF16, 1.0, 1.0)


def exchange(role: str) -> CommOp:
    return CommOp(role, CollectiveType.ALL_REDUCE, role, 1.0)


def test_a_rank_has_one_row_of_a_role_or_none() -> None:
    groups = ProcessGroups("dp", np.array([[4, 0], [1, 3]]))
    assert groups.group_indices(5).tolist() == [0, 1, -1, 1, 0]


def test_a_pair_is_found_by_its_sender_or_its_receiver() -> None:
    pairs = ProcessGroups("pp_next", np.array([[0, 1], [1, 2]]), ordered=True)
    assert pairs.group_indices(3, member_index=0).tolist() == [0, 1, -1]
    assert pairs.group_indices(3, member_index=1).tolist() == [-1, 0, 1]


def test_a_rank_takes_part_in_exchanges_of_its_tasks_and_inside_its_blocks() -> None:
    tag = Action(0, ActionKind.FORWARD, 0)
    does = (KERNEL, exchange("tp"), CommOverlap(exchange("cp"), KERNEL, 2))
    block = Segment("block", tuple(Operation(doe, WorkType.FORWARD) for doe in does))
    tasks = (
        ComputeTask(block),
        CollectiveTask(exchange("dp")),
        SendTask(exchange("pp_next"), tag),
        ReceiveTask(exchange("pp"), tag),
    )
    streams = (Stream.COMPUTE, Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE)
    assert RankProgram(tasks, streams).comm_ops == tuple(map(exchange, ("tp", "cp", "dp", "pp_next", "pp")))
    assert block.comm_ops == (exchange("tp"), exchange("cp"))


def test_blocks_are_shared_by_identity_and_not_by_what_they_hold() -> None:
    operations = (Operation(KERNEL, WorkType.FORWARD),)
    assert Segment("block", operations) != Segment("block", operations)


def test_actions_read_as_in_torch() -> None:
    assert str(Action(2, ActionKind.BACKWARD, 11)) == "2B11"
