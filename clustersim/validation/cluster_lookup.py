"""On which machine did a published run take place?

A row names the GPU and its interconnect (see `interconnect_notation`). A shipped cluster of that GPU is taken, with the links
that the row states; where it states none, the shipped cluster's.
"""

from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import BytesPerSecond
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.interconnect_notation import Interconnect, Ports, read_interconnect


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
    "b300": Place("hgx-b300"),
    "gb200": Place("gb200-nvl72", node=4),
    "gb300": Place("gb300-nvl72", node=4),
    **{gpu: Place(gpu) for gpu in ("mi300x", "mi325x", "mi355x")},
}
_OF_SOURCES: Final = {  # where its authors say elsewhere what they ran on
    # PyTorch's own H100 of 96 GB and 500 W: pytorch/torchtitan, benchmarks/*_llama3_h100_*.md, of December 2024 and (by
    # authors of torchao) June 2025
    ("torchao", "h100-sxm-80gb"): "h100-sxm-96gb",
}
_PORT_OF: Final = {  # of one port, where a row states a node's sum only
    **{"dgx-2": 12.5e9, "dgx-a100": 25e9},
    **dict.fromkeys(("hgx-b300", "gb300-nvl72"), 100e9),
}
_USUAL_PORT: Final = 50e9


def cluster_section(case: Case) -> dict[str, Any]:
    """The `cluster` section of a run."""
    gpu = _OF_SOURCES.get((case.text("source"), case.text("gpu")), case.text("gpu"))
    if gpu not in PLACES:
        raise CannotPredictError(
            f"gpu {gpu or 'is not stated'}: there is no such machine; {suggest_nearest(gpu, PLACES)}", owed=False
        )
    place = PLACES[gpu]
    section: dict[str, Any] = {"name": place.cluster, "gpus": case.whole("n_gpus")}
    if place.accelerator:
        section["accelerator"] = place.accelerator
    joined = interconnect_of(case)
    ports = _ports(joined.ports or Ports(), place)
    node = {"nic": ports} if ports else {}
    nvlink = _nvlink(joined, place)
    if nvlink:
        node["nvlink"] = nvlink
    return section | ({"node": node} if node else {})


def interconnect_of(case: Case) -> Interconnect:
    """What a row states of its links; raise CannotPredictError for words that are not known."""
    try:
        return read_interconnect(case.text("interconnect"))
    except InputError as error:
        raise CannotPredictError(str(error), owed=False) from error


def _nvlink(joined: Interconnect, place: Place) -> dict[str, Any]:
    """What differs from the shipped cluster's NVLink."""
    if joined.rate is not None:
        return {"bandwidth": f"{joined.rate!r} B/s"}
    # a part of H100's, as DeepSeek-V3's report says of H800 (arXiv:2412.19437)
    return {"bandwidth": place.nvlink} if place.nvlink else {}


def _ports(ports: Ports, place: Place) -> dict[str, Any]:
    """What differs from the shipped cluster's network ports."""
    kind = {"network": ports.kind.value} if ports.kind else {}
    if ports.rate is None:
        return kind
    count, rate = _counted(ports.rate, ports, place)
    return kind | {"per_node": count, "bandwidth": f"{rate!r} B/s"}


def _counted(rate: BytesPerSecond, ports: Ports, place: Place) -> tuple[int, BytesPerSecond]:
    """How many ports a node has, and the rate of one."""
    if ports.per_gpu:
        return place.node, rate
    if ports.count is not None:
        return ports.count, rate
    port = _PORT_OF.get(place.cluster, _USUAL_PORT)
    return max(1, int(rate // port)), port
