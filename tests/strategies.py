"""Random programs and random scenarios, small enough to be simulated rank by rank."""

from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from clustersim import Scenario
from clustersim.common.arrays import FloatArray
from clustersim.common.dtypes import DType
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.segment import SegmentCost
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import ProcessGroups, Program, RankProgram
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
    Task,
    WorkType,
)
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.symmetry.refinement import SymmetryClasses, symmetry_classes
from tests.engine.fake_costs import UnitCost

SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
"""Few and dyadic: ties are common, and sums are exact."""

COLLECTIVES = st.sampled_from([CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER])
KERNEL_KINDS = st.sampled_from([KernelKind.MATMUL, KernelKind.ATTENTION_FORWARD, KernelKind.NORM])
"""One kernel kind of each class with its own interference level."""

SYNC_GROUPS = ("dp", "tp", "model")
"""Replicas of a kind; pairs of them, grouped differently for every kind; all kinds of one replica."""


@dataclass
class _RankBuilder:
    """Collects the tasks of one kind of rank."""

    tasks: list[Task] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def add(self, stream: Stream, task: Task) -> None:
        self.tasks.append(task)
        self.streams.append(stream)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to three kinds of ranks, each in several replicas.

    Tasks are issued in one global order, so none deadlock.

    Rank = replica * kinds + kind.
    """
    kind_count, replica_count = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    builders = [_RankBuilder() for _ in range(kind_count)]
    for microbatch in range(draw(st.integers(1, 10))):
        _add_random_task(draw, builders, microbatch)
    rank_programs = tuple(RankProgram(tuple(rank.tasks), tuple(rank.streams)) for rank in builders)
    program_index = np.tile(np.arange(kind_count), replica_count)
    used_groups = {comm_op.comm_group for rank_program in rank_programs for comm_op in rank_program.comm_ops}
    groups = {
        comm_group: group
        for comm_group, group in _process_groups(draw, kind_count, replica_count).items()
        if comm_group in used_groups
    }
    return Program(rank_programs, program_index, groups)


def _add_random_task(draw: st.DrawFn, builders: list[_RankBuilder], microbatch: int) -> None:
    """Add a task to one kind of rank, to a pair of adjacent kinds, or to all."""
    index = draw(st.integers(0, len(builders) - 1))
    task_kind = draw(st.sampled_from(["compute", "dp", "experts", "model", "message", "message"]))
    if task_kind == "compute":
        depends_on = _random_dependencies(draw, builders[index])
        builders[index].add(Stream.COMPUTE, ComputeTask(draw(_segments()), depends_on))
    elif task_kind == "dp":
        comm_op = CommOp("reduce", draw(COLLECTIVES), "dp", draw(SECONDS))
        builders[index].add(Stream.DP, CollectiveTask(comm_op, _random_dependencies(draw, builders[index])))
    elif task_kind == "experts":
        comm_op = CommOp("tokens", CollectiveType.ALL_TO_ALL, "tp", draw(SECONDS))
        builders[index].add(Stream.EP, CollectiveTask(comm_op, _random_dependencies(draw, builders[index])))
    elif task_kind == "model":
        comm_op = CommOp("norm", CollectiveType.ALL_REDUCE, "model", draw(SECONDS))
        for rank in builders:
            rank.add(Stream.DP, CollectiveTask(comm_op, _random_dependencies(draw, rank)))
    elif len(builders) > 1:
        _add_message(draw, builders, microbatch)


def _add_message(draw: st.DrawFn, builders: list[_RankBuilder], microbatch: int) -> None:
    lower = draw(st.integers(0, len(builders) - 2))
    forward = draw(st.booleans())
    source, target = (lower, lower + 1) if forward else (lower + 1, lower)
    comm_group, stream = ("pp_next", Stream.SEND_NEXT) if forward else ("pp_previous", Stream.SEND_PREVIOUS)
    comm_op = CommOp("message", CollectiveType.SEND_RECV, comm_group, draw(SECONDS))
    tag = Action(target, ActionKind.FORWARD, microbatch)
    builders[source].add(stream, SendTask(comm_op, tag, _random_dependencies(draw, builders[source])))
    builders[target].add(Stream.RECEIVE, ReceiveTask(comm_op, tag))


def _random_dependencies(draw: st.DrawFn, builder: _RankBuilder) -> tuple[int, ...]:
    if not builder.tasks:
        return ()
    return tuple(draw(st.lists(st.integers(0, len(builder.tasks) - 1), max_size=2, unique=True)))


def _segments() -> st.SearchStrategy[Segment]:
    kernel = st.builds(Kernel, st.just("kernel"), KERNEL_KINDS, st.just(DType.BF16), flops=SECONDS, bytes=st.just(0.0))
    comm_op = SECONDS.map(lambda seconds: CommOp("gather", CollectiveType.ALL_GATHER, "tp", seconds))
    overlap = st.builds(CommOverlap, comm_op, kernel, st.sampled_from([1.0, 2.0, 4.0, inf]), st.booleans())
    operations = st.lists(kernel | kernel | comm_op | overlap, min_size=1, max_size=4)
    return operations.map(lambda bodies: Segment("block", tuple(Operation(doe, WorkType.FORWARD) for doe in bodies)))


def _process_groups(draw: st.DrawFn, kind_count: int, replica_count: int) -> dict[str, ProcessGroups]:
    grid = np.arange(kind_count * replica_count).reshape(replica_count, kind_count)
    size = 2 if replica_count % 2 == 0 else 1
    tp_groups = [
        np.array(draw(st.permutations(grid[:, kind].tolist()))).reshape(-1, size) for kind in range(kind_count)
    ]
    pairs = np.stack([grid[:, :-1].reshape(-1), grid[:, 1:].reshape(-1)], axis=1)
    return {
        "dp": ProcessGroups("dp", np.ascontiguousarray(grid.T)),
        "tp": ProcessGroups("tp", np.concatenate(tp_groups)),
        "model": ProcessGroups("model", grid),
        "pp_next": ProcessGroups("pp_next", pairs, ordered=True),
        "pp_previous": ProcessGroups("pp_previous", np.ascontiguousarray(pairs[:, ::-1]), ordered=True),
    }


@st.composite
def unit_costs(draw: st.DrawFn, program: Program) -> UnitCost:
    """Unit costs; some comm groups have a group or two that are slower than the others."""
    slowdowns = {}
    for comm_group, groups in program.groups.items():
        factors = st.sampled_from([1.0, 1.0, 1.0, 2.0])
        count = len(groups.members)
        slowdowns[comm_group] = draw(st.just([1.0] * count) | st.lists(factors, min_size=count, max_size=count))
    return UnitCost(program, slowdowns)


@st.composite
def costed_programs(draw: st.DrawFn) -> UnitCost:
    """A random program with its costs."""
    return draw(unit_costs(draw(programs())))


@st.composite
def _interference_tables(draw: st.DrawFn) -> Interference:
    """An independent level for every kernel class overlapped with every collective type, and the reverse."""
    pairs = [(kind, kernel_class) for kind in CollectiveType for kernel_class in KernelClass]
    levels = st.fixed_dictionaries({pair: st.sampled_from([0.0, 0.25, 0.5, 1.0]) for pair in pairs})
    return Interference(draw(levels), draw(levels))


INTERFERENCES = st.sampled_from([0.0, 0.5]).map(Interference.uniform) | _interference_tables()


def fold_ranks(program: Program, cost: SegmentCost) -> SymmetryClasses:
    """Symmetry classes of the ranks that run the same at these costs."""
    seconds: dict[str, list[FloatArray]] = {comm_group: [] for comm_group in program.groups}
    for comm_op in sorted(
        {comm_op for rank_program in program.programs for comm_op in rank_program.comm_ops}, key=repr
    ):
        seconds[comm_op.comm_group].append(cost.comm_timing_by_group(comm_op).seconds)
    costs = {comm_group: np.stack(columns, axis=1) for comm_group, columns in seconds.items()}
    return symmetry_classes(program, costs, device_model=cost.device_models.index_of_rank)


CLUSTERS: dict[str, dict[str, Any]] = {
    "one domain": {"name": "dgx-h100"},
    "cards": {"name": "pcie-node"},
    "one switch": {
        "name": "llama3-roce",
        "node": {"gpus": 2, "nvlink": {"gpus": 2}, "nic": {"per_node": 2}},
        "fabric": {"leaf": {"nodes": 8}},
    },
    "racks": {
        "name": "llama3-roce",
        "node": {"gpus": 2, "nvlink": {"gpus": 2}, "nic": {"per_node": 2}},
        "fabric": {"leaf": {"nodes": 2}, "spine": {"units": 2}, "core": {"pods": 2}},
    },
}
DEGREES = [
    dict(zip(("tp", "cp", "pp", "dp"), degrees, strict=True))
    for degrees in product([1, 2], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4])
]
SINGLE_NODE = ("one domain", "cards")
"""Clusters with four GPUs in one node; the others have nodes of two."""
LEGAL_DEGREES = {
    "one domain": [item for item in DEGREES if prod(item.values()) in {*range(2, 9), 16}],
    "cards": [element for element in DEGREES if prod(element.values()) in range(2, 9)],
    "one switch": [entry for entry in DEGREES if prod(entry.values()) in range(2, 17, 2)],
    "racks": [degrees for degrees in DEGREES if prod(degrees.values()) in range(2, 17, 2)],
}
STRATEGIES: list[str | dict[str, Any]] = [
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    {"ddp": {"overlap": False}},
    {"ddp": {"bucket": "64 KiB"}},
    {"zero": {"stage": 1, "overlap": False}},
    {"zero": {"stage": 1, "bucket": "64 KiB"}},
    {"zero": {"stage": 2, "bucket": "64 KiB"}},
    {"zero": {"stage": 2, "overlap": False}},
    {"fsdp": {"prefetch": 0}},
    {"fsdp": {"prefetch": 3, "reshard_after_forward": False}},
    {"fsdp": {"copies": False}},
    {"fsdp": {"reshard_after_forward": True, "reduce": "every_microbatch"}},
    {"zero": {"stage": 2, "reduce": "last_microbatch"}},
    {"ddp": {"bucket": "megatron"}},
]
HYBRID: list[dict[str, Any]] = [
    {"hsdp": {}},
    {"hsdp": {"all_reduce": "last_microbatch", "prefetch": 0}},
    {"zero": {"stage": 1}},
    {"zero": {"stage": 3}},
]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v", "bfs"]
FRAMEWORKS = ["pytorch", "megatron", "nemo", "megatron-2021", "megatron-2022", "megatron-deepspeed"]
PRECISIONS: list[str | dict[str, Any]] = [
    "bf16",
    "bf16",
    "fp8",
    "fp8-current",
    "fp8-tensorwise",
    {"compute": "fp8", "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
    {"compute": "fp8", "stored": "fp8", "dispatched": "fp8"},
    {"compute": "fp8-tensorwise", "gathered": "fp8"},
]
RECOMPUTES = ["none", "selective", "selective_op", "dots_with_no_batch_dims_saveable", "full", {"layers": 1}]


def default_schedule(chunks: int) -> Schedule:
    """1F1B, interleaved where ranks hold several chunks."""
    return OneFOneB() if chunks == 1 else Interleaved(chunks)


@st.composite
def mappings(draw: st.DrawFn, cluster: str | None = None) -> dict[str, Any]:
    """Mapping of a scenario of 2 to 16 GPUs."""
    cluster_kind = draw(st.sampled_from(sorted(CLUSTERS))) if cluster is None else cluster
    degrees = draw(st.sampled_from(LEGAL_DEGREES[cluster_kind]))
    schedule = draw(st.sampled_from(SCHEDULES if degrees["pp"] > 1 else ["gpipe", "1f1b"]))
    rounds = draw(st.integers(1, 2)) * degrees["pp"] if schedule == "interleaved" else draw(st.integers(1, 4))
    layout = {**degrees, **draw(_layouts())}
    if degrees["dp"] % 2 == 0 and draw(st.booleans()):
        ((name, options),) = draw(st.sampled_from(HYBRID)).items()
        layout["data"] = {name: {**options, "shard": degrees["cp"] * degrees["dp"] // 2}}
    if (
        degrees["dp"] == prod(degrees.values())
        and (degrees["dp"] == 2 or cluster_kind in SINGLE_NODE)
        and draw(st.booleans())
    ):
        layout["data"] = "data_parallel"
    model = draw(_models())
    if layout["data"] != "data_parallel" and draw(st.booleans()):
        model["experts"] = draw(_moe())
        layout |= draw(_expert_layouts(degrees, hybrid=_is_hybrid(layout["data"])))
    return {
        "model": model,
        "cluster": {**CLUSTERS[cluster_kind], "gpus": prod(degrees.values())},
        "layout": layout,
        "schedule": schedule,
        "framework": draw(st.sampled_from(FRAMEWORKS)),
        "training": {
            "sequence": 128,
            "global_batch": degrees["dp"] * rounds,
            "recompute": draw(st.sampled_from(RECOMPUTES)),
            "precision": draw(st.sampled_from(PRECISIONS)) if cluster_kind != "cards" else "bf16",
        },
    }


def _is_hybrid(data: str | dict[str, Any]) -> bool:
    """Whether weights are sharded over a subset of the replicas."""
    return isinstance(data, dict) and any("shard" in options for options in data.values())


def scenarios(cluster: str | None = None) -> st.SearchStrategy[Scenario]:
    """Legal scenarios of 2 to 16 GPUs."""
    return mappings(cluster).map(Scenario.from_mapping)


@st.composite
def _models(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "family": draw(st.sampled_from(["llama", "gpt"])),
        "layers": draw(st.integers(8, 10)),
        "hidden": 64,
        "heads": 4,
        "kv_heads": draw(st.sampled_from([2, 4])),
        "ffn": 128,
        "vocab": 256,
        "tied_embeddings": draw(st.booleans()),
    }


@st.composite
def _moe(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "count": 4,
        "top_k": draw(st.integers(1, 3)),
        "ffn": 128,
        "shared": draw(st.sampled_from([0, 64])),
        "dense_layers": draw(st.integers(0, 2)),
        "interleave_moe_layer_step": draw(st.integers(1, 2)),
    }


@st.composite
def _expert_layouts(draw: st.DrawFn, degrees: dict[str, int], *, hybrid: bool) -> dict[str, Any]:
    """Experts folded onto the ranks of all other axes; hybrid: onto those of each of two replicas."""
    expert_ranks = degrees["tp"] * degrees["cp"] * degrees["dp"] // (2 if hybrid else 1)
    pairs = [(ep, etp) for ep, etp in product([1, 2, 4], {1, degrees["tp"]}) if expert_ranks % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(sorted(pairs)))
    order = [*draw(st.permutations(["tp", "cp", "dp"])), "pp"]
    return {"ep": ep, "etp": etp, "order": order, "sequence_parallel": True}


@st.composite
def _layouts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "order": list(draw(st.permutations(DENSE_AXIS_NAMES))),
        "sequence_parallel": draw(st.booleans()),
        "tp_comm_overlap": draw(st.booleans()),
        "async_tensor_model_parallel_allreduce": draw(st.booleans()),
        "overlap_p2p_comm": draw(st.booleans()),
        "deallocate_pipeline_outputs": draw(st.booleans()),
        "data": draw(st.sampled_from(STRATEGIES)),
    }
