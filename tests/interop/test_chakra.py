"""Execution traces, read by Google's decoder: ranks do what the program says, and wait for all that they must."""

from collections import Counter
from functools import cache
from math import ceil

import pytest

from clustersim.interop.chakra import ChakraWriter
from clustersim.interop.protobuf import encode_varint
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, SendTask
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TimeCategory
from tests.interop.execution_traces import COLLECTIVE, COMPUTE, LOAD, RECEIVE, SEND, STORE, Decoded, decode, played
from tests.report.small_trace import simulated

ALONE = ("cost.interference=0", "cost.network=uncontended")
ONE_STAGE = ("layout.pp=1", "layout.dp=4")
CASES = {
    "1f1b": (),
    "interleaved": ("schedule.interleaved.chunks=2",),
    "zero bubble": ("schedule=zb-1p",),
    "deep": ("layout.tp=1", "layout.dp=1", "layout.pp=8", "training.global_batch=16"),
    "sharded": (*ONE_STAGE, "layout.data=zero3"),
    "sequence": ("layout.sequence_parallel=true",),
    "context": ("layout.cp=2", "layout.dp=1"),
    "two steps": ("steps=2",),
    "one process": ("layout={dp: 8, data: data_parallel}",),
    "framework": ("framework=megatron",),
}
PARTS = (CollectiveType.ALL_GATHER, CollectiveType.SHIFT, CollectiveType.SCATTER, CollectiveType.GATHER)
GPU_PARTS = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.LAUNCH,
    TimeCategory.SLOWED,
)
EXPERTS = ("model=mixtral-8x22b", "model.layers=2", "layout={dp: 8, ep: 8}", "training.global_batch=8")
OFFLOADED = ("layout={dp: 8, data: fsdp}", "training.offload={activations: {layers: 1}, optimizer: 50 %}")


@cache
def written(*overrides: str) -> tuple[SimulationResult, dict[int, list[int]], list[list[Decoded]]]:
    result = simulated(*overrides)
    writer = ChakraWriter(result)
    decoded = [decode(writer.encode_rank(rank)) for rank in range(result.rank_count)]
    assert {version for version, _ in decoded} == {"0.0.4"}
    return result, writer.ranks_by_group_id, [nodes for _, nodes in decoded]


@pytest.mark.parametrize("case", CASES)
def test_kernels_of_a_rank_sum_to_what_it_computes(case: str) -> None:
    result, _, ranks = written(*CASES[case])
    for rank, nodes in enumerate(ranks):
        parts = result.breakdown.rank_seconds(rank)
        expected = 1e6 * result.scenario.steps * sum(parts[part.value] for part in GPU_PARTS)
        assert sum(node.lasting for node in nodes if node.type == COMPUTE) == pytest.approx(expected, abs=1.0, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_nodes_wait_for_earlier_ones_only(case: str) -> None:
    """So nothing waits for itself, however many nodes lie between."""
    for nodes in written(*CASES[case])[2]:
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert all(dep < node.id for node in nodes for dep in node.deps)
        assert all(len(set(node.deps)) == len(node.deps) for node in nodes)


@pytest.mark.parametrize("case", CASES)
def test_members_of_a_group_agree_on_their_collectives(case: str) -> None:
    """The same number, kinds and sizes, in the same order; and every group that is named has its members."""
    _, groups, ranks = written(*CASES[case])
    called: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.type == COLLECTIVE:
                own = called.setdefault(int(node.attr["pg_name"]), {}).setdefault(rank, [])
                own.append((node.attr["comm_type"], node.attr["comm_size"]))
    assert 0 not in groups
    for group, by_rank in called.items():
        assert sorted(by_rank) == sorted(groups[group])
        assert len({tuple(sizes) for sizes in by_rank.values()}) == 1


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_received(case: str) -> None:
    """Each message once, by the rank that it is for, with its tag and size."""
    sent, received = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for rank, nodes in enumerate(written(*CASES[case])[2]):
        for node in nodes:
            if node.type in (SEND, RECEIVE):
                key = tuple(node.attr[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                (sent if node.type == SEND else received)[key] += 1
                assert key[node.type != SEND] == rank
    assert sent == received
    assert set(sent.values()) <= {1}


@pytest.mark.parametrize("case", CASES)
def test_what_each_rank_puts_in_is_the_program_s(case: str) -> None:
    """Of what is written as an all-gather its own part, as ASTRA-sim counts it, of all else the whole; rounded up."""
    result, _, ranks = written(*CASES[case])
    for rank, nodes in enumerate(ranks):
        expected: Counter[int] = Counter()
        for task in result.program.programs[int(result.program.program_index[rank])].tasks:
            inside = task.segment.comm_ops if isinstance(task, ComputeTask) else ()
            outside = (task.comm_op,) if isinstance(task, (CollectiveTask, SendTask)) else ()
            for exchange in (*inside, *outside):
                size = result.program.groups[exchange.group].members.shape[1]
                expected[ceil(exchange.payload / size if exchange.collective in PARTS else exchange.payload)] += 1
        assert Counter(node.attr["comm_size"] for node in nodes if node.type in (COLLECTIVE, SEND)) == expected


@pytest.mark.parametrize("case", CASES)
def test_played_with_the_same_durations_they_take_the_same_step(case: str) -> None:
    """So nothing that a node waits for is missing, and nothing is too much. Durations are whole microseconds."""
    result, groups, ranks = written(*ALONE, *CASES[case])
    assert played(ranks, groups) == pytest.approx(1e6 * result.trace.makespan, rel=5e-4)


def test_without_what_they_wait_for_they_take_less() -> None:
    """The player tells: a rank that waits for no message is done earlier."""
    result, groups, ranks = written(*ALONE)
    received = [{node.id for node in nodes if node.type == RECEIVE} for nodes in ranks]
    loose = [
        [
            Decoded(
                node.id, node.name, node.type, [dep for dep in node.deps if dep not in own], node.lasting, node.attr
            )
            for node in nodes
        ]
        for nodes, own in zip(ranks, received, strict=True)
    ]
    assert played(loose, groups) < 0.95e6 * result.trace.makespan


def test_a_kernel_says_its_flop_and_its_bytes() -> None:
    """ASTRA-sim's roofline takes FLOP / min(bandwidth x FLOP / bytes, peak), of no FLOP 0 / 0, where it stops.

    It should take the larger one of FLOP / peak and bytes / bandwidth of each kernel.
    """
    result, _, ranks = written()
    kernels = [
        operation.kernel
        for task in result.program.programs[int(result.program.program_index[0])].tasks
        if isinstance(task, ComputeTask)
        for operation in task.segment.operations
        if operation.kernel is not None
    ]
    nodes = [node for node in ranks[0] if node.type == COMPUTE]
    peak, bandwidth = 1e15, 3e12
    expected = [max(kernel.flops / peak, kernel.bytes / bandwidth) for kernel in kernels]
    found = [
        node.attr["num_ops"] / min(bandwidth * node.attr["num_ops"] / node.attr["tensor_size"], peak) for node in nodes
    ]
    assert any(kernel.flops == 0 for kernel in kernels)
    assert found == pytest.approx(expected, rel=1e-6)
    assert not any(node.attr["is_cpu_op"] for node in nodes)


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_such_as_astra_sim_runs(case: str) -> None:
    """All-reduce (0), all-gather (2), broadcast (5), all-to-all (6), reduce-scatter (7). Of no bytes, none ends."""
    for nodes in written(*CASES[case])[2]:
        assert {node.attr["comm_type"] for node in nodes if node.type == COLLECTIVE} <= {0, 2, 5, 6, 7}
        assert all(node.attr["comm_size"] > 0 for node in nodes if node.type in (COLLECTIVE, SEND))


def test_one_process_scatters_and_gathers_parts_and_reduces_the_whole() -> None:
    """What goes over each link of a ring is what the one rank sends or gets: n - 1 parts of n."""
    result, _, ranks = written(*CASES["one process"])
    collectives = [node for node in ranks[0] if node.type == COLLECTIVE]
    types = {node.name: (node.attr["comm_type"], node.attr["comm_size"]) for node in collectives}
    whole = {comm_op.name: comm_op.payload for comm_op in result.program.comm_ops}
    assert types["scatter tokens"] == (2, ceil(whole["scatter tokens"] / 8))
    assert types["gather logits"] == (2, ceil(whole["gather logits"] / 8))
    assert types["reduce gradients"] == (7, ceil(whole["reduce gradients"]))


def test_what_goes_to_the_host_is_stored_and_loaded() -> None:
    _, _, ranks = written(*OFFLOADED)
    (nodes,) = ranks[:1]
    stored = [node.attr["tensor_size"] for node in nodes if node.type == STORE]
    loaded = [node.attr["tensor_size"] for node in nodes if node.type == LOAD]
    assert stored
    assert loaded
    hosts = [node for node in nodes if node.attr["is_cpu_op"]]
    assert hosts
    assert all(node.type == COMPUTE and node.lasting > 0 for node in hosts)


def test_experts_exchange_all_to_all_and_a_rank_alone_exchanges_nothing() -> None:
    result, groups, ranks = written(*ALONE, *EXPERTS)
    types = Counter(node.attr["comm_type"] for node in ranks[0] if node.type == COLLECTIVE)
    assert types[6] > 0
    assert any(group.members.shape[1] == 1 for group in result.program.groups.values())
    assert min(map(len, groups.values())) > 1
    assert played(ranks, groups) == pytest.approx(1e6 * result.trace.makespan, rel=5e-4)


SHARED = ("cost.network=shared", "disturbances.traffic={gpus: [0, 7], bytes: 1 MB}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), []),
        (EXPERTS, []),
        ((*EXPERTS, "layout.dispatcher=deepep"), ["all-to-all"]),
        (CASES["context"], ["all-gather"]),
        (CASES["one process"], ["reduce-scatter", "broadcasts"]),
        (CASES["framework"], ["broadcasts"]),
        (("disturbances.nics={gpu: 0, bandwidth: 50 %}",), ["slow or dead"]),
        (SHARED, ["others send"]),
        (("disturbances.slow={gpu: 0, speed: 0.5}",), []),
    ],
)
def test_what_the_traces_do_not_say_is_said(overrides: tuple[str, ...], words: list[str]) -> None:
    """A GPU that is slow is so in its kernels' durations."""
    remarks = ChakraWriter(simulated(*overrides)).approximations
    assert len(remarks) == len(words)
    assert all(word in remark for word, remark in zip(words, remarks, strict=True))


@pytest.mark.parametrize(("value", "expected"), [(0, b"\x00"), (1, b"\x01"), (127, b"\x7f"), (300, b"\xac\x02")])
def test_whole_numbers_are_as_the_format_s_manual_has_them(value: int, expected: bytes) -> None:
    assert encode_varint(value) == expected
