"""Random programs and random scenarios, small enough to be run rank by rank."""

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
"""Few and dyadic: equal times are common, and sums are exact."""

KINDS = st.sampled_from([CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER])
CLASSES = st.sampled_from([KernelKind.MATMUL, KernelKind.ATTENTION_FORWARD, KernelKind.NORM])
"""One kernel of each class that collectives slow in its own way."""

MEETINGS = ("dp", "tp", "model")
"""Replicas of a kind; pairs of them, joined differently in every kind; all kinds of one replica."""


@dataclass
class _Kind:
    """The tasks of one kind of rank in the making."""

    tasks: list[Task] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def add(self, stream: Stream, task: Task) -> None:
        self.tasks.append(task)
        self.streams.append(stream)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to three kinds of ranks, each in several replicas; tasks are issued in one global order, so none deadlock.

    Rank = replica * kinds + kind.
    """
    kinds, replicas = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    ranks = [_Kind() for _ in range(kinds)]
    for number in range(draw(st.integers(1, 10))):
        _event(draw, ranks, number)
    made = tuple(RankProgram(tuple(rank.tasks), tuple(rank.streams)) for rank in ranks)
    kind = np.tile(np.arange(kinds), replicas)
    used = {exchange.comm_group for rank_program in made for exchange in rank_program.comm_ops}
    groups = {role: group for role, group in _groups(draw, kinds, replicas).items() if role in used}
    return Program(made, kind, groups)


def _event(draw: st.DrawFn, ranks: list[_Kind], number: int) -> None:
    """Something that one kind does, or a pair of neighbours, or all."""
    place = draw(st.integers(0, len(ranks) - 1))
    what = draw(st.sampled_from(["compute", "dp", "experts", "model", "message", "message"]))
    if what == "compute":
        after = _after(draw, ranks[place])
        ranks[place].add(Stream.COMPUTE, ComputeTask(draw(_blocks()), after))
    elif what == "dp":
        exchange = CommOp("reduce", draw(KINDS), "dp", draw(SECONDS))
        ranks[place].add(Stream.DP, CollectiveTask(exchange, _after(draw, ranks[place])))
    elif what == "experts":
        exchange = CommOp("tokens", CollectiveType.ALL_TO_ALL, "tp", draw(SECONDS))
        ranks[place].add(Stream.EP, CollectiveTask(exchange, _after(draw, ranks[place])))
    elif what == "model":
        exchange = CommOp("norm", CollectiveType.ALL_REDUCE, "model", draw(SECONDS))
        for rank in ranks:
            rank.add(Stream.DP, CollectiveTask(exchange, _after(draw, rank)))
    elif len(ranks) > 1:
        _message(draw, ranks, number)


def _message(draw: st.DrawFn, ranks: list[_Kind], number: int) -> None:
    left = draw(st.integers(0, len(ranks) - 2))
    forward = draw(st.booleans())
    source, target = (left, left + 1) if forward else (left + 1, left)
    role, stream = ("pp_next", Stream.SEND_NEXT) if forward else ("pp_previous", Stream.SEND_PREVIOUS)
    exchange = CommOp("message", CollectiveType.SEND_RECV, role, draw(SECONDS))
    tag = Action(target, ActionKind.FORWARD, number)
    ranks[source].add(stream, SendTask(exchange, tag, _after(draw, ranks[source])))
    ranks[target].add(Stream.RECEIVE, ReceiveTask(exchange, tag))


def _after(draw: st.DrawFn, kind: _Kind) -> tuple[int, ...]:
    if not kind.tasks:
        return ()
    return tuple(draw(st.lists(st.integers(0, len(kind.tasks) - 1), max_size=2, unique=True)))


def _blocks() -> st.SearchStrategy[Segment]:
    kernel = st.builds(Kernel, st.just("kernel"), CLASSES, st.just(DType.BF16), flops=SECONDS, bytes=st.just(0.0))
    exchange = SECONDS.map(lambda seconds: CommOp("gather", CollectiveType.ALL_GATHER, "tp", seconds))
    overlap = st.builds(CommOverlap, exchange, kernel, st.sampled_from([1.0, 2.0, 4.0, inf]), st.booleans())
    operations = st.lists(kernel | kernel | exchange | overlap, min_size=1, max_size=4)
    return operations.map(lambda does: Segment("block", tuple(Operation(doe, WorkType.FORWARD) for doe in does)))


def _groups(draw: st.DrawFn, kinds: int, replicas: int) -> dict[str, ProcessGroups]:
    grid = np.arange(kinds * replicas).reshape(replicas, kinds)
    size = 2 if replicas % 2 == 0 else 1
    shuffled = [np.array(draw(st.permutations(grid[:, kind].tolist()))).reshape(-1, size) for kind in range(kinds)]
    pairs = np.stack([grid[:, :-1].reshape(-1), grid[:, 1:].reshape(-1)], axis=1)
    return {
        "dp": ProcessGroups("dp", np.ascontiguousarray(grid.T)),
        "tp": ProcessGroups("tp", np.concatenate(shuffled)),
        "model": ProcessGroups("model", grid),
        "pp_next": ProcessGroups("pp_next", pairs, ordered=True),
        "pp_previous": ProcessGroups("pp_previous", np.ascontiguousarray(pairs[:, ::-1]), ordered=True),
    }


@st.composite
def costs(draw: st.DrawFn, program: Program) -> UnitCost:
    """Unit costs; in some roles a group or two are slower than the others."""
    slowness = {}
    for role, groups in program.groups.items():
        factors = st.sampled_from([1.0, 1.0, 1.0, 2.0])
        count = len(groups.members)
        slowness[role] = draw(st.just([1.0] * count) | st.lists(factors, min_size=count, max_size=count))
    return UnitCost(program, slowness)


@st.composite
def costed(draw: st.DrawFn) -> UnitCost:
    """A random program with its costs."""
    return draw(costs(draw(programs())))


@st.composite
def _tables(draw: st.DrawFn) -> Interference:
    """A part of its own for every class of kernel beside every kind of collective, and the other way round inside."""
    pairs = [(kind, kernel_class) for kind in CollectiveType for kernel_class in KernelClass]
    parts = st.fixed_dictionaries({pair: st.sampled_from([0.0, 0.25, 0.5, 1.0]) for pair in pairs})
    return Interference(draw(parts), draw(parts))


INTERFERENCES = st.sampled_from([0.0, 0.5]).map(Interference.uniform) | _tables()


def fold(program: Program, cost: SegmentCost) -> SymmetryClasses:
    """Classes of the ranks that do the same at these costs."""
    seconds: dict[str, list[FloatArray]] = {role: [] for role in program.groups}
    for exchange in sorted({comm_op for made in program.programs for comm_op in made.comm_ops}, key=repr):
        seconds[exchange.comm_group].append(cost.comm_timing_by_group(exchange).seconds)
    costs = {role: np.stack(columns, axis=1) for role, columns in seconds.items()}
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
WHOLE_NODE = ("one domain", "cards")
"""Where four GPUs are in one node; the other clusters have nodes of two."""
LEGAL = {
    "one domain": [item for item in DEGREES if prod(item.values()) in {*range(2, 9), 16}],
    "cards": [element for element in DEGREES if prod(element.values()) in range(2, 9)],
    "one switch": [entry for entry in DEGREES if prod(entry.values()) in range(2, 17, 2)],
    "racks": [each for each in DEGREES if prod(each.values()) in range(2, 17, 2)],
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
    {"compute": "fp8", "first_layers": 1, "last_layers": 2},
    {"compute": "fp8", "stored": "fp8", "dispatched": "fp8"},
    {"compute": "fp8-tensorwise", "gathered": "fp8"},
]
RECOMPUTES = ["none", "selective", "selective_op", "full", {"layers": 1}]


def usual(chunks: int) -> Schedule:
    """1F1B, interleaved where ranks hold several chunks."""
    return OneFOneB() if chunks == 1 else Interleaved(chunks)


@st.composite
def mappings(draw: st.DrawFn, cluster: str | None = None) -> dict[str, Any]:
    """What a scenario file of 2 to 16 GPUs says."""
    place = draw(st.sampled_from(sorted(CLUSTERS))) if cluster is None else cluster
    degrees = draw(st.sampled_from(LEGAL[place]))
    schedule = draw(st.sampled_from(SCHEDULES if degrees["pp"] > 1 else ["gpipe", "1f1b"]))
    rounds = draw(st.integers(1, 2)) * degrees["pp"] if schedule == "interleaved" else draw(st.integers(1, 4))
    layout = {**degrees, **draw(_layouts())}
    if degrees["dp"] % 2 == 0 and draw(st.booleans()):
        ((name, options),) = draw(st.sampled_from(HYBRID)).items()
        layout["data"] = {name: {**options, "shard": degrees["cp"] * degrees["dp"] // 2}}
    if degrees["dp"] == prod(degrees.values()) and (degrees["dp"] == 2 or place in WHOLE_NODE) and draw(st.booleans()):
        layout["data"] = "data_parallel"
    model = draw(_models())
    if layout["data"] != "data_parallel" and draw(st.booleans()):
        model["experts"] = draw(_mixtures())
        layout |= draw(_expert_layouts(degrees, hybrid=_hybrid(layout["data"])))
    return {
        "model": model,
        "cluster": {**CLUSTERS[place], "gpus": prod(degrees.values())},
        "layout": layout,
        "schedule": schedule,
        "framework": draw(st.sampled_from(FRAMEWORKS)),
        "training": {
            "sequence": 128,
            "global_batch": degrees["dp"] * rounds,
            "recompute": draw(st.sampled_from(RECOMPUTES)),
            "precision": draw(st.sampled_from(PRECISIONS)) if place != "cards" else "bf16",
        },
    }


def _hybrid(data: str | dict[str, Any]) -> bool:
    """Whether weights are sharded over a part of the replicas."""
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
def _mixtures(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "count": 4,
        "top_k": draw(st.integers(1, 3)),
        "ffn": 128,
        "shared": draw(st.sampled_from([0, 64])),
        "dense_layers": draw(st.integers(0, 2)),
        "every": draw(st.integers(1, 2)),
    }


@st.composite
def _expert_layouts(draw: st.DrawFn, degrees: dict[str, int], *, hybrid: bool) -> dict[str, Any]:
    """Experts folded onto the ranks of all other axes; hybrid: on those of each of two replicas."""
    room = degrees["tp"] * degrees["cp"] * degrees["dp"] // (2 if hybrid else 1)
    pairs = [(ep, etp) for ep, etp in product([1, 2, 4], {1, degrees["tp"]}) if room % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(sorted(pairs)))
    order = [*draw(st.permutations(["tp", "cp", "dp"])), "pp"]
    return {"ep": ep, "etp": etp, "order": order, "sequence_parallel": True}


@st.composite
def _layouts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "order": list(draw(st.permutations(DENSE_AXIS_NAMES))),
        "sequence_parallel": draw(st.booleans()),
        "tensor_overlap": draw(st.booleans()),
        "backward_overlap": draw(st.booleans()),
        "pipeline_overlap": draw(st.booleans()),
        "release_outputs": draw(st.booleans()),
        "data": draw(st.sampled_from(STRATEGIES)),
    }
