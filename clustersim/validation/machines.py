"""On which machine did a published run take place?

A row names the GPU and its interconnect: inside the node, then between nodes (`nvlink4 + 8x400G-ib-ndr`). A shipped
cluster of that GPU is taken, with the network ports that the row states; where it states none, the shipped cluster's.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from clustersim.errors import nearest
from clustersim.validation.cases import CannotPredictError, Case


@dataclass(frozen=True, slots=True)
class Place:
    """A shipped cluster. accelerator, nvlink: others than the cluster's own; node: GPUs of one."""

    cluster: str
    accelerator: str | None = None
    node: int = 8
    nvlink: str | None = None


PLACES: Final = {
    "v100-32gb": Place("dgx-2", node=16),  # rows of Megatron-LM on DGX-2, 16 GPUs a node
    "a100-sxm-40gb": Place("dgx-a100", "a100-sxm-40gb"),
    "a100-sxm-80gb": Place("dgx-a100"),
    "h100-sxm-80gb": Place("dgx-h100"),
    "h100-sxm-96gb": Place("dgx-h100", "h100-sxm-96gb"),
    "h800-sxm-80gb": Place("dgx-h100", "h800-sxm-80gb", nvlink="200 GB/s"),
    "h200-sxm-141gb": Place("hgx-h200"),
    "b200": Place("hgx-b200"),
    "b300": Place("hgx-b200", "b300-sxm-288gb"),
    "gb200": Place("gb200-nvl72", node=4),
    "gb300": Place("gb200-nvl72", "gb300", node=4),
}
_PORTS: Final = re.compile(r"(?:(\d+)x)?(\d+)G")
_PORT_OF: Final = {"dgx-2": 100, "dgx-a100": 200}  # Gbit/s of one port, where a row states a node's sum only
_USUAL_PORT: Final = 400


def cluster_section(case: Case, *, one_port: bool = False) -> dict[str, Any]:
    """The `cluster` section of a run; one_port: its software keeps one network port of each node busy."""
    gpu = case.text("gpu")
    if gpu not in PLACES:
        raise CannotPredictError(
            f"gpu {gpu or 'is not stated'}: there is no such machine; {nearest(gpu, PLACES)}", owed=False
        )
    place = PLACES[gpu]
    section: dict[str, Any] = {"name": place.cluster, "gpus": case.whole("n_gpus")}
    if place.accelerator:
        section["accelerator"] = place.accelerator
    ports = _ports(case.text("interconnect"), place)
    if one_port:
        ports = {**(ports or {}), "per_node": 1}
    node = {"nic": ports} if ports else {}
    if place.nvlink is not None:  # a part of H100's, as DeepSeek-V3's report says of H800 (arXiv:2412.19437)
        node["nvlink"] = {"bandwidth": place.nvlink}
    return section | ({"node": node} if node else {})


def _ports(interconnect: str, place: Place) -> dict[str, Any] | None:
    """The network ports of a node; None where the row does not state them."""
    _, _, network = interconnect.partition(" + ")
    stated = _PORTS.match(network)
    if stated is None:
        return None
    count, rate = stated.groups()
    if count is None and "per GPU" in network:
        return {"per_node": place.node, "bandwidth": f"{rate} Gbit/s"}
    if count is None:
        port = _PORT_OF.get(place.cluster, _USUAL_PORT)
        count, rate = str(max(1, int(rate) // port)), str(port)
    return {"per_node": int(count), "bandwidth": f"{rate} Gbit/s"}
