"""Programs: group membership of ranks, and the communication operations of a rank."""

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


def make_comm_op(comm_group: str) -> CommOp:
    return CommOp(comm_group, CollectiveType.ALL_REDUCE, comm_group, 1.0)


def test_a_rank_has_at_most_one_group_of_a_type() -> None:
    groups = ProcessGroups("dp", np.array([[4, 0], [1, 3]]))
    assert groups.group_indices(5).tolist() == [0, 1, -1, 1, 0]


def test_a_pair_is_looked_up_by_sender_or_receiver() -> None:
    pairs = ProcessGroups("pp_next", np.array([[0, 1], [1, 2]]), ordered=True)
    assert pairs.group_indices(3, member_index=0).tolist() == [0, 1, -1]
    assert pairs.group_indices(3, member_index=1).tolist() == [-1, 0, 1]


def test_comm_ops_of_a_rank_include_tasks_and_segments() -> None:
    tag = Action(0, ActionKind.FORWARD, 0)
    bodies = (KERNEL, make_comm_op("tp"), CommOverlap(make_comm_op("cp"), KERNEL, 2))
    segment = Segment("block", tuple(Operation(body, WorkType.FORWARD) for body in bodies))
    tasks = (
        ComputeTask(segment),
        CollectiveTask(make_comm_op("dp")),
        SendTask(make_comm_op("pp_next"), tag),
        ReceiveTask(make_comm_op("pp"), tag),
    )
    streams = (Stream.COMPUTE, Stream.DP, Stream.SEND_NEXT, Stream.RECEIVE)
    assert RankProgram(tasks, streams).comm_ops == tuple(map(make_comm_op, ("tp", "cp", "dp", "pp_next", "pp")))
    assert segment.comm_ops == (make_comm_op("tp"), make_comm_op("cp"))


def test_segments_compare_by_identity() -> None:
    operations = (Operation(KERNEL, WorkType.FORWARD),)
    assert Segment("block", operations) != Segment("block", operations)


def test_actions_read_as_in_torch() -> None:
    assert str(Action(2, ActionKind.BACKWARD, 11)) == "2B11"
