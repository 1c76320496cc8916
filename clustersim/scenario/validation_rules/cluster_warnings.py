"""Which cluster settings are legal and still likely a mistake?

An accelerator in another one's hosts, with links that it does not have; NIC or NVLink bandwidths that no
product has, because bits were taken for bytes or the reverse, or both directions for one; oversubscription of
switches that no transfer crosses. One sentence each. Explicit overrides within these limits are trusted: only values
left as in the cluster's file are compared with the packaged clusters of the accelerator.
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
from clustersim.common.units import Dimension, format_bandwidth, format_flops, parse_quantity
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import DeadLinkEffect
from clustersim.hardware.link_technology import SCALE_UP_BANDWIDTH, SCALE_UP_TECHNOLOGIES, TECHNOLOGIES
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
"""Bytes/s of the fastest network port on the market: 800 Gbit/s (ConnectX-8; 1,600 are announced), 2026."""
_PCIE_ROUNDING: Final = 1.1
"""Above what a port has: 16 lanes of 32 GT/s are 64 GB/s as printed, and 63 GB/s as they are coded."""
_SPARSITY_SPEEDUP: Final = 2.0  # of matmuls with 2:4 structured sparsity, on data sheets
_SPARSITY_TOLERANCE: Final = 0.06
_MAX_LIKE_BANDWIDTH: Final = 1.5  # memory bandwidth relative to that of a chip of the same generation
_ACCELERATOR_KEYS: Final = MappingProxyType(
    {"node.nvlink.bandwidth": "NVLink of", "node.nvlink.gpus": "NVLink domains of", "node.pcie.bandwidth": "PCIe of"}
)
"""Cluster keys that are determined by the accelerator, with their labels."""
_TIERS: Final = MappingProxyType({"leaf": LinkKind.LEAF, "spine": LinkKind.SPINE})
_LOW_VOLUME_GROUPS: Final = frozenset(
    comm_group.name
    for comm_group in (
        WORLD_GROUP,
        MODEL_PARALLEL_GROUP,
        EXPERT_MODEL_PARALLEL_GROUP,
        SHARDED_REPLICA_GROUP,
        HOST_GROUP,
    )
)
"""Comm groups that send only a few bytes per step, or none over the network."""

FlatKeys = Mapping[str, Any]
"""Values of a file or section by dotted key."""


@dataclass(frozen=True, slots=True)
class _StatedKeys:
    """Stated values of a cluster. file: of the cluster's file; overrides: of the scenario."""

    file: FlatKeys
    overrides: FlatKeys

    def effective_text(self, key: str) -> str:
        """The effective value of a key as text; empty if not stated."""
        return str(self.overrides.get(key) or self.file_value(key) or "")

    def file_value(self, key: str) -> object:
        """The file's value of a key unless the scenario overrides it; None otherwise."""
        segments = key.split(".")
        is_overridden = any(".".join(segments[:end]) in self.overrides for end in range(1, len(segments) + 1))
        return None if is_overridden else self.file.get(key)


def cluster_warnings(scenario: ResolvedScenario, overrides: Mapping[str, Any]) -> list[str]:
    """Likely mistakes about the cluster; overrides: keys that replace those of the cluster's file."""
    stated = _StatedKeys(scenario.cluster.file_values, flatten_keys(overrides))
    return [warning for check in _CHECKS for warning in check(scenario, stated)]


def _projected_accelerators(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:  # noqa: ARG001 - as other checks
    """Accelerators that nobody has measured, because they are not sold yet."""
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        if accelerator.is_projection:
            yield (
                f"cluster: {accelerator.name} is a projection from announced figures; nothing of it was measured, so "
                "its step times are projections too"
            )


def _sparse_peaks(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:  # noqa: ARG001 - as other checks
    """Peaks of twice those of the accelerator that one is like, with memory that is no faster: of sparse matmuls."""
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        base = None if accelerator.like is None else _packaged_accelerator(accelerator.like)
        if base is None or accelerator.memory_bandwidth > _MAX_LIKE_BANDWIDTH * base.memory_bandwidth:
            continue
        doubled = [
            dtype
            for dtype in accelerator.peak.keys() & base.peak.keys()
            if abs(accelerator.peak[dtype] / base.peak[dtype] - _SPARSITY_SPEEDUP) < _SPARSITY_TOLERANCE
        ]
        if doubled:
            fastest = max(doubled, key=lambda dtype: accelerator.peak[dtype])
            yield (
                f"cluster: peak.{fastest.value} of {accelerator.name}, {format_flops(accelerator.peak[fastest])}, is "
                f"twice that of {base.name}; data sheets print it with structured sparsity, peak is the dense rate"
            )


def _packaged_accelerator(name: str) -> Accelerator | None:
    """The packaged accelerator of that name; None for a user's own."""
    return load_accelerator(name) if name in data_files.list_names("accelerators") else None


@cache
def _clusters_with(accelerator_name: str) -> Mapping[str, FlatKeys]:
    """The flattened files of the packaged clusters with an accelerator, by name; only files that name it are parsed."""
    paths = {name: data_files.find_file("clusters", name) for name in data_files.list_names("clusters")}
    naming = {name: path for name, path in paths.items() if accelerator_name in data_files.read_text(path)}
    clusters = {name: flatten_keys(data_files.read_mapping(path)) for name, path in naming.items()}
    return MappingProxyType({name: keys for name, keys in clusters.items() if keys["accelerator"] == accelerator_name})


def _mismatched_hosts(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """Accelerators whose NVLink or PCIe differs from that of the cluster they are placed in."""
    cluster = scenario.cluster
    if cluster.sites is not None:
        return  # each site has the links of its own cluster
    for accelerator in cluster.accelerator_kinds()[0]:
        differences = [
            *_nvlink_generation_mismatch(accelerator, cluster.fabric),
            *_key_mismatches(accelerator, cluster, stated),
        ]
        if differences:
            matching_clusters = [*_clusters_with(accelerator.name)]
            owners = (
                f"; {_shortened_list(matching_clusters)} {'have' if len(matching_clusters) > 1 else 'has'} what "
                "belongs to it"
                if matching_clusters
                else ""
            )
            yield (
                f"cluster: {accelerator.name} stands in {cluster.name} and has the cluster's links, with "
                f"{', '.join(differences)}{owners}"
            )


def _nvlink_generation_mismatch(accelerator: Accelerator, fabric: Fabric) -> Iterator[str]:
    table = fabric.links
    technology_ids = np.unique(table.technology[table.kind == LINK_KINDS.index(LinkKind.NVLINK)]).tolist()
    technologies = [TECHNOLOGIES[technology_id] for technology_id in technology_ids]
    if technologies and accelerator.nvlink is not None and technologies != [accelerator.nvlink]:
        yield (
            f"{_shortened_list([technology.value for technology in technologies])} links instead of "
            f"{accelerator.nvlink.value}"
        )


def _key_mismatches(accelerator: Accelerator, cluster: Cluster, stated: _StatedKeys) -> Iterator[str]:
    """Accelerator keys of an unchanged packaged file that match no packaged cluster of the accelerator."""
    if stated.file.get("accelerator") == accelerator.name or cluster.files[0].parent != data_files.category_folder(
        "clusters"
    ):
        return
    matching_clusters = _clusters_with(accelerator.name).values()
    for key, label in _ACCELERATOR_KEYS.items():
        value, expected = (
            stated.file_value(key),
            list(dict.fromkeys(cluster_keys[key] for cluster_keys in matching_clusters if key in cluster_keys)),
        )
        if value is not None and expected and value not in expected:
            yield f"{label} {value} instead of {' or '.join(map(str, expected))}"


def _shortened_list(names: Sequence[str]) -> str:
    """The first three names, and a count of the others."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _implausible_nic_bandwidth(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:  # noqa: ARG001 - as other checks
    """A network port with NVLink's bandwidth: network bandwidths are quoted in bits."""
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
    """NVLink bandwidth in bits: it is quoted in bytes, and often for both directions together."""
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


def _bidirectional_nvlink_bandwidth(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """More NVLink than there is per direction: datasheets print both directions together."""
    key, accelerator = "node.nvlink.bandwidth", scenario.cluster.accelerator
    text = stated.effective_text(key)
    is_of_other_file = key not in stated.overrides and stated.file.get("accelerator") != accelerator.name
    if not text or is_of_other_file:  # then the accelerator stands in another one's hosts, which is said
        return
    generation = SCALE_UP_TECHNOLOGIES.get(stated.effective_text("node.nvlink.generation"), accelerator.nvlink)
    if generation is None or (generation is accelerator.nvlink and _is_of_packaged_file(scenario, stated, key)):
        return
    port = _nvlink_bandwidth(accelerator) if generation is accelerator.nvlink else SCALE_UP_BANDWIDTH[generation]
    if parse_quantity(text, Dimension.BANDWIDTH) > port * (1 + 1e-9):
        yield (
            f"cluster.{key}: {text} is more than the {format_bandwidth(port)} per direction of {generation.value} of "
            f"{accelerator.name} ({format_bandwidth(2 * port)} is both directions together); was "
            f"{format_bandwidth(port)} meant?"
        )


def _bidirectional_pcie_bandwidth(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """More PCIe than the accelerator has per direction; left out where no packaged cluster says how much that is."""
    key, accelerator = "node.pcie.bandwidth", scenario.cluster.accelerator
    text = stated.effective_text(key)
    is_of_other_file = key not in stated.overrides and stated.file.get("accelerator") != accelerator.name
    if not text or is_of_other_file or _is_of_packaged_file(scenario, stated, key):
        return
    port = _packaged_bandwidth(accelerator, key, default=0.0)
    if port and parse_quantity(text, Dimension.BANDWIDTH) > port * _PCIE_ROUNDING:
        yield (
            f"cluster.{key}: {text} is more than the {format_bandwidth(port)} per direction that {accelerator.name} "
            f"has ({format_bandwidth(2 * port)} is both directions together); was {format_bandwidth(port)} meant?"
        )


def _is_of_packaged_file(scenario: ResolvedScenario, stated: _StatedKeys, key: str) -> bool:
    """Whether a key has the value of a packaged file of the accelerator: the largest such value is at least that."""
    is_packaged = scenario.cluster.files[0].parent == data_files.category_folder("clusters")
    is_same = stated.file.get("accelerator") == scenario.cluster.accelerator.name
    return is_packaged and is_same and stated.file_value(key) is not None


def _nvlink_bandwidth(accelerator: Accelerator) -> float:
    """NVLink bytes/s of an accelerator, per direction: of its packaged clusters, else of its generation, else 0."""
    port = 0.0 if accelerator.nvlink is None else SCALE_UP_BANDWIDTH[accelerator.nvlink]
    return _packaged_bandwidth(accelerator, "node.nvlink.bandwidth", default=port)


def _packaged_bandwidth(accelerator: Accelerator, key: str, *, default: float) -> float:
    """The largest bytes/s that a key has in packaged clusters of an accelerator; the default where none has it."""
    bandwidths = (keys.get(key) for keys in _clusters_with(accelerator.name).values())
    return max(
        (parse_quantity(bandwidth, Dimension.BANDWIDTH) for bandwidth in bandwidths if bandwidth), default=default
    )


def _strip_unit(text: str) -> str:
    return text.removesuffix("GB/s").strip()


def _ineffective_oversubscription(scenario: ResolvedScenario, stated: _StatedKeys) -> Iterator[str]:
    """Oversubscribed tiers that no transfer crosses; skipped with dead links, which may reroute transfers anywhere."""
    has_dead_nics = any(nic.bandwidth_fraction == 0.0 for nic in scenario.degradations.nics)
    if has_dead_nics or any(isinstance(change.effect, DeadLinkEffect) for change in scenario.degradations.links):
        return
    for tier, kind in _TIERS.items():
        key = f"fabric.{tier}.oversubscription"
        if stated.overrides.get(key) not in (None, stated.file.get(key, 1)) and kind not in _used_link_kinds(scenario):
            yield f"cluster.{key} {stated.overrides[key]} changes nothing: {_unused_tier_reason(scenario, tier)}"


def _unused_tier_reason(scenario: ResolvedScenario, tier: str) -> str:
    """Why a tier is unused: the job is too small for it, or its groups do not cross it."""
    gpus, table = scenario.cluster.gpu_count, scenario.cluster.fabric.links
    if (table.kind == LINK_KINDS.index(_TIERS[tier])).any():
        return f"no transfer of this layout's {gpus:,} GPUs goes beyond the {tier} switches"
    return f"the {gpus:,} GPUs are under one {'leaf switch' if tier == 'leaf' else 'pod of spine switches'}"


def _used_link_kinds(scenario: ResolvedScenario) -> set[LinkKind]:
    """Link kinds used by pipeline messages and by rings of all other comm groups."""
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
    """Source and target ranks of transfers in groups [groups, size].

    Rings stay on their rails, as all algorithms but all-to-all do.
    """
    if ordered:
        yield members[:, 0], members[:, 1]
        return
    for topology in group_topology(members, fabric):
        for phase in RingAlgorithm().phases(CollectiveType.ALL_REDUCE, topology):
            for flow in phase.flows:
                yield flow.sources.reshape(-1), flow.targets.reshape(-1)


_CHECKS: Final[tuple[Callable[[ResolvedScenario, _StatedKeys], Iterator[str]], ...]] = (
    _projected_accelerators,
    _sparse_peaks,
    _mismatched_hosts,
    _implausible_nic_bandwidth,
    _implausible_nvlink_bandwidth,
    _bidirectional_nvlink_bandwidth,
    _bidirectional_pcie_bandwidth,
    _ineffective_oversubscription,
)
