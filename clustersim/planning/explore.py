"""What would another layout, model or number of GPUs need and take? Tables for a page that answers without a server.

The tables come from the models themselves (`explore_sizes`: workload, memory, lowering), steps are simulated beforehand
(`explore_steps`). What the page cannot vary is as in the scenario: attention, loss, optimizer, framework, cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.analysis.exploration import Exploration, Machine, Settings, Strategy
from clustersim.arrays import IntArray
from clustersim.dtypes import DType
from clustersim.errors import InputError
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.disturbance import Disturbances
from clustersim.hardware.topology import Fabric
from clustersim.parallel.data import BY_STAGE, FullyShard, NaiveDataParallel, Zero1
from clustersim.planning.explore_sizes import format_of, ring_volumes, sizes
from clustersim.planning.explore_steps import studies
from clustersim.scenario import Contention, Scenario
from clustersim.scenario.build import read_cluster
from clustersim.scenario.file import ScenarioFile
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.workload.presets import PRESETS
from clustersim.workload.recipe import Recipe, mixed
from clustersim.workload.training import FullRecompute, Loss, SelectiveOperations, SelectiveRecompute

MODELS: Final = (
    "gpt2-small", "gpt2-xl", "gpt3-1.3b", "gpt3-6.7b", "megatron-7.5b", "llama3-8b", "gpt3-13b", "megatron-22b",
    "llama3-70b", "gpt3-175b", "nemotron4-340b", "llama3-405b", "megatron-530b", "megatron-1t",
)  # fmt: skip
"""Shipped models that the page offers, from small to large."""
MOST_GPUS: Final = 2**15
OFFERED_GPUS: Final = 1024  # or four times the scenario's, where the cluster can have as many
_MIXED: Final = (
    ("mixed precision, BF16", mixed()),
    ("BF16 with BF16 gradients", mixed(gradients=DType.BF16)),
    ("FP32", mixed(compute=DType.FP32, master=None)),
)


def explore(scenario: Scenario, done: Callable[[int], None] = lambda _done: None) -> Exploration:
    """All that the explorer page shows; `done` is told how many of `explore_steps.count` steps are simulated."""
    return replace(tables(scenario), studies=studies(scenario, done))


def tables(scenario: Scenario) -> Exploration:
    """What needs no simulation; without studies."""
    own, training = scenario.model, scenario.training
    models = (own, *(PRESETS[name].model for name in MODELS if PRESETS[name].model != own))
    formats = tuple(_formats(scenario))
    return Exploration(
        name=scenario.name,
        models=tuple(sizes(model, scenario, formats) for model in models),
        formats=tuple(format_of(name, precision, training.optimizer) for name, precision in formats),
        machine=_machine(scenario),
        strategies=tuple(_strategies(scenario)),
        ring_volumes=ring_volumes(training),
        order=scenario.layout.order,
        layers_per_stage=scenario.layout.layers_per_stage,
        loss_width=2 * DType.FP32.bytes if training.loss is Loss.TORCH else 0,
        start=_start(scenario),
        studies=(),
        notes=tuple(_notes(scenario)),
    )


def _formats(scenario: Scenario) -> Iterator[tuple[str, Recipe]]:
    """The scenario's number formats and the usual ones that its accelerators can compute in."""
    own = scenario.training.recipe
    names = {precision: name for name, precision in _MIXED}
    yield names.get(own, "as in the scenario"), own
    for name, precision in _MIXED:
        if precision != own and all(_computes(scenario, precision)):
            yield name, precision


def _computes(scenario: Scenario, precision: Recipe) -> Iterator[bool]:
    for accelerator in scenario.cluster.kinds()[0]:
        try:
            accelerator.peak_of(precision.compute)
        except InputError:
            yield False


def _strategies(scenario: Scenario) -> Iterator[Strategy]:
    """The scenario's strategy at its own stage, the usual one at the others (as `layout.data=zero2` means it)."""
    own = scenario.layout.data
    for stage in range(4):
        strategy = own if own.stage == stage else BY_STAGE[stage]()
        bucket = strategy.bucket if isinstance(strategy, Zero1) else None
        whole = strategy if isinstance(strategy, FullyShard) else FullyShard()
        yield Strategy(stage, bucket, whole.ahead, whole.reshard_after_forward)


def _machine(scenario: Scenario) -> Machine:
    cluster = scenario.cluster
    largest, sizes_offered = _largest(scenario)
    levels, top = _levels(largest.fabric, np.arange(sizes_offered[-1]))
    return Machine(
        cluster=cluster.name,
        accelerator=" and ".join(accelerator.name for accelerator in cluster.kinds()[0]),
        capacity=min(accelerator.memory_bytes for accelerator in cluster.kinds()[0]),
        context=cluster.accelerator.context_bytes,
        fragmentation=scenario.framework.fragmentation,
        communicator=scenario.framework.communicator,
        gpus=sizes_offered,
        per_node=cluster.gpus_per_node,
        levels=levels,
        top=top,
    )


def _largest(scenario: Scenario) -> tuple[Cluster, tuple[int, ...]]:
    """The largest healthy cluster of the scenario's kind that is offered, and the sizes up to it."""
    section = ScenarioFile.model_validate(scenario.to_mapping()).cluster
    base = Path() if scenario.path is None else scenario.path.parent
    own, node = scenario.cluster.gpus, scenario.cluster.gpus_per_node
    most = max(own, min(MOST_GPUS, max(OFFERED_GPUS, 4 * own)))
    doubled = {2**power for power in range(most.bit_length())} | {node * 2**power for power in range(most.bit_length())}
    offered = sorted({own} | {gpus for gpus in doubled if gpus <= most and (gpus <= node or gpus % node == 0)})
    for gpus in reversed([gpus for gpus in offered if gpus > own]):
        try:
            return read_cluster(section, base, gpus), tuple(each for each in offered if each <= gpus)
        except InputError:  # the fabric connects fewer
            continue
    return scenario.cluster, tuple(each for each in offered if each <= own)


def _levels(fabric: Fabric, gpus: IntArray) -> tuple[tuple[tuple[str, IntArray], ...], str]:
    """The unit of each GPU on every tier, from the narrowest, and the tier beyond (as `Fabric.tier` names them).

    Of fabrics that are any graph only NVLink domains and nodes are known without asking for a route.
    """
    domain, node = fabric.domains(gpus), fabric.nodes(gpus)
    if not isinstance(fabric, ClosFabric):
        return (("nvlink", domain), ("node", node)), "network"
    leaves = fabric.leaves(fabric.node.nic(gpus)) if fabric.node.nics_per_node else node
    pods = fabric.pods(leaves) if fabric.node.nics_per_node else node
    narrow = [("nvlink", domain)] if fabric.node.nvlink else []
    return (*narrow, ("host", gpus // fabric.node.reach), ("leaf", leaves), ("spine", pods)), "core"


def _start(scenario: Scenario) -> Settings:
    layout, training, schedule = scenario.layout, scenario.training, scenario.schedule
    return Settings(
        gpus=scenario.cluster.gpus,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        zero=layout.data.stage,
        schedule="1f1b" if isinstance(schedule, ZeroBubble) else schedule.name,
        chunks=max(2, schedule.chunks),
        recompute=_recompute(scenario),
        microbatch=training.microbatch,
        sequence=training.sequence,
        batch=training.global_batch,
    )


def _recompute(scenario: Scenario) -> str:
    match scenario.training.recompute:
        case SelectiveRecompute():
            return "selective"
        case SelectiveOperations():
            return "selective_op"
        case FullRecompute(None):
            return "full"
        case FullRecompute(layers):
            return f"layers:{layers}"
    return "none"


def _notes(scenario: Scenario) -> Iterator[str]:
    """What of the scenario the page leaves out."""
    if isinstance(scenario.schedule, ZeroBubble):
        yield (
            f"the scenario's schedule {scenario.schedule.name} orders passes by their durations; memory and bubble are "
            "drawn for 1f1b instead, simulated steps are the scenario's"
        )
    if isinstance(scenario.layout.data, NaiveDataParallel):
        yield "the scenario's data_parallel (one process) is drawn as ddp; simulated steps are the scenario's"
    if scenario.disturbances != Disturbances() or scenario.jitter is not None:
        yield "disturbances and jitter of the scenario are left out: all GPUs and links are healthy"
    if scenario.cluster.mixed:
        yield "GPUs are of several kinds: memory is compared with the smallest, and simulated steps need all the nodes"
    if scenario.cost.network is Contention.SHARED:
        yield "steps are simulated with an uncontended network, which the scenario's is not"
