"""Every send has its receive, and members of a group issue the same collectives in the same order."""

from collections.abc import Iterator

from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import CommOp, ComputeTask, ReceiveTask, SendTask
from tests.conftest import examples
from tests.strategies import scenarios


def program_of_scenario(scenario: Scenario) -> Program:
    return simulate(scenario).program


def program_of(program: Program, rank: int) -> RankProgram:
    return program.programs[int(program.program_index[rank])]


def messages(
    program: RankProgram, kind: type[SendTask] | type[ReceiveTask], comm_group: str
) -> list[tuple[str, float]]:
    """Sorted (tag, payload) of what a rank sends to, or receives from, the other end of its pair."""
    tasks = [task for task in program.tasks if isinstance(task, kind) and task.comm_op.comm_group == comm_group]
    return sorted((str(task.tag), task.comm_op.payload) for task in tasks)


def issued_collectives(program: RankProgram, comm_group: str) -> list[CommOp]:
    """Collectives of one kind of group in the order in which the rank issues them."""
    return [comm_op for comm_op in _comm_ops(program) if comm_op.comm_group == comm_group]


def _comm_ops(program: RankProgram) -> Iterator[CommOp]:
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from task.segment.comm_ops
        elif not isinstance(task, SendTask | ReceiveTask):
            yield task.comm_op


@given(scenarios())
@examples(100)
def test_every_message_is_received_once_with_its_tag_and_bytes(scenario: Scenario) -> None:
    program = program_of_scenario(scenario)
    for comm_group, groups in program.groups.items():
        if not groups.ordered:
            continue
        for sender, receiver in groups.members.tolist():
            sent = messages(program_of(program, sender), SendTask, comm_group)
            assert sent == messages(program_of(program, receiver), ReceiveTask, comm_group)
            assert len({tag for tag, _ in sent}) == len(sent)


@given(scenarios())
@examples(100)
def test_no_rank_sends_outside_of_its_pairs(scenario: Scenario) -> None:
    program = program_of_scenario(scenario)
    for comm_group, groups in program.groups.items():
        ends = groups.members.T.tolist() if groups.ordered else [[], []]
        for rank in range(program.world_size):
            for kind, pairs in zip((SendTask, ReceiveTask), ends, strict=True):
                assert rank in pairs or not messages(program_of(program, rank), kind, comm_group)


@given(scenarios())
@examples(100)
def test_members_of_a_group_issue_the_same_collectives_in_the_same_order(scenario: Scenario) -> None:
    program = program_of_scenario(scenario)
    for comm_group, groups in program.groups.items():
        if groups.ordered:
            continue
        for members in groups.members.tolist():
            first, *others = (issued_collectives(program_of(program, rank), comm_group) for rank in members)
            assert all(other == first for other in others), comm_group


@given(scenarios())
@examples(100)
def test_ranks_outside_all_groups_of_a_kind_issue_no_collective_of_it(scenario: Scenario) -> None:
    program = program_of_scenario(scenario)
    for comm_group, groups in program.groups.items():
        outside = set(range(program.world_size)) - set(groups.members.ravel().tolist())
        assert not any(
            issued_collectives(program_of(program, rank), comm_group) for rank in outside if not groups.ordered
        )
