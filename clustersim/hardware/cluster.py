"""Which machine does a scenario run on?

A cluster is an accelerator, a fabric that joins some number of them, and the name of the collective library
whose constants apply. Packaged clusters are YAML files in `topologies/clusters` that describe the fabric for
any number of nodes; a path may name such a file, a node-link graph (networkx's JSON) that lists every link, or
sites: data centres, each with a regular cluster, and the links between them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader, flatten_keys
from clustersim.hardware.accelerator import Accelerator, read_accelerator
from clustersim.hardware.allocation import Allocation, UnitSizes
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.clos_reader import read_clos, read_ecmp
from clustersim.hardware.graph_io import is_graph, read_graph, to_file_graph
from clustersim.hardware.host_memory import HostMemory
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.hardware.sites import Site, SitesFabric, unconnected_sites
from clustersim.hardware.sites_reader import has_sites, read_site_entries, read_site_links
from clustersim.hardware.topology import Fabric, FabricTier, find_site_ids

if TYPE_CHECKING:
    import networkx as nx

MAX_GPUS: Final = 2**20


@dataclass(frozen=True, slots=True)
class AcceleratorOverride:
    """Nodes with another accelerator than the cluster's main one."""

    node_ids: tuple[int, ...]
    accelerator: Accelerator


@dataclass(frozen=True, slots=True)
class Cluster:
    """`gpu_count` accelerators on a fabric, of one kind except on the nodes of `accelerator_overrides`.

    gpu_count: those of a job, the first ones of the fabric, which may have more; `machine_gpu_ids`: their ids on
    the machine. Ids of nodes and GPUs in files (`mixed`, `degradations`) are the machine's. library: collective
    constants, a name in `topologies/libraries` or a path; is_measured: the library's constants were fitted to
    published measurements of such machines; files: all files read: its own, the accelerator's, the library's, and
    those of accelerator_overrides; host_memory: of each node's host, None: unknown; file_values: values of a
    regular cluster's file by dotted keys, without overrides. gpus_per_node: of unlike sites, what all of
    their nodes' are multiples of.
    """

    name: str
    description: str
    accelerator: Accelerator
    fabric: Fabric
    gpu_count: int
    gpus_per_node: int
    library: str
    sources: Mapping[str, str]
    is_measured: bool
    files: tuple[Path, ...] = field(compare=False)
    accelerator_overrides: tuple[AcceleratorOverride, ...] = ()
    host_memory: HostMemory | None = None
    file_values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def node_count(self) -> int:
        """Number of nodes that have GPUs of the cluster."""
        return int(self.fabric.node_ids(np.arange(self.gpu_count)).max()) + 1

    @property
    def machine(self) -> Fabric:
        """The fabric under the machine's own ids of GPUs and nodes."""
        return self.fabric.machine if isinstance(self.fabric, RankMappedFabric) else self.fabric

    @property
    def sites(self) -> SitesFabric | None:
        """The machine's sites, under its own ids; None if there is only one."""
        return self.machine if isinstance(self.machine, SitesFabric) else None

    @property
    def site_ids(self) -> IntArray | None:
        """[gpus] site of each of the job's GPUs, by rank; None if the machine is one site."""
        return find_site_ids(self.fabric, np.arange(self.gpu_count))

    @property
    def machine_gpu_ids(self) -> IntArray:
        """[gpus] machine id of each of the job's GPUs."""
        return (
            self.fabric.gpu_ids[: self.gpu_count]
            if isinstance(self.fabric, RankMappedFabric)
            else np.arange(self.gpu_count)
        )

    @property
    def unit_sizes(self) -> UnitSizes:
        """GPUs of a node and of the largest NVLink domain."""
        machine = self.machine
        if isinstance(machine, ClosTopology):
            nvlink = machine.node.nvlink
            return UnitSizes(self.gpus_per_node, (nvlink and nvlink.full_domain_gpus) or machine.node.domain_gpus)
        return UnitSizes(self.gpus_per_node, int(np.bincount(machine.domain_ids(np.arange(machine.gpu_count))).max()))

    def with_rank_mapping(self, gpu_ids: IntArray) -> "Cluster":
        """The machine for a job on some of its GPUs: rank r on gpu_ids[r]."""
        return replace(self, fabric=RankMappedFabric(self.machine, gpu_ids), gpu_count=len(gpu_ids))

    def to_graph(self) -> "nx.DiGraph[str]":
        """The machine as a graph whose node-link data is a valid cluster file; bandwidths and latencies have units.

        Read back, it is the same machine, link for link, with routes found by search. Of a scenario's changes,
        degraded links are in the graph; a placement and nodes with other accelerators are not.
        """
        attributes: dict[str, Any] = {
            "description": self.description,
            "accelerator": self.accelerator.definition or data_files.portable_name(self.accelerator.files[0]),
            "library": data_files.portable_name(data_files.find_file("libraries", self.library)),
            "measured": self.is_measured,
        }
        if self.sources:
            attributes["sources"] = dict(self.sources)
        if self.host_memory is not None:
            attributes["host_memory"] = self.host_memory.to_section()
        return to_file_graph(self.machine.to_graph(), attributes)

    def accelerator_kinds(self) -> tuple[tuple[Accelerator, ...], IntArray]:
        """The distinct accelerators, and [gpus] the index of each GPU's one (all 0 if there is one kind)."""
        nodes = self.machine.node_ids(self.machine_gpu_ids)
        masks = [
            (
                self.accelerator,
                ~np.isin(nodes, [node for override in self.accelerator_overrides for node in override.node_ids]),
            )
        ]
        masks += [(override.accelerator, np.isin(nodes, override.node_ids)) for override in self.accelerator_overrides]
        kinds: list[Accelerator] = []
        kind_index = np.zeros(self.gpu_count, np.int64)
        for accelerator, mask in masks:
            if mask.any():
                kinds += [accelerator] * (accelerator not in kinds)
                kind_index[mask] = kinds.index(accelerator)
        return tuple(kinds), kind_index


def with_accelerators(cluster: Cluster, overrides: Sequence[tuple[tuple[int, ...], Accelerator]]) -> Cluster:
    """The cluster with other accelerators on some nodes, which must exist."""
    accelerator_overrides = tuple(AcceleratorOverride(node_ids, accelerator) for node_ids, accelerator in overrides)
    if not accelerator_overrides:
        return cluster
    files = (file for override in accelerator_overrides for file in override.accelerator.files)
    return replace(
        cluster,
        accelerator_overrides=(*cluster.accelerator_overrides, *accelerator_overrides),
        is_measured=False,
        files=(*cluster.files, *files),
    )


def load_machine(
    name_or_path: str, allocation: Allocation, job_gpus: int | None, overrides: Mapping[str, Any] | None
) -> Cluster:
    """Like `load_cluster`, but with as many GPUs as the allocation needs for a job of `job_gpus` (None: the file's).

    Where the fabric connects fewer, it is as large as it can be. Raises InputError.
    """
    machine = _load_cluster(name_or_path, None if job_gpus is None else 1, overrides, evenly=False)
    if not isinstance(machine.fabric, ClosTopology):  # graphs have a fixed size
        return replace(machine, gpu_count=machine.fabric.gpu_count)
    size = min(
        max(allocation.machine_gpus(job_gpus, machine.unit_sizes), machine.gpu_count), machine.fabric.max_gpus, MAX_GPUS
    )
    return machine if size == machine.gpu_count else _load_cluster(name_or_path, size, overrides, evenly=False)


def load_cluster(
    name_or_path: str, gpu_count: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Cluster:
    """Load a packaged cluster by name, or any cluster or graph file by path.

    gpu_count: instead of the file's own; overrides: values for keys of the file, dotted
    ({"fabric.spine.oversubscription": 7}) or nested; that of `accelerator` replaces the file's as a whole. NVLink
    domains of several nodes are filled evenly. Raises InputError.
    """
    return _load_cluster(name_or_path, gpu_count, overrides, evenly=True)


def _load_cluster(
    name_or_path: str, gpu_count: int | None, overrides: Mapping[str, Any] | None, *, evenly: bool
) -> Cluster:
    path = data_files.find_file("clusters", name_or_path)
    content = data_files.read_mapping(path)
    base = _without_accelerator(content) if "accelerator" in (overrides or {}) else content
    if is_graph(content):
        return _read_graph_cluster(MappingReader(path, base, {"graph": overrides or {}}), path, gpu_count)
    if has_sites(content):
        return _read_sites_cluster(MappingReader(path, base, overrides), path, gpu_count if evenly else None)
    cluster = _read_clos_cluster(MappingReader(path, base, overrides), path, gpu_count, evenly=evenly)
    return replace(cluster, is_measured=cluster.is_measured and not overrides, file_values=flatten_keys(content))


def _without_accelerator(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a cluster file whose accelerator is replaced as a whole, and not key by key."""
    rest = {key: value for key, value in content.items() if key != "accelerator"}
    return rest | {"graph": _without_accelerator(rest["graph"])} if isinstance(rest.get("graph"), Mapping) else rest


def describe_tiers(cluster: Cluster) -> tuple[FabricTier, ...]:
    """The tiers of the cluster's fabric, from the GPUs up."""
    return cluster.fabric.describe_tiers()


def _read_clos_cluster(section: MappingReader, path: Path, gpu_count: int | None, *, evenly: bool) -> Cluster:
    section.reject_renamed_keys("clusters")
    node = section.get_section("node")
    per_node = node.get_int("gpus", max_value=MAX_GPUS)
    count = _require_full_nodes(section, _requested_gpus(section, gpu_count), per_node)
    accelerator = read_accelerator(section, "accelerator")
    fabric = read_clos(section, count, accelerator.nvlink, evenly=evenly)
    cluster = _read_cluster(section, path, fabric, accelerator=accelerator, per_node=per_node)
    cluster = replace(cluster, host_memory=_read_host_memory(node))
    section.reject_unknown_keys()
    return cluster


def _read_graph_cluster(section: MappingReader, path: Path, gpu_count: int | None) -> Cluster:
    attributes = section.get_section("graph")
    attributes.reject_renamed_keys("clusters")
    accelerator = read_accelerator(attributes, "accelerator")
    fabric = _read_graph_fabric(section, accelerator)
    gpus_per_node = np.bincount(fabric.node_ids(np.arange(fabric.gpu_count))).tolist()
    if len(set(gpus_per_node)) > 1:
        raise section.input_error(
            "nodes", f"hosts have {min(gpus_per_node)} to {max(gpus_per_node)} GPUs; all must have the same number"
        )
    count = _require_full_nodes(section, fabric.gpu_count if gpu_count is None else gpu_count, gpus_per_node[0])
    if count > fabric.gpu_count:
        raise section.input_error("gpus", f"{count:,} GPUs do not fit; the graph has {fabric.gpu_count:,}")
    cluster = _read_cluster(attributes, path, fabric, accelerator=accelerator, per_node=gpus_per_node[0])
    cluster = replace(cluster, gpu_count=count, host_memory=_read_host_memory(attributes))
    section.reject_unknown_keys()
    return cluster


def _read_graph_fabric(section: MappingReader, accelerator: Accelerator) -> Fabric:
    from clustersim.hardware.graph_fabric import GraphFabric

    graph, ecmp = read_graph(section, accelerator.nvlink), read_ecmp(section.get_section("graph"))
    try:
        return GraphFabric(graph, ecmp)
    except InputError as error:
        raise section.input_error("edges", str(error)) from error


def _read_sites_cluster(section: MappingReader, path: Path, gpu_count: int | None) -> Cluster:
    """Sites, with the same fraction of each one's GPUs if the job has fewer."""
    entries = read_site_entries(section)
    counts = [entry.get_int("gpus", max_value=MAX_GPUS) for entry in entries]
    counts = counts if gpu_count is None else _scale_counts(section, counts, gpu_count)
    clusters = [
        load_cluster(entry.get_data_file("cluster", "clusters"), count)
        for entry, count in zip(entries, counts, strict=True)
    ]
    for entry in entries:
        entry.reject_unknown_keys()
    cluster = _join_sites(section, path, [entry.get_name("name") for entry in entries], clusters)
    section.reject_unknown_keys()
    return cluster


def _scale_counts(section: MappingReader, counts: Sequence[int], gpu_count: int) -> list[int]:
    """The GPUs of each site of a job of `gpu_count`: the same fraction of all of them."""
    total = sum(counts)
    scaled = [count * gpu_count // total for count in counts]
    if gpu_count > total or sum(scaled) != gpu_count or 0 in scaled:
        raise section.input_error(
            "sites",
            f"{gpu_count:,} GPUs are not the same fraction of each site; they have {total:,} "
            f"({' + '.join(f'{count:,}' for count in counts)})",
        )
    return scaled


def _join_sites(section: MappingReader, path: Path, names: Sequence[str], clusters: Sequence[Cluster]) -> Cluster:
    """One cluster of several sites; a single site is its cluster."""
    first = clusters[0]
    description = section.get_text("description") if section.has_key("description") else path.stem
    single = replace(first, name=path.stem, description=description, files=(path, *first.files))
    if len(clusters) == 1:
        section.has_key("links")
        return single
    _require_alike(section, names, clusters)
    fabric = SitesFabric(
        tuple(Site(name, cluster.fabric) for name, cluster in zip(names, clusters, strict=True)),
        read_site_links(section, names),
    )
    for source, target in unconnected_sites(fabric):
        raise section.input_error("links", f"no way leads from {names[source]} to {names[target]}")
    node_ends = np.cumsum([cluster.node_count for cluster in clusters]).tolist()
    host_memories = {cluster.host_memory for cluster in clusters}
    return replace(
        single,
        fabric=fabric,
        gpu_count=fabric.gpu_count,
        gpus_per_node=math.gcd(*(cluster.gpus_per_node for cluster in clusters)),
        is_measured=False,
        files=tuple(dict.fromkeys([path, *(file for cluster in clusters for file in cluster.files)])),
        accelerator_overrides=tuple(
            AcceleratorOverride(tuple(range(end - cluster.node_count, end)), cluster.accelerator)
            for cluster, end in zip(clusters, node_ends, strict=True)
            if cluster.accelerator != first.accelerator
        ),
        host_memory=first.host_memory if len(host_memories) == 1 else None,
        sources=section.get_section("sources").get_text_mapping() if section.has_key("sources") else {},
        file_values={},
    )


def _require_alike(section: MappingReader, names: Sequence[str], clusters: Sequence[Cluster]) -> None:
    """Raise InputError for sites that one job cannot have together."""
    first = clusters[0]
    for index, (name, cluster) in enumerate(zip(names, clusters, strict=True)):
        fabric = cluster.fabric
        if not isinstance(fabric, ClosTopology) or fabric.network is None:
            reason = "is a graph" if not isinstance(fabric, ClosTopology) else "has no network"
            raise section.input_error(
                f"sites[{index}].cluster",
                f"site {name} {reason}; a site has a regular cluster with node.nic and fabric",
            )
        if cluster.library != first.library:
            raise section.input_error(
                f"sites[{index}].cluster",
                f"site {name} has collective library {cluster.library}, site {names[0]} {first.library}; all sites "
                "need the same",
            )
        if fabric.direct_links != first.fabric.direct_links:  # type: ignore[attr-defined]
            raise section.input_error(
                f"sites[{index}].cluster", f"site {name} joins the GPUs of a node in another way than site {names[0]}"
            )


def _read_host_memory(section: MappingReader) -> HostMemory | None:
    """The hosts' memory, if the file describes it."""
    return HostMemory.from_section(section.get_section("host_memory")) if section.has_key("host_memory") else None


def _read_cluster(
    section: MappingReader, path: Path, fabric: Fabric, *, accelerator: Accelerator, per_node: int
) -> Cluster:
    library = section.get_data_file("library", "libraries") if section.has_key("library") else "nccl"
    return Cluster(
        name=path.stem,
        description=section.get_text("description") if section.has_key("description") else path.stem,
        accelerator=accelerator,
        fabric=fabric,
        gpu_count=fabric.gpu_count,
        gpus_per_node=per_node,
        library=library,
        sources=section.get_section("sources").get_text_mapping() if section.has_key("sources") else {},
        is_measured=section.get_bool("measured"),
        files=(path, *accelerator.files, data_files.find_file("libraries", library)),
    )


def _requested_gpus(section: MappingReader, gpu_count: int | None) -> int:
    """The number of GPUs that was asked for, else the file's, which is only needed then."""
    if section.has_key("gpus"):
        file_count = section.get_int("gpus", max_value=MAX_GPUS)
        return file_count if gpu_count is None else gpu_count
    if gpu_count is None:
        raise section.input_error("gpus", "is missing; state it here, or as cluster.gpus in a scenario")
    return gpu_count


def _require_full_nodes(section: MappingReader, gpu_count: int, per_node: int) -> int:
    """Validate a number of GPUs: in range, and whole nodes or a fraction of one."""
    if not 1 <= gpu_count <= MAX_GPUS:
        raise section.input_error("gpus", f"{gpu_count:,} GPUs are out of range; a cluster has 1 to {MAX_GPUS:,}")
    if gpu_count > per_node and gpu_count % per_node:
        below = gpu_count // per_node * per_node
        raise section.input_error(
            "gpus",
            f"{gpu_count:,} GPUs are not a multiple of the {per_node} per node; {below:,} or {below + per_node:,} are",
        )
    return gpu_count
