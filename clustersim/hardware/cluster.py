"""Which machine does a scenario run on?

A cluster is an accelerator, a fabric that joins some number of them, and the name of the library whose constants its
collectives follow. Shipped clusters are YAML files in `topologies/clusters` that say how the fabric is built for any
number of nodes; a path may name such a file, or a node-link graph (networkx's JSON) with every link spelt out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import Section, flat
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.allocation import Allocation, Units
from clustersim.hardware.clos import Clos
from clustersim.hardware.clos_reader import read_clos, read_ecmp
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.graph_io import is_graph, read_graph, written
from clustersim.hardware.host_memory import HostMemory
from clustersim.hardware.rank_mapping import Placed
from clustersim.hardware.topology import Fabric, Tier

if TYPE_CHECKING:
    import networkx as nx

MOST_GPUS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Mixed:
    """Nodes with another accelerator than the cluster's main one."""

    nodes: tuple[int, ...]
    accelerator: Accelerator


@dataclass(frozen=True, slots=True)
class Cluster:
    """`gpus` accelerators on a fabric, of one kind except on the nodes of `mixed`.

    gpus: those of a job, the first ones of the fabric, which may have more; `places`: the machine's numbers of them.
    Numbers of nodes and GPUs in files (`mixed`, disturbances) are the machine's.
    library: collective constants, a name in `topologies/libraries` or a path; measured: the library's constants were
    fitted to published measurements of such machines; files: all that it was read from: its own file, the
    accelerator's, the library's, and those of `mixed`; host: the memory of each node's
    host, None: not known; stated: what the file of a regular cluster says by dotted keys, without overrides.
    """

    name: str
    description: str
    accelerator: Accelerator
    fabric: Fabric
    gpus: int
    gpus_per_node: int
    library: str
    sources: Mapping[str, str]
    measured: bool
    files: tuple[Path, ...] = field(compare=False)
    mixed: tuple[Mixed, ...] = ()
    host: HostMemory | None = None
    stated: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nodes(self) -> int:
        """How many nodes have GPUs of the cluster."""
        return int(self.fabric.nodes(np.arange(self.gpus)).max()) + 1

    @property
    def machine(self) -> Fabric:
        """The fabric with the machine's own numbers of GPUs and nodes."""
        return self.fabric.machine if isinstance(self.fabric, Placed) else self.fabric

    @property
    def places(self) -> IntArray:
        """The GPU of the machine that each of the job's is: [gpus]."""
        return self.fabric.places[: self.gpus] if isinstance(self.fabric, Placed) else np.arange(self.gpus)

    @property
    def units(self) -> Units:
        """GPUs of a node and of the largest NVLink domain."""
        machine = self.machine
        if isinstance(machine, Clos):
            nvlink = machine.node.nvlink
            return Units(self.gpus_per_node, (nvlink and nvlink.whole) or machine.node.domain_gpus)
        return Units(self.gpus_per_node, int(np.bincount(machine.domains(np.arange(machine.gpus))).max()))

    def placed(self, places: IntArray) -> "Cluster":
        """The machine for a job on some of its GPUs: rank r on places[r]."""
        return replace(self, fabric=Placed(self.machine, places), gpus=len(places))

    def graph(self) -> "nx.DiGraph[str]":
        """The machine as a graph whose node-link data is the file of a cluster; bandwidths and latencies have units.

        Read back, it is the same machine, link for link; routes are then searched. Of what a scenario adds, links that
        are slow or dead are so in the graph; a placement and nodes with other accelerators are not in it.
        """
        _, accelerator, library, *_ = self.files
        about: dict[str, Any] = {
            "description": self.description,
            "accelerator": data_files.named(accelerator),
            "library": data_files.named(library),
            "measured": self.measured,
        }
        if self.sources:
            about["sources"] = dict(self.sources)
        if self.host is not None:
            about["host_memory"] = self.host.written()
        return written(self.machine.graph(), about)

    def kinds(self) -> tuple[tuple[Accelerator, ...], IntArray]:
        """The accelerators that are there, and which of them each GPU is, [gpus]; one kind alone is number 0."""
        nodes = self.machine.nodes(self.places)
        parts = [(self.accelerator, ~np.isin(nodes, [node for part in self.mixed for node in part.nodes]))]
        parts += [(part.accelerator, np.isin(nodes, part.nodes)) for part in self.mixed]
        kinds: list[Accelerator] = []
        kind = np.zeros(self.gpus, np.int64)
        for accelerator, there in parts:
            if there.any():
                kinds += [accelerator] * (accelerator not in kinds)
                kind[there] = kinds.index(accelerator)
        return tuple(kinds), kind


def mix(cluster: Cluster, parts: Sequence[tuple[tuple[int, ...], str]]) -> Cluster:
    """The cluster with other accelerators (a name or a path) on some nodes, which must exist."""
    mixed = tuple(Mixed(nodes, load_accelerator(name)) for nodes, name in parts)
    files = (data_files.find("accelerators", name) for _, name in parts)
    return replace(cluster, mixed=mixed, measured=False, files=(*cluster.files, *files)) if mixed else cluster


def load_machine(
    name_or_path: str, allocation: Allocation, gpus: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Cluster:
    """As `load_cluster`, but with as many GPUs as a machine needs to give a job `gpus` of them (None: the file's own).

    Where the fabric connects fewer it is as large as it can be. Raises InputError.
    """
    machine = _load(name_or_path, None if gpus is None else 1, overrides, evenly=False)
    if not isinstance(machine.fabric, Clos):  # a graph is as large as it is
        return replace(machine, gpus=machine.fabric.gpus)
    size = min(max(allocation.machine(gpus, machine.units), machine.gpus), machine.fabric.most, MOST_GPUS)
    return machine if size == machine.gpus else _load(name_or_path, size, overrides, evenly=False)


def load_cluster(name_or_path: str, gpus: int | None = None, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """Read a shipped cluster by name, or any cluster or graph file by path.

    gpus: how many, instead of the file's own number; overrides: values for keys of the file, dotted
    ({"fabric.spine.oversubscription": 7}) or nested. NVLink domains of several nodes are filled evenly. Raises
    InputError.
    """
    return _load(name_or_path, gpus, overrides, evenly=True)


def _load(name_or_path: str, gpus: int | None, overrides: Mapping[str, Any] | None, *, evenly: bool) -> Cluster:
    path = data_files.find("clusters", name_or_path)
    content = data_files.read_mapping(path)
    if is_graph(content):
        return _graph_cluster(Section(path, content, {"graph": overrides or {}}), path, gpus)
    cluster = _clos_cluster(Section(path, content, overrides), path, gpus, evenly=evenly)
    return replace(cluster, measured=cluster.measured and not overrides, stated=flat(content))


def describe(cluster: Cluster) -> tuple[Tier, ...]:
    """What the cluster's fabric is built of, one row per tier, from the GPUs up."""
    return cluster.fabric.tiers()


def _clos_cluster(section: Section, path: Path, gpus: int | None, *, evenly: bool) -> Cluster:
    node = section.section("node")
    per_node = node.count("gpus", most=MOST_GPUS)
    stated = section.count("gpus", most=MOST_GPUS)
    count = _legal(section, stated if gpus is None else gpus, per_node)
    accelerator = load_accelerator(section.on_shelf("accelerator", "accelerators"))
    fabric = read_clos(section, count, accelerator.nvlink, evenly=evenly)
    cluster = _cluster(section, path, fabric, accelerator=accelerator, per_node=per_node)
    cluster = replace(cluster, host=_host(node))
    section.finish()
    return cluster


def _graph_cluster(section: Section, path: Path, gpus: int | None) -> Cluster:
    about = section.section("graph")
    accelerator = load_accelerator(about.on_shelf("accelerator", "accelerators"))
    fabric = _graph_fabric(section, accelerator)
    sizes = np.bincount(fabric.nodes(np.arange(fabric.gpus))).tolist()
    if len(set(sizes)) > 1:
        raise section.refuse("nodes", f"hosts have {min(sizes)} to {max(sizes)} GPUs; all must have the same number")
    count = _legal(section, fabric.gpus if gpus is None else gpus, sizes[0])
    if count > fabric.gpus:
        raise section.refuse("gpus", f"{count:,} GPUs do not fit; the graph has {fabric.gpus:,}")
    cluster = _cluster(about, path, fabric, accelerator=accelerator, per_node=sizes[0])
    cluster = replace(cluster, gpus=count, host=_host(about))
    section.finish()
    return cluster


def _graph_fabric(section: Section, accelerator: Accelerator) -> GraphFabric:
    graph, ecmp = read_graph(section, accelerator.nvlink), read_ecmp(section.section("graph"))
    try:
        return GraphFabric(graph, ecmp)
    except InputError as error:
        raise section.refuse("edges", str(error)) from error


def _host(section: Section) -> HostMemory | None:
    """What is said of the hosts' memory, if anything is."""
    return HostMemory.read(section.section("host_memory")) if section.has("host_memory") else None


def _cluster(section: Section, path: Path, fabric: Fabric, *, accelerator: Accelerator, per_node: int) -> Cluster:
    name = section.on_shelf("accelerator", "accelerators")
    library = section.on_shelf("library", "libraries") if section.has("library") else "nccl"
    return Cluster(
        name=path.stem,
        description=section.text("description") if section.has("description") else path.stem,
        accelerator=accelerator,
        fabric=fabric,
        gpus=fabric.gpus,
        gpus_per_node=per_node,
        library=library,
        sources=section.section("sources").texts() if section.has("sources") else {},
        measured=section.flag("measured"),
        files=(path, data_files.find("accelerators", name), data_files.find("libraries", library)),
    )


def _legal(section: Section, gpus: int, per_node: int) -> int:
    """Check a number of GPUs on its own: not absurd, and whole nodes or a part of one."""
    if not 1 <= gpus <= MOST_GPUS:
        raise section.refuse("gpus", f"{gpus:,} GPUs are out of range; a cluster has 1 to {MOST_GPUS:,}")
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        raise section.refuse(
            "gpus",
            f"{gpus:,} GPUs are not a multiple of the {per_node} per node; {below:,} or {below + per_node:,} are",
        )
    return gpus
