"""What is in a node, by NCCL's topology or `nvidia-smi topo -m`?

GPUs, how NVLink joins them (through switches, or which pairs by how many links), NICs and their rate, root complexes.
A link of NVLink has the bandwidth of its generation (NVIDIA/nccl, src/graph/topo.h: SM70_NVLINK_BW and others are what
NCCL reaches; rates of links per direction are 25 GB/s for NVLink 2 to 4 and 50 for NVLink 5, datasheets).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree

from clustersim.common.errors import InputError
from clustersim.interop.machine_changes import MachineChanges

_MAX_TEXT: Final = 5_000_000
_MAX_GPUS: Final = 1_024
_LINK_BANDWIDTH: Final = {70: 25.0, 80: 25.0, 90: 25.0, 100: 50.0, 103: 50.0}
"""GB/s of one NVLink, per direction, by compute capability."""
_GENERATIONS: Final = {70: "nvlink2", 80: "nvlink3", 90: "nvlink4", 100: "nvlink5", 103: "nvlink5"}
_LANE_GBIT: Final = {"8.0": 8 * 128 / 130, "16.0": 16 * 128 / 130, "32.0": 32 * 128 / 130, "64.0": 64.0, "5.0": 4.0}
"""Gbit/s that a PCIe lane carries, by its GT/s (PCI-SIG: 128b/130b from 8 GT/s on, 8b/10b below)."""
_MAX_LINKS: Final = 18
"""NVLinks of a GPU: where all pairs have as many as need more, each GPU has these to switches."""
_NIC_CLASSES: Final = ("0x0200", "0x0207")
"""PCI classes of Ethernet and InfiniBand controllers."""
_NVSWITCH: Final = "0x068000"
_CELL: Final = re.compile(r"X|NV\d+|SYS|NODE|PHB|PXB|PIX|OK|NS|N/A|C2C")
_ESCAPES: Final = re.compile("\x1b\\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class _Node:
    """One node. links: NVLinks between pairs of GPUs, by (lower, higher); switched: NVLinks of each GPU to switches.

    has_links: whether NVLink would be listed.
    """

    gpus: int
    switched: int
    links: Mapping[tuple[int, int], int]
    nics: int
    nic_gbit: float | None
    bridges: int
    has_links: bool = True
    pcie_gbytes: float | None = None
    capability: int | None = None


# NCCL's topology


def read_nccl_topology(text: str, source: str, base: Mapping[str, Any]) -> MachineChanges:
    """The changes of NCCL's topology XML. base: the content of the cluster that it changes."""
    if len(text) > _MAX_TEXT:
        raise InputError(f"{source}: has {len(text):,} characters; a topology of NCCL has at most {_MAX_TEXT:,}")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{source}: declares a document type, which NCCL's topology does not")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, RecursionError) as error:
        raise InputError(f"{source}: is not XML: {error}") from None
    if root.tag != "system":
        raise InputError(f"{source}: its root is {root.tag!r}, not system, so it is no topology of NCCL")
    if root.find(".//xgmi") is not None or root.find(".//gpu[@gcn]") is not None:
        raise InputError(
            f"{source}: is RCCL's, of AMD's GPUs, whose links (xGMI) are not read; name a packaged cluster"
        )
    return _changes(_nccl_node(root, source), source, base)


def _nccl_node(root: ElementTree.Element, source: str) -> _Node:
    hosts = {cpu.get("host_hash") for cpu in root.iter("cpu")}
    if len(hosts) > 1:
        raise InputError(f"{source}: has {len(hosts)} hosts; give the dump of a run on one node")
    is_dump = root.find(".//gpu") is not None  # a file for NCCL_TOPO_FILE has slots of devices alone
    slots = [pci for pci in root.iter("pci") if (pci.find("gpu") is not None if is_dump else _is_gpu_place(pci))]
    if not slots:
        raise InputError(f"{source}: has no GPU; NCCL writes them to NCCL_TOPO_DUMP_FILE when a run begins")
    numbers = {pci.get("busid", "").casefold(): index for index, pci in enumerate(slots)}
    switched, links = 0, dict[tuple[int, int], int]()
    for index, pci in enumerate(slots):
        switch_links = 0
        for link in pci.iter("nvlink"):
            count, target = _integer(link.get("count")), numbers.get(link.get("target", "").casefold())
            if link.get("tclass") == _NVSWITCH:
                switch_links += count
            elif target is not None and target != index:
                pair = (min(index, target), max(index, target))
                links[pair] = max(links.get(pair, 0), count)
        switched = max(switched, switch_links)
    speeds = [_integer(net.get("speed")) / 1000 for net in _distinct_nets(root)]
    nic_places = [pci for pci in root.iter("pci") if pci.get("class", "").startswith(_NIC_CLASSES)]
    return _Node(
        gpus=len(slots),
        switched=switched,
        links=links,
        nics=len(speeds) or len(nic_places),
        nic_gbit=max(speeds, default=None),
        bridges=len([cpu for cpu in root.iter("cpu") if any(pci in slots for pci in cpu.iter("pci"))]),
        has_links=is_dump,
        pcie_gbytes=_pcie_gbytes(slots[0]),
        capability=_integer(next((gpu.get("sm") for gpu in slots[0].iter("gpu")), None)) or None,
    )


def _is_gpu_place(pci: ElementTree.Element) -> bool:
    return pci.get("class", "").startswith("0x03")


def _distinct_nets(root: ElementTree.Element) -> list[ElementTree.Element]:
    """Network devices, each once: a socket's is listed below each CPU."""
    return list({net.get("name", str(index)): net for index, net in enumerate(root.iter("net"))}.values())


def _integer(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 else 0


def _pcie_gbytes(pci: ElementTree.Element) -> float | None:
    """Bandwidth of a device's link, GB/s per direction; None where the virtual machine hides it."""
    lane, width = _LANE_GBIT.get(pci.get("link_speed", "").split(" ")[0]), _integer(pci.get("link_width"))
    return None if lane is None or not width else lane * width / 8


# nvidia-smi topo -m


def read_nvidia_smi(text: str, source: str, base: Mapping[str, Any]) -> MachineChanges:
    """The changes of the matrix that `nvidia-smi topo -m` prints. base: the content of the cluster that it changes."""
    lines = [_ESCAPES.sub("", line) for line in text[:_MAX_TEXT].splitlines()]
    is_header = re.compile(r"\s*GPU0(\s+(GPU1|CPU|NIC|mlx|bnxt|rdma|irdma)|\s*$)")
    header = next((line.split() for line in lines if is_header.match(line)), None)
    if header is None:
        raise InputError(f"{source}: has no header with GPU0, as nvidia-smi topo -m prints it")
    names = [name for name in header if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+|bnxt\w+|rdma\w+|irdma\w+", name)]
    gpus = sum(name.startswith("GPU") for name in names)
    rows = {
        cells[0]: cells[1:]
        for cells in (line.split() for line in lines)
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and len(cells) > gpus and _CELL.fullmatch(cells[1])
    }
    listed = [rows[f"GPU{index}"][:gpus] for index in range(min(gpus, _MAX_GPUS)) if f"GPU{index}" in rows]
    if len(listed) < gpus:
        raise InputError(
            f"{source}: has rows for {len(listed)} of {gpus} GPUs; give all that nvidia-smi topo -m prints"
        )
    return _changes(_matrix_node(listed, len(names) - gpus), source, base)


def _matrix_node(matrix: Sequence[Sequence[str]], nics: int) -> _Node:
    gpus = len(matrix)
    links = {
        (first, second): int(cell[2:])
        for first, row in enumerate(matrix)
        for second, cell in enumerate(row)
        if first < second and re.fullmatch(r"NV\d+", cell)
    }
    counts = set(links.values())
    is_full = gpus > 2 and len(links) == gpus * (gpus - 1) // 2 and len(counts) == 1
    is_switched = is_full and max(counts) * (gpus - 1) > _MAX_LINKS
    bridges = 2 if any("SYS" in row for row in matrix) and gpus % 2 == 0 else 1
    return _Node(
        gpus=gpus,
        switched=max(counts) if is_switched else 0,
        links={} if is_switched else links,
        nics=nics,
        nic_gbit=None,
        bridges=bridges,
    )


# Both


def _changes(node: _Node, source: str, base: Mapping[str, Any]) -> MachineChanges:
    base_node = base["node"]
    remarks: list[str] = []
    capability = node.capability or _capability_of(base)
    if node.capability is not None and _capability_of(base) not in (None, node.capability):
        listed, expected = node.capability / 10, (_capability_of(base) or 0) / 10
        raise InputError(
            f"{source}: its GPUs have compute capability {listed:.1f}, those of {base['accelerator']} have "
            f"{expected:.1f}; give --cluster one with such GPUs"
        )
    values: dict[str, Any] = {"gpus": node.gpus}
    if node.has_links:
        values["nvlink"] = _nvlink(node, base_node, capability, source)
    else:
        values["nvlink"] = base_node.get("nvlink")
        remarks.append("it lists no NVLink, which is that of the cluster")
    _remark_on_other_links(values["nvlink"], base_node, remarks)
    if node.pcie_gbytes is not None:
        values["pcie"] = {"bandwidth": f"{node.pcie_gbytes:.4g} GB/s", "latency": _latency(base_node.get("pcie"))}
    if values["nvlink"] is None or node.links:
        values["host"] = _host(node, base_node)
    values["nic"] = _nic(node, base_node, remarks)
    changes: dict[str, Any] = {"node": values}
    if values["nic"] is None:
        changes["fabric"] = None
        remarks.append("no NIC is listed, so it is one node")
    return MachineChanges(changes, node.gpus if values["nic"] is None else None, tuple(remarks))


def _remark_on_other_links(nvlink: Mapping[str, Any] | None, base_node: Mapping[str, Any], remarks: list[str]) -> None:
    """A remark where NVLink is not as fast as the cluster's, whose GPUs may be others."""
    old, new = (base_node.get("nvlink") or {}).get("bandwidth"), (nvlink or {}).get("bandwidth")
    if old != new:
        remarks.append(f"NVLink of a GPU is {new or 'none'}, the cluster's {old or 'none'}: are these the same GPUs?")


def _capability_of(base: Mapping[str, Any]) -> int | None:
    """The compute capability of a cluster's GPUs, by their name; None: not known."""
    name = str(base.get("accelerator", ""))
    capabilities = {"v100": 70, "a100": 80, "a800": 80, "h100": 90, "h200": 90, "h800": 90, "h20": 90, "gh200": 90,
             "b200": 100, "gb200": 100, "b300": 103, "gb300": 103}  # fmt: skip
    return next((capability for key, capability in capabilities.items() if name.split("-")[0] == key), None)


def _nvlink(node: _Node, base_node: Mapping[str, Any], capability: int | None, source: str) -> dict[str, Any] | None:
    """NVLink of the node; None: there is none."""
    if not node.switched and not node.links:
        return None
    rate = _LINK_BANDWIDTH.get(capability or 0)
    if rate is None:
        raise InputError(f"{source}: the rate of a link of its GPUs is not known; give --cluster one with such GPUs")
    latency = _latency(base_node.get("nvlink"))
    generation = _GENERATIONS[capability or 0]
    common = {"latency": latency, "generation": generation}
    if node.switched:
        base_domain = (base_node.get("nvlink") or {}).get("gpus", 0)
        domain = (
            base_domain if base_domain > base_node["gpus"] else node.gpus
        )  # of several nodes, of which one is listed
        return {"gpus": domain, "bandwidth": f"{node.switched * rate:g} GB/s", "links": None, **common}
    degrees = [sum(count for pair, count in node.links.items() if gpu in pair) for gpu in range(node.gpus)]
    pairs = [list(pair) for pair, count in sorted(node.links.items()) for _ in range(count)]
    if min(degrees) and node.gpus > 2 and len(node.links) > node.gpus // 2:
        return {"gpus": node.gpus, "bandwidth": f"{max(degrees) * rate:g} GB/s", "links": pairs, **common}
    return {"gpus": 2, "bandwidth": f"{max(degrees) * rate:g} GB/s", "links": None, **common}


def _latency(section: Any) -> Any:
    return section.get("latency", "0.6 us") if isinstance(section, Mapping) else "0.6 us"


def _host(node: _Node, base_node: Mapping[str, Any]) -> dict[str, Any]:
    """Root complexes; between them what NCCL assumes for present Intel CPUs, ERP_QPI_BW in src/graph/topo.h."""
    base_host = base_node.get("host") or {}
    bridges = max(1, node.bridges if node.gpus % max(1, node.bridges) == 0 else 1)
    return {
        "bridges": bridges,
        "bandwidth": base_host.get("bandwidth", "40 GB/s"),
        "latency": base_host.get("latency", "0.5 us"),
    }


def _nic(node: _Node, base_node: Mapping[str, Any], remarks: list[str]) -> dict[str, Any] | None:
    """NICs: as many as are listed, if they divide among the GPUs."""
    if not node.nics:
        return None
    base_nic = base_node.get("nic") or {}
    count = node.nics
    if count % node.gpus and node.gpus % count:
        count = max(one for one in range(1, min(count, node.gpus) + 1) if node.gpus % one == 0)
        remarks.append(f"{count} of {node.nics} NICs are taken for the network of GPUs, the others for that of hosts")
    if node.nic_gbit is None:
        remarks.append(f"NICs have the rate of the cluster's, {base_nic.get('bandwidth')}")
    rate = base_nic.get("bandwidth", "100 Gbit/s") if node.nic_gbit is None else f"{node.nic_gbit:g} Gbit/s"
    network = base_nic.get("network", "infiniband")
    return {"per_node": count, "bandwidth": rate, "latency": base_nic.get("latency", "0.7 us"), "network": network}
