"""What is legal in a scenario and still likely a mistake?

Layouts that run, but hardly as intended, combinations that the usual software does not have, and work that is not
needed. One sentence each.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np

from clustersim.collectives.library import LinkTechnologies, load_library
from clustersim.collectives.nccl_overrides import ChannelLimits
from clustersim.common.dtypes import DType
from clustersim.hardware.degradation import DeadLink
from clustersim.hardware.topology import LinkKind
from clustersim.model.training import Attention
from clustersim.model.transformer import Positions
from clustersim.parallel.data_parallel_strategy import FullyShard, GradientSync, Zero2
from clustersim.parallel.mesh import TENSOR
from clustersim.scenario.resolved import Setup
from clustersim.scenario.settings import Contention, Symmetry
from clustersim.scenario.validation_rules.alignment import badly_sized
from clustersim.scenario.validation_rules.nvlink_domains import straddling
from clustersim.scenario.validation_rules.recompute import modules_that_nobody_has, nothing_to_drop
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.schedules.zero_bubble_v import ZeroBubbleV

MANY_RANKS = 2048  # to simulate one by one
MANY_NODES = 384  # each unlike the others on a shared network: 256 take 5 s
MANY_TASKS = 25e6  # to keep: more than 3.5 GB
MANY_ONE_BY_ONE = 1e6  # of ranks that are simulated one by one: 20 s and more
MANY_SPLIT = 1e6  # where tensor-parallel groups are out of step and share links: 5 s and more
TASKS_PER_PASS = 3.3  # a block and its messages: 423 for the 128 passes of a rank of Llama 3 405B
TASKS_PER_UNIT = 2.5  # of sharded parameters: 412 for both passes of Llama 3 70B's 80 layers
GB_PER_TASK, SECONDS_PER_TASK = 0.142e-6, 1.5e-6  # 69 million took 9.8 GB and 106 s


def warnings(scenario: Setup) -> list[str]:
    """What is legal and still likely a mistake, one sentence each."""
    return [warning for check in _WARNINGS for warning in check(scenario)]


def long_waits(scenario: Setup) -> list[str]:
    """Those of `warnings` that say that a simulation takes long."""
    return [warning for check in _LONG for warning in check(scenario)]


def _replicated_heads(scenario: Setup) -> Iterator[str]:
    model, tp = scenario.model, scenario.layout.tp
    for kv_heads in dict.fromkeys(attention.kv_heads for attention in model.attentions):
        if tp > kv_heads:
            yield f"tp {tp} exceeds the {kv_heads} kv_heads of {model.name}: {tp // kv_heads} ranks hold each"


def _no_user_buffers(scenario: Setup) -> Iterator[str]:
    if scenario.layout.tensor_overlap and scenario.tensor_beyond_domain:
        yield (
            "layout.tensor_overlap has no effect: user buffers work within one NVLink domain, and a tensor-parallel "
            "group that reaches beyond it has none"
        )


def _window_on_a_ring(scenario: Setup) -> Iterator[str]:
    """Transformer Engine's AttnFuncWithCPAndKVP2P (context_parallel.py): windows want `a2a` or `all_gather`."""
    if scenario.layout.cp > 1 and any(attention.window is not None for attention in scenario.model.attentions):
        yield (
            f"layout.cp {scenario.layout.cp}: all keys and values go round the ring, also for layers with a window; "
            "Transformer Engine refuses windows on its ring (p2p) and has them with other exchanges, not modelled here"
        )


def _long_rotary(scenario: Setup) -> Iterator[str]:
    model, sequence = scenario.model, scenario.training.sequence
    if model.positions is Positions.ROTARY and sequence > model.max_positions:
        yield f"sequence {sequence} is longer than the {model.max_positions} positions that {model.name} was made for"


def _unfolded(scenario: Setup) -> Iterator[str]:
    ranks, passes = scenario.layout.world_size, 2 * scenario.microbatches * scenario.placement.max_chunks
    if scenario.cost.symmetry is Symmetry.OFF and ranks > MANY_RANKS:
        yield (
            f"cost.symmetry off simulates all {ranks:,} ranks: {ranks:,} x {passes:,} = {ranks * passes:,} "
            "passes of microbatches; auto gives the same answer from the few ranks that differ"
        )


def _one_by_one(scenario: Setup) -> Iterator[str]:
    """About 10 ms and 250 kB a rank for the passes of a usual step (`tests/benchmarks/README.md`)."""
    ranks, cause = scenario.layout.world_size, _all_differ(scenario)
    many = ranks > MANY_RANKS or _tasks(scenario) > MANY_ONE_BY_ONE
    if scenario.cost.network is Contention.SHARED and cause and many:
        yield (
            f"{cause}, and on a shared network all {ranks:,} are simulated one by one, which takes minutes and "
            "gigabytes; cost.network uncontended takes seconds"
        )


def _scattered_and_shared(scenario: Setup) -> Iterator[str]:
    """Nodes out of order share racks with others each, so no two of them are alike."""
    cluster = scenario.cluster
    scattered = bool((np.diff(cluster.places) < 0).any())
    if scenario.cost.network is Contention.SHARED and scattered and cluster.nodes > MANY_NODES:
        yield (
            f"cluster.placement: each of the {cluster.nodes:,} nodes shares links with others, and on a shared network "
            "all of them are simulated, which takes minutes; cost.network uncontended takes seconds"
        )


def _many_spans(scenario: Setup) -> Iterator[str]:
    """Where all ranks differ, what each does is kept for every step. A larger dp has fewer passes of the same batch."""
    cause, tasks, steps = _all_differ(scenario), _tasks(scenario), scenario.steps
    if scenario.cost.network is Contention.SHARED or not cause or tasks < MANY_TASKS:
        return
    fit = int(steps * MANY_TASKS / tasks)
    fewer = f"{fit:,} step{'s' * (fit > 1)}, " if fit and steps > 1 else ""
    folded = "cost.symmetry auto, " if scenario.jitter is None else ""
    yield (
        f"{cause}: about {tasks / 1e6:,.0f} million tasks of {scenario.layout.world_size:,} ranks in {steps:,} "
        f"step{'s' * (steps > 1)} take some {tasks * GB_PER_TASK:,.0f} GB of memory and "
        f"{tasks * SECONDS_PER_TASK:,.0f} s; {folded}{fewer}or a smaller layout.dp and global_batch takes less"
    )


def _all_differ(scenario: Setup) -> str:
    """Why all ranks are simulated; empty if ranks that do the same are simulated once."""
    if scenario.jitter is not None:
        return "jitter makes every rank differ"
    return "cost.symmetry is off" if scenario.cost.symmetry is Symmetry.OFF else ""


def _tasks(scenario: Setup) -> float:
    """About how many tasks all ranks run in all steps, for which each is kept a row."""
    layout, chunks = scenario.layout, scenario.placement.max_chunks
    sharded = isinstance(layout.data, FullyShard)
    units = scenario.model.layers / (layout.pp * chunks) if sharded else 0.0
    passes = 2 * scenario.microbatches * chunks
    return layout.world_size * passes * (TASKS_PER_PASS + TASKS_PER_UNIT * units) * scenario.steps


def _split_tensor_groups(scenario: Setup) -> Iterator[str]:
    """Blocks of a tensor-parallel group that is out of step meet other groups' exchange by exchange."""
    if scenario.cost.network is Contention.NONE or _tasks(scenario) <= MANY_SPLIT:
        return
    disturbances, groups = scenario.disturbances, scenario.layout.mesh.groups_along(TENSOR)
    speeds = disturbances.speeds(scenario.cluster.places)[groups]
    slow = bool((speeds.min(axis=1) != speeds.max(axis=1)).any())
    lasting = len(disturbances.links) > len(disturbances.passing)
    links = bool(disturbances.nics or lasting) and groups.shape[1] > 1
    domains = np.unique(scenario.cluster.fabric.domains(groups.reshape(-1)), return_counts=True)[1]
    alone = not scenario.tensor_beyond_domain and int(domains.max()) == groups.shape[1]  # on their NVLink
    if (slow or links) and not alone:
        yield (
            "disturbances put some ranks of a tensor-parallel group out of step; on a shared network such a scenario "
            "can take minutes, with cost.network uncontended it takes seconds"
        )


def _sharded_pipeline(scenario: Setup) -> Iterator[str]:
    """What is sharded beyond the optimizer's states beside a pipeline (DeepSpeed: `runtime/pipe/engine.py`)."""
    layout = scenario.layout
    if not layout.is_pipelined or layout.data.zero_stage < 2:
        return
    if layout.gradient_sync is GradientSync.EVERY_BACKWARD:
        yield (
            "layout.data: gradients are reduced after every microbatch although there is a pipeline; Megatron-LM, "
            "PyTorch and DeepSpeed reduce them once a step (leave reduce out)"
        )
    elif isinstance(layout.data, Zero2):
        yield (
            "layout.data: zero2 with a pipeline keeps whole gradients until the last microbatch, so it takes the "
            "memory and the time of zero1; DeepSpeed refuses the two together"
        )


def _old_for_flash(scenario: Setup) -> Iterator[str]:
    """bf16 came with compute capability 8.0, the least that FlashAttention-2 needs (Dao-AILab/flash-attention)."""
    for gpu in scenario.cluster.kinds()[0]:
        if scenario.training.attention is not Attention.STANDARD and DType.BF16 not in gpu.peak:
            yield (
                f"attention flash on {gpu.name}: FlashAttention-2 needs compute capability 8.0 and this, without bf16, "
                "has less; training.attention standard is the safe choice"
            )


def _uncommon_interleaving(scenario: Setup) -> Iterator[str]:
    """Megatron-LM's arguments: whole rounds of p microbatches; equal stages, embedding and loss counted as layers."""
    pp, chunks, layers = scenario.layout.pp, scenario.placement.max_chunks, scenario.model.layers
    if not isinstance(scenario.schedule, Interleaved):
        return
    if scenario.microbatches % pp:
        yield (
            f"{scenario.microbatches} microbatches are not a multiple of pp {pp}, which Megatron-LM's interleaved "
            "schedule wants by default; this is the order of torch.distributed.pipelining"
        )
    even = any((layers + extra) % (pp * chunks) == 0 for extra in (0, 1, 2))
    if scenario.layout.layers_per_stage is None and not even:
        yield (
            f"{layers} layers do not divide into pp {pp} x {chunks} chunks = {pp * chunks} stages, not even with "
            "embedding and loss counted as layers; Megatron-LM wants such a split written out (layout.layers_per_stage)"
        )


def _ends_one_after_the_other(scenario: Setup) -> Iterator[str]:
    """ZB-2p and ZB-V have ranks begin and end one forward after each other; the bubble is gone from steps in a row."""
    schedule, stages = scenario.schedule, scenario.placement.stage_ranks
    staggered = isinstance(schedule, ZeroBubbleV) or (isinstance(schedule, ZeroBubble) and schedule.memory > 1)
    if not staggered or scenario.layout.pp == 1:
        return
    if scenario.model.tied_embeddings and stages[0] != stages[-1]:
        yield (
            f"model.tied_embeddings: the first and the last pipeline rank add up a gradient at the end of a step, so "
            f"schedule {schedule.name} cannot begin the next step early; its authors untie them"
        )
    elif scenario.steps == 1:
        yield (
            f"schedule {schedule.name}: ranks are done one after the other and go on with the next step, so a step "
            "alone takes longer than one of many; with steps 3 the last one shows the pace of training"
        )


def _beyond_reach(scenario: Setup) -> Iterator[str]:
    """Disturbances of links that no transfer of the job crosses; a dead link may lead transfers anywhere."""
    fabric, disturbances = scenario.cluster.fabric, scenario.disturbances
    dead_nics = any(nic.bandwidth == 0.0 for nic in disturbances.nics)
    if dead_nics or any(isinstance(change.what, DeadLink) for change in disturbances.links):
        return
    highest = fabric.tier(range(scenario.cluster.gpus))
    beyond = dict.fromkeys(_BEYOND.get(highest, ()))
    idle = [f"background.{kind.value}" for kind in disturbances.background if kind in beyond]
    idle += ["nics"] * (LinkKind.NIC in beyond and bool(disturbances.nics))
    for entry, change in enumerate(disturbances.links):
        idle += [f"links.{entry}"] * (fabric.link(change.numbers(fabric)[0]).kind in beyond)
    for key in idle:
        yield f"disturbances.{key} changes nothing: no transfer leaves the {highest} tier"


def _of_other_jobs(scenario: Setup) -> Iterator[str]:
    """Disturbances of GPUs that the job does not have."""
    disturbances, places = scenario.disturbances, scenario.cluster.places
    entries = [("slow", slow.gpus) for slow in disturbances.slow], [("nics", nic.gpus) for nic in disturbances.nics]
    for number, (key, gpus) in chain.from_iterable(map(enumerate, entries)):
        if not np.isin(gpus, places).any():
            yield f"disturbances.{key}.{number} changes nothing: the job has none of these GPUs (cluster.placement)"


def _channels_of_messages(scenario: Setup) -> Iterator[str]:
    """Only messages are sent on channels here, and only where the rate of one is known do these limit them."""
    limits = scenario.cost.switches.channel_limits
    if limits == ChannelLimits():
        return
    library, makes = load_library(scenario.cluster.library), LinkTechnologies.from_links(scenario.cluster.fabric.links)
    if math.isinf(library.channel_rate_on(makes)):
        yield "cost.nccl: numbers of channels change nothing; the rate of a channel is not known for these GPUs"
    else:
        yield (
            "cost.nccl: numbers of channels limit messages inside NVLink domains only; rings, trees and NVLS go at the "
            "rate of their links"
        )


def _switches_that_cannot_add(scenario: Setup) -> Iterator[str]:
    if not scenario.cost.switches.collnet_enabled:
        return
    library, makes = load_library(scenario.cluster.library), LinkTechnologies.from_links(scenario.cluster.fabric.links)
    if not library.has_sharp(makes):
        networks = " and ".join(network.value for network in makes.networks) or "no network"
        yield (
            f"cost.nccl: NCCL_COLLNET_ENABLE changes nothing; switches of {networks} do not add, those of InfiniBand do"
        )


def _record_of_a_healthy_network(scenario: Setup) -> Iterator[str]:
    record = scenario.cost.record
    if record is not None and record.collectives and scenario.disturbances.network:
        yield "the network is disturbed, so the record's collectives are left aside: the model of the fabric times all"


_BEYOND: Mapping[str, tuple[LinkKind, ...]] = {
    "gpu": (LinkKind.NVLINK, LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "nvlink": (LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "host": (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "leaf": (LinkKind.LEAF, LinkKind.SPINE),
    "spine": (LinkKind.SPINE,),
}

_WARNINGS: tuple[Callable[[Setup], Iterator[str]], ...] = (
    _replicated_heads,
    _no_user_buffers,
    straddling,
    badly_sized,
    nothing_to_drop,
    modules_that_nobody_has,
    _long_rotary,
    _window_on_a_ring,
    _uncommon_interleaving,
    _ends_one_after_the_other,
    _old_for_flash,
    _sharded_pipeline,
    _unfolded,
    _one_by_one,
    _scattered_and_shared,
    _many_spans,
    _split_tensor_groups,
    _beyond_reach,
    _of_other_jobs,
    _channels_of_messages,
    _switches_that_cannot_add,
    _record_of_a_healthy_network,
)
_LONG = (_one_by_one, _scattered_and_shared, _many_spans, _split_tensor_groups)
