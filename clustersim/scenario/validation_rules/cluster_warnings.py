"""Which machine is legal in a scenario and still likely a mistake?

An accelerator in the hosts of another, with links that it does not have; ports at rates that nobody sells, because bits
were taken for bytes or the reverse; oversubscription of switches that nothing crosses. One sentence each. Whoever
states a number is believed: only what stayed as the cluster's file has it is compared with the accelerator's own
clusters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from clustersim.collectives.phase import group_topology
from clustersim.collectives.ring import RingAlgorithm
from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.mapping_reader import flat
from clustersim.common.units import Dimension, format_bandwidth, parse_quantity
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import DeadLink
from clustersim.hardware.link_technology import TECHNOLOGIES
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.parallel.mesh import (
    EXPERT_MODEL_PARALLEL_GROUP,
    HOST_GROUP,
    MODEL_PARALLEL_GROUP,
    SHARDED_REPLICA_GROUP,
    WORLD_GROUP,
)
from clustersim.parallel.process_groups import process_groups
from clustersim.program.task import CollectiveType
from clustersim.scenario.resolved import Setup

FASTEST_PORT: Final = 100e9
"""Bytes/s of the fastest network port that is sold: 800 Gbit/s (ConnectX-8; 1,600 are announced), 2026."""
_OWN: Final = MappingProxyType(
    {"node.nvlink.bandwidth": "NVLink of", "node.nvlink.gpus": "NVLink domains of", "node.pcie.bandwidth": "PCIe of"}
)
"""Keys of a cluster that belong to its accelerator, and how they are called."""
_TIERS: Final = MappingProxyType({"leaf": LinkKind.LEAF, "spine": LinkKind.SPINE})
_LITTLE: Final = frozenset(
    role.name
    for role in (WORLD_GROUP, MODEL_PARALLEL_GROUP, EXPERT_MODEL_PARALLEL_GROUP, SHARDED_REPLICA_GROUP, HOST_GROUP)
)
"""Roles that send some bytes a step, or none over the network."""

Keys = Mapping[str, Any]
"""What a file or a section says, by dotted keys."""


@dataclass(frozen=True, slots=True)
class _Stated:
    """What is said of a machine. file: by the cluster's file; changed: by the scenario, instead."""

    file: Keys
    changed: Keys

    def text(self, key: str) -> str:
        """What holds for a key; empty where nobody says anything."""
        return str(self.changed.get(key) or self.left(key) or "")

    def left(self, key: str) -> object:
        """What the file says and the scenario leaves; None otherwise."""
        parts = key.split(".")
        replaced = any(".".join(parts[:end]) in self.changed for end in range(1, len(parts) + 1))
        return None if replaced else self.file.get(key)


def machine_warnings(scenario: Setup, changes: Mapping[str, Any]) -> list[str]:
    """What is likely a mistake about the machine; changes: what replaces keys of the cluster's file."""
    stated = _Stated(scenario.cluster.stated, flat(changes))
    return [warning for check in _CHECKS for warning in check(scenario, stated)]


@cache
def _machines() -> Mapping[str, Keys]:
    """What the files of all shipped clusters say, by name."""
    files = {name: data_files.find("clusters", name) for name in data_files.names("clusters")}
    return MappingProxyType({name: flat(data_files.read_mapping(path)) for name, path in files.items()})


def _homes(accelerator: Accelerator) -> dict[str, Keys]:
    """The shipped clusters of an accelerator, by name."""
    return {name: keys for name, keys in _machines().items() if keys.get("accelerator") == accelerator.name}


def _other_hosts(scenario: Setup, stated: _Stated) -> Iterator[str]:
    """Accelerators whose links are not those of the machine that they stand in."""
    cluster = scenario.cluster
    for accelerator in cluster.kinds()[0]:
        differences = [*_generations(accelerator, cluster.fabric), *_differences(accelerator, cluster, stated)]
        if differences:
            homes = [*_homes(accelerator)]
            owners = f"; {_list(homes)} {'have' if len(homes) > 1 else 'has'} what belongs to it" if homes else ""
            yield f"cluster: {accelerator.name} stands in {cluster.name}, with {', '.join(differences)}{owners}"


def _generations(accelerator: Accelerator, fabric: Fabric) -> Iterator[str]:
    table = fabric.links
    found = np.unique(table.technology[table.kind == LINK_KINDS.index(LinkKind.NVLINK)]).tolist()
    there = [TECHNOLOGIES[number] for number in found]
    if there and accelerator.nvlink is not None and there != [accelerator.nvlink]:
        yield f"{_list([item.value for item in there])} links instead of {accelerator.nvlink.value}"


def _differences(accelerator: Accelerator, cluster: Cluster, stated: _Stated) -> Iterator[str]:
    """Where a shipped file that the scenario leaves as it is says what no cluster of the accelerator does."""
    if stated.file.get("accelerator") == accelerator.name or cluster.files[0].parent != data_files.shelf("clusters"):
        return
    homes = _homes(accelerator).values()
    for key, words in _OWN.items():
        there, own = stated.left(key), list(dict.fromkeys(home[key] for home in homes if key in home))
        if there is not None and own and there not in own:
            yield f"{words} {there} instead of {' or '.join(map(str, own))}"


def _list(names: Sequence[str], most: int = 3) -> str:
    """Some names."""
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def _fast_ports(scenario: Setup, stated: _Stated) -> Iterator[str]:  # noqa: ARG001 - as other checks
    """A network port at the rate of NVLink: networks are sold in bits."""
    key = "node.nic.bandwidth"
    text = stated.text(key)
    rate = parse_quantity(text, Dimension.BANDWIDTH) if text else 0.0
    if rate > FASTEST_PORT * (1 + 1e-9):
        meant = f"; was {_number(text)} Gbit/s meant?" if text.endswith("GB/s") else ""
        yield (
            f"cluster.{key}: {text} is {rate * 8e-9:,.0f} Gbit/s, but no port of more than 800 Gbit/s is sold "
            f"(1,600 are announced){meant}"
        )


def _slow_nvlink(scenario: Setup, stated: _Stated) -> Iterator[str]:
    """NVLink in bits, which is sold in bytes, and often both ways together."""
    key, accelerator = "node.nvlink.bandwidth", scenario.cluster.accelerator
    text = stated.text(key)
    if "bit" in text and (rate := parse_quantity(text, Dimension.BANDWIDTH)) < (port := _port(accelerator)) / 2:
        yield (
            f"cluster.{key}: {text} is {format_bandwidth(rate)}, but {accelerator.name} has {format_bandwidth(port)} "
            f"of NVLink per direction ({format_bandwidth(2 * port)} in both); was {format_bandwidth(port)} meant?"
        )


def _port(accelerator: Accelerator) -> float:
    """Bytes/s of an accelerator's NVLink: in its own clusters, or else the most of its generation; 0 if unknown."""
    generation = accelerator.nvlink.value if accelerator.nvlink else ""
    alike = [keys for keys in _machines().values() if keys.get("node.nvlink.generation") == generation]
    ports = [keys.get("node.nvlink.bandwidth") for keys in _homes(accelerator).values() or alike]
    return max((parse_quantity(port, Dimension.BANDWIDTH) for port in ports if port), default=0.0)


def _number(text: str) -> str:
    return text.removesuffix("GB/s").strip()


def _idle_oversubscription(scenario: Setup, stated: _Stated) -> Iterator[str]:
    """Dead links may lead transfers anywhere, so of them nothing is said."""
    dead_nics = any(nic.bandwidth == 0.0 for nic in scenario.disturbances.nics)
    if dead_nics or any(isinstance(change.what, DeadLink) for change in scenario.disturbances.links):
        return
    for tier, kind in _TIERS.items():
        key = f"fabric.{tier}.oversubscription"
        if stated.changed.get(key) not in (None, stated.file.get(key, 1)) and kind not in _crossed(scenario):
            yield f"cluster.{key} {stated.changed[key]} changes nothing: {_why(scenario, tier)}"


def _why(scenario: Setup, tier: str) -> str:
    """Whether the job is too small for a tier, or only keeps off it."""
    gpus, table = scenario.cluster.gpus, scenario.cluster.fabric.links
    if (table.kind == LINK_KINDS.index(_TIERS[tier])).any():
        return f"no transfer of this layout's {gpus:,} GPUs goes beyond the {tier} switches"
    return f"the {gpus:,} GPUs are under one {'leaf switch' if tier == 'leaf' else 'pod of spine switches'}"


def _crossed(scenario: Setup) -> set[LinkKind]:
    """Kinds of links that messages along the pipeline and rings of all other groups cross."""
    fabric, kinds = scenario.cluster.fabric, set[LinkKind]()
    for name, groups in process_groups(scenario.layout, scenario.placement).items():
        if name not in _LITTLE and groups.members.shape[1] > 1:
            for sources, targets in [*_transfers(groups.members, fabric, ordered=groups.ordered)]:
                links = np.unique(fabric.paths(sources, targets).links)
                kinds |= {LINK_KINDS[number] for number in np.unique(fabric.links.kind[links[links >= 0]]).tolist()}
    return kinds


def _transfers(members: IntArray, fabric: Fabric, *, ordered: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Who sends to whom in groups [groups, size]; rings keep to their rails, as all algorithms but all-to-all do."""
    if ordered:
        yield members[:, 0], members[:, 1]
        return
    for arrangement in group_topology(members, fabric):
        for phase in RingAlgorithm().phases(CollectiveType.ALL_REDUCE, arrangement):
            for part in phase.flows:
                yield part.sources.reshape(-1), part.targets.reshape(-1)


_CHECKS: Final[tuple[Callable[[Setup, _Stated], Iterator[str]], ...]] = (
    _other_hosts,
    _fast_ports,
    _slow_nvlink,
    _idle_oversubscription,
)
