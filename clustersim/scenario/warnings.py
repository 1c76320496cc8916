"""What is legal in a scenario and still likely a mistake?

Layouts that run, but hardly as intended, combinations that the usual software does not have, and work that is not
needed. One sentence each.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from clustersim.dtypes import DType
from clustersim.hardware.disturbance import DeadLink
from clustersim.hardware.topology import LinkKind
from clustersim.parallel.groups import members
from clustersim.scenario.scenario import Scenario
from clustersim.scenario.settings import Contention, Symmetry
from clustersim.workload.training import Attention, SelectiveRecompute
from clustersim.workload.transformer import Positions

MANY_RANKS = 2048  # to simulate one by one


def warnings(scenario: Scenario) -> list[str]:
    """What is legal and still likely a mistake, one sentence each."""
    return [warning for check in _WARNINGS for warning in check(scenario)]


def _replicated_heads(scenario: Scenario) -> Iterator[str]:
    model, tp = scenario.model, scenario.layout.tp
    if tp > model.kv_heads:
        yield f"tp {tp} exceeds the {model.kv_heads} kv_heads of {model.name}: {tp // model.kv_heads} ranks hold each"


def _tensor_beyond_domain(scenario: Scenario) -> Iterator[str]:
    groups = members(scenario.layout, "tp")
    domains = scenario.cluster.fabric.domains(groups)
    split = int(np.count_nonzero(domains.min(axis=1) != domains.max(axis=1)))
    if split:
        yield (
            f"{split} of {len(groups)} tensor-parallel groups (tp {scenario.layout.tp}) reach beyond one NVLink domain "
            "and use the network for every layer"
        )


def _nothing_to_drop(scenario: Scenario) -> Iterator[str]:
    training = scenario.training
    if isinstance(training.recompute, SelectiveRecompute) and training.attention is Attention.FLASH:
        yield "training.recompute selective only costs time with flash attention, which keeps no scores to recompute"


def _long_rotary(scenario: Scenario) -> Iterator[str]:
    model, sequence = scenario.model, scenario.training.sequence
    if model.positions is Positions.ROTARY and sequence > model.max_positions:
        yield f"sequence {sequence} is longer than the {model.max_positions} positions that {model.name} was made for"


def _unfolded(scenario: Scenario) -> Iterator[str]:
    ranks, passes = scenario.layout.world, 2 * scenario.microbatches * scenario.schedule.chunks
    if scenario.cost.symmetry is Symmetry.OFF and ranks > MANY_RANKS:
        yield (
            f"cost.symmetry off simulates all {ranks:,} ranks: {ranks:,} x {passes:,} = {ranks * passes:,} "
            "passes of microbatches; auto gives the same answer from the few ranks that differ"
        )


def _one_by_one(scenario: Scenario) -> Iterator[str]:
    """About 10 ms and 250 kB a rank for the passes of a usual step (`tests/benchmarks/README.md`)."""
    ranks, all_differ = scenario.layout.world, scenario.jitter is not None or scenario.cost.symmetry is Symmetry.OFF
    if scenario.cost.network is Contention.SHARED and all_differ and ranks > MANY_RANKS:
        cause = "jitter makes every rank differ" if scenario.jitter is not None else "cost.symmetry is off"
        yield (
            f"{cause}, and on a shared network all {ranks:,} are simulated one by one, which takes minutes and "
            "gigabytes; cost.network uncontended takes seconds"
        )


def _old_for_flash(scenario: Scenario) -> Iterator[str]:
    """bf16 came with compute capability 8.0, the least that FlashAttention-2 needs (Dao-AILab/flash-attention)."""
    for gpu in scenario.cluster.kinds()[0]:
        if scenario.training.attention is Attention.FLASH and DType.BF16 not in gpu.peak:
            yield (
                f"attention flash on {gpu.name}: FlashAttention-2 needs compute capability 8.0 and this, without bf16, "
                "has less; training.attention standard is the safe choice"
            )


def _uncommon_interleaving(scenario: Scenario) -> Iterator[str]:
    """Megatron-LM's arguments: whole rounds of p microbatches; equal stages, embedding and loss counted as layers."""
    pp, chunks, layers = scenario.layout.pp, scenario.schedule.chunks, scenario.model.layers
    if chunks == 1:
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


def _beyond_reach(scenario: Scenario) -> Iterator[str]:
    """Disturbances of links that no transfer of the job crosses; a dead link may lead transfers anywhere."""
    fabric, disturbances = scenario.cluster.fabric, scenario.disturbances
    if any(isinstance(change.what, DeadLink) for change in disturbances.links):
        return
    highest = fabric.tier(range(scenario.cluster.gpus))
    beyond = dict.fromkeys(_BEYOND.get(highest, ()))
    idle = [f"background.{kind.value}" for kind in disturbances.background if kind in beyond]
    idle += ["nics"] * (LinkKind.NIC in beyond and bool(disturbances.nics))
    for entry, change in enumerate(disturbances.links):
        idle += [f"links.{entry}"] * (fabric.link(change.numbers(fabric)[0]).kind in beyond)
    for key in idle:
        yield f"disturbances.{key} changes nothing: no transfer leaves the {highest} tier"


_BEYOND: Mapping[str, tuple[LinkKind, ...]] = {
    "gpu": (LinkKind.NVLINK, LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "nvlink": (LinkKind.PCIE, LinkKind.HOST, LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "host": (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE),
    "leaf": (LinkKind.LEAF, LinkKind.SPINE),
    "spine": (LinkKind.SPINE,),
}

_WARNINGS: tuple[Callable[[Scenario], Iterator[str]], ...] = (
    _replicated_heads,
    _tensor_beyond_domain,
    _nothing_to_drop,
    _long_rotary,
    _uncommon_interleaving,
    _old_for_flash,
    _unfolded,
    _one_by_one,
    _beyond_reach,
)
