"""On which cluster did a published run take place?

A row names the GPU and its interconnect (see `interconnect_notation`). The packaged cluster of that GPU is
used, or the one that describes the source's machine, with the links that the row states; links that are not
stated are the packaged cluster's.
"""

from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import BytesPerSecond
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.interconnect_notation import InterconnectSpec, NetworkPorts, parse_interconnect


@dataclass(frozen=True, slots=True)
class PackagedCluster:
    """A packaged cluster for a GPU. accelerator, nvlink_bandwidth: overrides of the cluster's own."""

    cluster_name: str
    accelerator: str | None = None
    gpus_per_node: int = 8
    nvlink_bandwidth: str | None = None


CLUSTER_BY_GPU: Final = {
    "v100-32gb": PackagedCluster("dgx-2", gpus_per_node=16),  # Megatron-LM runs on DGX-2, 16 GPUs per node
    "a100-sxm-40gb": PackagedCluster("dgx-a100", "a100-sxm-40gb"),
    "a100-sxm-80gb": PackagedCluster("dgx-a100"),
    "a800-sxm-80gb": PackagedCluster("hgx-a800"),
    "h100-sxm-80gb": PackagedCluster("dgx-h100"),
    "h100-sxm-96gb": PackagedCluster("dgx-h100", "h100-sxm-96gb"),
    "h800-sxm-80gb": PackagedCluster("dgx-h100", "h800-sxm-80gb", nvlink_bandwidth="200 GB/s"),
    "h200-sxm-141gb": PackagedCluster("hgx-h200"),
    "gh200-96gb": PackagedCluster("alps-gh200", "gh200-96gb", gpus_per_node=4),
    "gh200-96gb-660w": PackagedCluster("alps-gh200", gpus_per_node=4),
    "b200": PackagedCluster("hgx-b200"),
    "b300": PackagedCluster("hgx-b300"),
    "gb200": PackagedCluster("gb200-nvl72", gpus_per_node=4),
    "gb300": PackagedCluster("gb300-nvl72", gpus_per_node=4),
    "rtx-4090": PackagedCluster("rtx-4090-node"),
    **{gpu: PackagedCluster(gpu) for gpu in ("mi300x", "mi325x", "mi355x")},
}
_CLUSTER_BY_SOURCE: Final = {"llama3": PackagedCluster("llama3-roce")}  # a packaged cluster is the source's own
_GPU_BY_SOURCE: Final = {  # where the authors state elsewhere what they ran on
    # PyTorch's own H100 of 96 GB and 500 W: pytorch/torchtitan, benchmarks/*_llama3_h100_*.md, of December 2024 and (by
    # authors of torchao) June 2025
    ("torchao", "h100-sxm-80gb"): "h100-sxm-96gb",
}
# NVIDIA's HGX boards of 4 GPUs have no switch: NVLink joins all pairs (NVIDIA developer blog: Introducing NVIDIA HGX
# A100, November 2020; Introducing NVIDIA HGX H100, April 2022)
_SWITCHED_NODES_OF_8: Final = ("dgx-a100", "hgx-a800", "dgx-h100", "hgx-h200")
_BOARD_OF_4: Final = 4
_PORT_BANDWIDTH: Final = {  # bytes/s of one port, where a row states the sum of a node only
    **{"dgx-2": 12.5e9, "dgx-a100": 25e9, "hgx-a800": 25e9, "alps-gh200": 25e9},
    **dict.fromkeys(("hgx-b300", "gb300-nvl72"), 100e9),
}
_DEFAULT_PORT_BANDWIDTH: Final = 50e9


def cluster_config(case: ValidationCase) -> dict[str, Any]:
    """The `cluster` section of a run."""
    gpu = _GPU_BY_SOURCE.get((case.text("source"), case.text("gpu")), case.text("gpu"))
    if gpu not in CLUSTER_BY_GPU:
        raise CannotPredictError(
            f"gpu {gpu or 'is not stated'}: there is no such machine; {suggest_nearest(gpu, CLUSTER_BY_GPU)}",
            is_expressible=False,
        )
    packaged = _CLUSTER_BY_SOURCE.get(case.text("source"), CLUSTER_BY_GPU[gpu])
    config: dict[str, Any] = {"name": packaged.cluster_name, "gpus": case.positive_int("n_gpus")}
    if packaged.accelerator:
        config["accelerator"] = packaged.accelerator
    interconnect = case_interconnect(case)
    ports = _nic_overrides(interconnect.ports or NetworkPorts(), packaged)
    board = _board_overrides(case, packaged)
    node: dict[str, Any] = {"gpus": _BOARD_OF_4} if board else {}
    if ports:
        node["nic"] = ports
    nvlink = board | _nvlink_overrides(interconnect, packaged)
    if nvlink:
        node["nvlink"] = nvlink
    return config | ({"node": node} if node else {})


def _board_overrides(case: ValidationCase, packaged: PackagedCluster) -> dict[str, Any]:
    """NVLink of a node of 4 GPUs, where the packaged one has 8 around a switch."""
    has_board = case.text("gpus_per_node") == str(_BOARD_OF_4) and packaged.cluster_name in _SWITCHED_NODES_OF_8
    return {"gpus": _BOARD_OF_4, "links": "all"} if has_board else {}


def case_interconnect(case: ValidationCase) -> InterconnectSpec:
    """The interconnect that a row states; raises CannotPredictError for unknown notation."""
    try:
        return parse_interconnect(case.text("interconnect"))
    except InputError as error:
        raise CannotPredictError(str(error), is_expressible=False) from error


def _nvlink_overrides(interconnect: InterconnectSpec, packaged: PackagedCluster) -> dict[str, Any]:
    """NVLink overrides of the packaged cluster."""
    if interconnect.nvlink_bandwidth is not None:
        return {"bandwidth": f"{interconnect.nvlink_bandwidth!r} B/s"}
    # a fraction of H100's, as DeepSeek-V3's report states for H800 (arXiv:2412.19437)
    return {"bandwidth": packaged.nvlink_bandwidth} if packaged.nvlink_bandwidth else {}


def _nic_overrides(ports: NetworkPorts, packaged: PackagedCluster) -> dict[str, Any]:
    """NIC overrides of the packaged cluster."""
    network = {"network": ports.technology.value} if ports.technology else {}
    if ports.rate is None:
        return network
    count, rate = _ports_per_node(ports.rate, ports, packaged)
    return network | {"per_node": count, "bandwidth": f"{rate!r} B/s"}


def _ports_per_node(rate: BytesPerSecond, ports: NetworkPorts, packaged: PackagedCluster) -> tuple[int, BytesPerSecond]:
    """Ports per node, and bytes/s of one port."""
    if ports.per_gpu:
        return packaged.gpus_per_node, rate
    if ports.count is not None:
        return ports.count, rate
    port = _PORT_BANDWIDTH.get(packaged.cluster_name, _DEFAULT_PORT_BANDWIDTH)
    return max(1, int(rate // port)), port
