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
from clustersim.common.mapping_reader import flatten_keys
from clustersim.common.units import Dimension, format_bandwidth, parse_quantity
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import DeadLinkEffect
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
from clustersim.scenario.resolved import ResolvedScenario

FASTEST_PORT: Final = 100e9
"""Bytes/s of the fastest network port that is sold: 800 Gbit/s (ConnectX-8; 1,600 are announced), 2026."""
_ACCELERATOR_KEYS: Final = MappingProxyType(
    {"node.nvlink.bandwidth": "NVLink of", "node.nvlink.gpus": "NVLink domains of", "node.pcie.bandwidth": "PCIe of"}
)
"""Keys of a cluster that belong to its accelerator, and how they are called."""
_TIERS: Final = MappingProxyType({"leaf": LinkKind.LEAF, "spine": LinkKind.SPINE})
_LOW_VOLUME_GROUPS: Final = frozenset(
    role.name
    for role in (WORLD_GROUP, MODEL_PARALLEL_GROUP, EXPERT_MODEL_PARALLEL_GROUP, SHARDED_REPLICA_GROUP, HOST_GROUP)
)
"""Roles that send some bytes a step, or none over the network."""

FlatKeys = Mapping[str, Any]
"""What a file or a section says, by dotted keys."""


@dataclass(frozen=True, slots=True)
class _StatedKeys:
    """What is said of a machine. file: by the cluster's file; changed: by the scenario, instead."""

    file: FlatKeys
    overrides: FlatKeys

    def effective_text(self, key: str) -> str:
        """What holds for a key; empty where nobody says anything."""
        return str(self.overrides.get(key) or self.file_value(key) or "")

    def file_value(self, key: str) -> object:
        """What the file says and the scenario leaves; None otherwise."""
        segments = key.split(".")
        is_overridden = any(".".join(segments[:end]) in self.overrides for end in range(1, len(segments) + 1))
        return None if is_overridden else self.file.get(key)


def cluster_warnings(scenario: ResolvedScenario, overrides: Mapping[str, Any]) -> list[str]:
    """What is likely a mistake about the machine; changes: what replaces keys of the cluster's file."""
    stated = _StatedKeys(scenario.cluster.file_values, flatten_keys(overrides))
    return [warning for check in _CHECKS for warning in check(scenario, stated)]


@cache
def _packaged_clusters() -> Mapping[str, FlatKeys]:
    """What the files of all shipped clusters say, by name."""
    files = {name: data_files.find_file("clusters", name) for name in data_files.list_names("clusters")}
    return MappingProxyType({name: flatten_keys(data_files.read_mapping(path)) for name, path in files.items()})


def _clusters_with(accelerator: Accelerator) -> dict[str, FlatKeys]:
    """The shipped clusters of an accelerator, by name."""
    return {name: keys for name, keys in _packaged_clusters().items() if keys.get("accelerator") == accelerator.name}


def _mismatched_hosts(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """Accelerators whose links are not those of the machine that they stand in."""
    cluster = scenario.cluster
    for accelerator in cluster.accelerator_kinds()[0]:
        differences = [
            *_nvlink_generation_mismatch(accelerator, cluster.fabric),
            *_key_mismatches(accelerator, cluster, stated),
        ]
        if differences:
            matching_clusters = [*_clusters_with(accelerator)]
            owners = (
                f"; {_shortened_list(matching_clusters)} {'have' if len(matching_clusters) > 1 else 'has'} what belongs to it"
                if matching_clusters
                else ""
            )
            yield f"cluster: {accelerator.name} stands in {cluster.name}, with {', '.join(differences)}{owners}"


def _nvlink_generation_mismatch(accelerator: Accelerator, fabric: Fabric) -> Iterator[str]:
    table = fabric.links
    technology_ids = np.unique(table.technology[table.kind == LINK_KINDS.index(LinkKind.NVLINK)]).tolist()
    technologies = [TECHNOLOGIES[technology_id] for technology_id in technology_ids]
    if technologies and accelerator.nvlink is not None and technologies != [accelerator.nvlink]:
        yield f"{_shortened_list([technology.value for technology in technologies])} links instead of {accelerator.nvlink.value}"


def _key_mismatches(accelerator: Accelerator, cluster: Cluster, stated: _StatedKeys) -> Iterator[str]:
    """Where a shipped file that the scenario leaves as it is says what no cluster of the accelerator does."""
    if stated.file.get("accelerator") == accelerator.name or cluster.files[0].parent != data_files.category_folder(
        "clusters"
    ):
        return
    matching_clusters = _clusters_with(accelerator).values()
    for key, label in _ACCELERATOR_KEYS.items():
        value, expected = (
            stated.file_value(key),
            list(dict.fromkeys(cluster_keys[key] for cluster_keys in matching_clusters if key in cluster_keys)),
        )
        if value is not None and expected and value not in expected:
            yield f"{label} {value} instead of {' or '.join(map(str, expected))}"


def _shortened_list(names: Sequence[str], max_names: int = 3) -> str:
    """Some names."""
    return ", ".join(names[:max_names]) + f" and {len(names) - max_names} more" * (len(names) > max_names)


def _implausible_nic_bandwidth(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:  # noqa: ARG001 - as other checks
    """A network port at the rate of NVLink: networks are sold in bits."""
    key = "node.nic.bandwidth"
    text = stated.effective_text(key)
    rate = parse_quantity(text, Dimension.BANDWIDTH) if text else 0.0
    if rate > FASTEST_PORT * (1 + 1e-9):
        hint = f"; was {_strip_unit(text)} Gbit/s meant?" if text.endswith("GB/s") else ""
        yield (
            f"cluster.{key}: {text} is {rate * 8e-9:,.0f} Gbit/s, but no port of more than 800 Gbit/s is sold "
            f"(1,600 are announced){hint}"
        )


def _implausible_nvlink_bandwidth(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """NVLink in bits, which is sold in bytes, and often both ways together."""
    key, accelerator = "node.nvlink.bandwidth", scenario.cluster.accelerator
    text = stated.effective_text(key)
    if (
        "bit" in text
        and (rate := parse_quantity(text, Dimension.BANDWIDTH)) < (port := _nvlink_bandwidth(accelerator)) / 2
    ):
        yield (
            f"cluster.{key}: {text} is {format_bandwidth(rate)}, but {accelerator.name} has {format_bandwidth(port)} "
            f"of NVLink per direction ({format_bandwidth(2 * port)} in both); was {format_bandwidth(port)} meant?"
        )


def _nvlink_bandwidth(accelerator: Accelerator) -> float:
    """Bytes/s of an accelerator's NVLink: in its own clusters, or else the most of its generation; 0 if unknown."""
    generation = accelerator.nvlink.value if accelerator.nvlink else ""
    same_generation = [
        keys for keys in _packaged_clusters().values() if keys.get("node.nvlink.generation") == generation
    ]
    bandwidths = [keys.get("node.nvlink.bandwidth") for keys in _clusters_with(accelerator).values() or same_generation]
    return max((parse_quantity(bandwidth, Dimension.BANDWIDTH) for bandwidth in bandwidths if bandwidth), default=0.0)


def _strip_unit(text: str) -> str:
    return text.removesuffix("GB/s").strip()


def _ineffective_oversubscription(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """Dead links may lead transfers anywhere, so of them nothing is said."""
    has_dead_nics = any(nic.bandwidth_fraction == 0.0 for nic in scenario.degradations.nics)
    if has_dead_nics or any(isinstance(change.effect, DeadLinkEffect) for change in scenario.degradations.links):
        return
    for tier, kind in _TIERS.items():
        key = f"fabric.{tier}.oversubscription"
        if stated.overrides.get(key) not in (None, stated.file.get(key, 1)) and kind not in _used_link_kinds(scenario):
            yield f"cluster.{key} {stated.overrides[key]} changes nothing: {_unused_tier_reason(scenario, tier)}"


def _unused_tier_reason(scenario: ResolvedScenario, tier: str) -> str:
    """Whether the job is too small for a tier, or only keeps off it."""
    gpus, table = scenario.cluster.gpu_count, scenario.cluster.fabric.links
    if (table.kind == LINK_KINDS.index(_TIERS[tier])).any():
        return f"no transfer of this layout's {gpus:,} GPUs goes beyond the {tier} switches"
    return f"the {gpus:,} GPUs are under one {'leaf switch' if tier == 'leaf' else 'pod of spine switches'}"


def _used_link_kinds(scenario: ResolvedScenario) -> set[LinkKind]:
    """Kinds of links that messages along the pipeline and rings of all other groups cross."""
    fabric, kinds = scenario.cluster.fabric, set[LinkKind]()
    for name, groups in process_groups(scenario.layout, scenario.placement).items():
        if name not in _LOW_VOLUME_GROUPS and groups.members.shape[1] > 1:
            for sources, targets in [*_group_transfers(groups.members, fabric, ordered=groups.ordered)]:
                links = np.unique(fabric.find_paths(sources, targets).links)
                kinds |= {
                    LINK_KINDS[kind_index] for kind_index in np.unique(fabric.links.kind[links[links >= 0]]).tolist()
                }
    return kinds


def _group_transfers(members: IntArray, fabric: Fabric, *, ordered: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Who sends to whom in groups [groups, size]; rings keep to their rails, as all algorithms but all-to-all do."""
    if ordered:
        yield members[:, 0], members[:, 1]
        return
    for arrangement in group_topology(members, fabric):
        for phase in RingAlgorithm().phases(CollectiveType.ALL_REDUCE, arrangement):
            for flow in phase.flows:
                yield flow.sources.reshape(-1), flow.targets.reshape(-1)


_CHECKS: Final[tuple[Callable[[ResolvedScenario, _StatedKeys], Iterator[str]], ...]] = (
    _mismatched_hosts,
    _implausible_nic_bandwidth,
    _implausible_nvlink_bandwidth,
    _ineffective_oversubscription,
)
