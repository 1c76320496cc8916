"""Which cluster do files describe that machines have? Slurm's topology.conf, NCCL's topology, `nvidia-smi topo -m`.

None of them says everything, so each changes a packaged cluster: topology.conf how nodes are joined, the other two what
is in a node. Names:

- slurm: `SwitchName=` with `Nodes=` and `Switches=` (topology/tree), or `BlockName=` with `BlockSizes=`
  (topology/block); slurm.schedmd.com/topology.conf.html.
- nccl-topology: the XML that NCCL writes to NCCL_TOPO_DUMP_FILE (NVIDIA/nccl, src/graph/xml.cc and topo.cc).
- nvidia-smi: the matrix of `nvidia-smi topo -m`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.graph_io import is_graph
from clustersim.interop.gpu_topology import read_nccl_topology, read_nvidia_smi
from clustersim.interop.machine_changes import MachineChanges
from clustersim.interop.slurm_topology import read_slurm_topology


@dataclass(frozen=True, slots=True)
class ImportedMachine:
    """The content of a cluster file, and sentences about what it takes over."""

    content: Mapping[str, Any]
    remarks: tuple[str, ...]


MACHINE_READERS: Final[Mapping[str, Callable[[str, str, Mapping[str, Any]], MachineChanges]]] = {
    "slurm": read_slurm_topology,
    "nccl-topology": read_nccl_topology,
    "nvidia-smi": read_nvidia_smi,
}
"""Readers of (text, source, the packaged cluster's content), by the name of what wrote the file."""


def import_machine(kind: str, text: str, source: str, base: str, gpu_count: int | None) -> ImportedMachine:
    """The cluster file of a machine. base: the cluster that it changes; gpu_count: of the machine."""
    content = data_files.read_mapping(data_files.find_file("clusters", base))
    if is_graph(content):
        raise InputError(f"{base}: is a graph, so {source} changes nothing in it; give --cluster a regular cluster")
    changes = MACHINE_READERS[kind](text, source, content)
    merged = _merged(content, changes.values)
    gpus = gpu_count or changes.gpus or content.get("gpus")
    merged |= {} if gpus is None else {"gpus": gpus}
    merged["description"] = f"{base}, changed by {source}"
    merged["measured"] = False
    merged["sources"] = {**content.get("sources", {}), "imported": f"{source}, by clustersim import {kind}"}
    return ImportedMachine(merged, (f"what it does not say is that of {base}", *changes.remarks))


def _merged(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The content with other values; None removes a key."""
    merged = dict(content)
    for key, value in values.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = dict(value) if isinstance(value, Mapping) else value
    return merged
