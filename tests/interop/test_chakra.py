"""Chakra execution traces, read by Google's decoder: contents equal the program, dependencies are complete."""

from collections import Counter
from functools import cache
from math import ceil

import pytest

from clustersim.interop.chakra import ChakraWriter
from clustersim.interop.protobuf import encode_varint
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, SendTask
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TimeCategory
from tests.interop.execution_traces import COLLECTIVE, COMPUTE, LOAD, RECEIVE, SEND, STORE, DecodedNode, decode, replay
from tests.report.small_trace import simulated

UNCONTENDED = ("cost.interference=0", "cost.network=uncontended")
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
SHARDED_COLLECTIVES = (CollectiveType.ALL_GATHER, CollectiveType.SHIFT, CollectiveType.SCATTER, CollectiveType.GATHER)
GPU_CATEGORIES = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.LAUNCH,
    TimeCategory.SLOWED,
)
MOE = ("model=mixtral-8x22b", "model.layers=2", "layout={dp: 8, ep: 8}", "training.global_batch=8")
OFFLOADED = ("layout={dp: 8, data: fsdp}", "training.offload={activations: {layers: 1}, optimizer: 50 %}")


@cache
def export_and_decode(*overrides: str) -> tuple[SimulationResult, dict[int, list[int]], list[list[DecodedNode]]]:
    result = simulated(*overrides)
    writer = ChakraWriter(result)
    decoded = [decode(writer.encode_rank(rank)) for rank in range(result.rank_count)]
    assert {version for version, _ in decoded} == {"0.0.4"}
    return result, writer.ranks_by_group_id, [nodes for _, nodes in decoded]


@pytest.mark.parametrize("case", CASES)
def test_kernels_of_a_rank_sum_to_its_compute_time(case: str) -> None:
    result, _, ranks = export_and_decode(*CASES[case])
    for rank, nodes in enumerate(ranks):
        categories = result.breakdown.rank_seconds(rank)
        expected = 1e6 * result.scenario.steps * sum(categories[category.value] for category in GPU_CATEGORIES)
        assert sum(node.duration for node in nodes if node.type == COMPUTE) == pytest.approx(
            expected, abs=1.0, rel=1e-5
        )


@pytest.mark.parametrize("case", CASES)
def test_nodes_depend_on_earlier_nodes_only(case: str) -> None:
    """So nothing waits for itself, however many nodes lie between."""
    for nodes in export_and_decode(*CASES[case])[2]:
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert all(dep < node.id for node in nodes for dep in node.deps)
        assert all(len(set(node.deps)) == len(node.deps) for node in nodes)


@pytest.mark.parametrize("case", CASES)
def test_members_of_a_group_agree_on_their_collectives(case: str) -> None:
    """The same number, kinds and sizes, in the same order; and every group that is named has its members."""
    _, groups, ranks = export_and_decode(*CASES[case])
    calls: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.type == COLLECTIVE:
                rank_calls = calls.setdefault(int(node.attr["pg_name"]), {}).setdefault(rank, [])
                rank_calls.append((node.attr["comm_type"], node.attr["comm_size"]))
    assert 0 not in groups
    for group, by_rank in calls.items():
        assert sorted(by_rank) == sorted(groups[group])
        assert len({tuple(sizes) for sizes in by_rank.values()}) == 1


@pytest.mark.parametrize("case", CASES)
def test_every_sent_message_is_received(case: str) -> None:
    """Each message once, by the rank that it is for, with its tag and size."""
    sent, received = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for rank, nodes in enumerate(export_and_decode(*CASES[case])[2]):
        for node in nodes:
            if node.type in (SEND, RECEIVE):
                key = tuple(node.attr[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                (sent if node.type == SEND else received)[key] += 1
                assert key[node.type != SEND] == rank
    assert sent == received
    assert set(sent.values()) <= {1}


@pytest.mark.parametrize("case", CASES)
def test_payloads_are_those_of_the_program(case: str) -> None:
    """For an exported all-gather the rank's shard, as ASTRA-sim counts it, otherwise the full payload; rounded up."""
    result, _, ranks = export_and_decode(*CASES[case])
    for rank, nodes in enumerate(ranks):
        expected: Counter[int] = Counter()
        for task in result.program.programs[int(result.program.program_index[rank])].tasks:
            segment_comm_ops = task.segment.comm_ops if isinstance(task, ComputeTask) else ()
            task_comm_ops = (task.comm_op,) if isinstance(task, (CollectiveTask, SendTask)) else ()
            for comm_op in (*segment_comm_ops, *task_comm_ops):
                size = result.program.groups[comm_op.comm_group].members.shape[1]
                expected[
                    ceil(comm_op.payload / size if comm_op.collective in SHARDED_COLLECTIVES else comm_op.payload)
                ] += 1
        assert Counter(node.attr["comm_size"] for node in nodes if node.type in (COLLECTIVE, SEND)) == expected


@pytest.mark.parametrize("case", CASES)
def test_replay_with_the_same_durations_gives_the_same_step(case: str) -> None:
    """So no dependency is missing, and none is superfluous. Durations are whole microseconds."""
    result, groups, ranks = export_and_decode(*UNCONTENDED, *CASES[case])
    assert replay(ranks, groups) == pytest.approx(1e6 * result.trace.makespan, rel=5e-4)


def test_replay_without_receives_is_faster() -> None:
    """Control for the replayer: a rank that waits for no message is done earlier."""
    result, groups, ranks = export_and_decode(*UNCONTENDED)
    received = [{node.id for node in nodes if node.type == RECEIVE} for nodes in ranks]
    without_receives = [
        [
            DecodedNode(
                node.id,
                node.name,
                node.type,
                [dep for dep in node.deps if dep not in received_ids],
                node.duration,
                node.attr,
            )
            for node in nodes
        ]
        for nodes, received_ids in zip(ranks, received, strict=True)
    ]
    assert replay(without_receives, groups) < 0.95e6 * result.trace.makespan


def test_compute_nodes_have_flop_and_bytes() -> None:
    """ASTRA-sim's roofline takes FLOP / min(bandwidth x FLOP / bytes, peak), of no FLOP 0 / 0, where it stops.

    It should take the larger one of FLOP / peak and bytes / bandwidth of each kernel.
    """
    result, _, ranks = export_and_decode()
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
    seconds = [
        node.attr["num_ops"] / min(bandwidth * node.attr["num_ops"] / node.attr["tensor_size"], peak) for node in nodes
    ]
    assert any(kernel.flops == 0 for kernel in kernels)
    assert seconds == pytest.approx(expected, rel=1e-6)
    assert not any(node.attr["is_cpu_op"] for node in nodes)


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_supported_by_astra_sim(case: str) -> None:
    """All-reduce (0), all-gather (2), broadcast (5), all-to-all (6), reduce-scatter (7). Of no bytes, none ends."""
    for nodes in export_and_decode(*CASES[case])[2]:
        assert {node.attr["comm_type"] for node in nodes if node.type == COLLECTIVE} <= {0, 2, 5, 6, 7}
        assert all(node.attr["comm_size"] > 0 for node in nodes if node.type in (COLLECTIVE, SEND))


def test_torch_data_parallel_scatters_shards_and_reduces_full_gradients() -> None:
    """What crosses each link of a ring is what the one rank sends or receives: n - 1 shards of n."""
    result, _, ranks = export_and_decode(*CASES["one process"])
    collectives = [node for node in ranks[0] if node.type == COLLECTIVE]
    types = {node.name: (node.attr["comm_type"], node.attr["comm_size"]) for node in collectives}
    payloads = {comm_op.name: comm_op.payload for comm_op in result.program.comm_ops}
    assert types["scatter tokens"] == (2, ceil(payloads["scatter tokens"] / 8))
    assert types["gather logits"] == (2, ceil(payloads["gather logits"] / 8))
    assert types["reduce gradients"] == (7, ceil(payloads["reduce gradients"]))


def test_host_copies_are_stores_and_loads() -> None:
    _, _, ranks = export_and_decode(*OFFLOADED)
    (nodes,) = ranks[:1]
    stored = [node.attr["tensor_size"] for node in nodes if node.type == STORE]
    loaded = [node.attr["tensor_size"] for node in nodes if node.type == LOAD]
    assert stored
    assert loaded
    hosts = [node for node in nodes if node.attr["is_cpu_op"]]
    assert hosts
    assert all(node.type == COMPUTE and node.duration > 0 for node in hosts)


def test_experts_use_all_to_all_and_singleton_groups_are_omitted() -> None:
    result, groups, ranks = export_and_decode(*UNCONTENDED, *MOE)
    types = Counter(node.attr["comm_type"] for node in ranks[0] if node.type == COLLECTIVE)
    assert types[6] > 0
    assert any(group.members.shape[1] == 1 for group in result.program.groups.values())
    assert min(map(len, groups.values())) > 1
    assert replay(ranks, groups) == pytest.approx(1e6 * result.trace.makespan, rel=5e-4)


CONTENDED = ("cost.network=shared", "degradations.traffic={gpus: [0, 7], bytes: 1 MB}")


@pytest.mark.parametrize(
    ("overrides", "expected_words"),
    [
        ((), []),
        (MOE, []),
        ((*MOE, "layout.dispatcher=deepep"), ["all-to-all"]),
        (CASES["context"], ["all-gather"]),
        (CASES["one process"], ["reduce-scatter", "broadcasts"]),
        (CASES["framework"], ["broadcasts"]),
        (("degradations.nics={gpu: 0, bandwidth: 50 %}",), ["slow or dead"]),
        (CONTENDED, ["others send"]),
        (("degradations.slow={gpu: 0, speed: 0.5}",), []),
    ],
)
def test_unexported_effects_are_remarked(overrides: tuple[str, ...], expected_words: list[str]) -> None:
    """A slow GPU is in its kernels' durations."""
    remarks = ChakraWriter(simulated(*overrides)).approximations
    assert len(remarks) == len(expected_words)
    assert all(word in remark for word, remark in zip(expected_words, remarks, strict=True))


@pytest.mark.parametrize(("value", "expected"), [(0, b"\x00"), (1, b"\x01"), (127, b"\x7f"), (300, b"\xac\x02")])
def test_varints_follow_the_protobuf_specification(value: int, expected: bytes) -> None:
    assert encode_varint(value) == expected
