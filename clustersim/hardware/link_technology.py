"""Of what make is a link?

How close software comes to a link's bandwidth, and what a message costs on it, are constants of its make: of the
generation of NVLink or Infinity Fabric (xGMI) that joins GPUs, and of the network that joins nodes. So files name it;
bandwidth is never asked what it may be, and only scales.
"""

from enum import Enum
from typing import Final


class LinkTechnology(Enum):
    """The make of a link, in the words of files."""

    PCIE = "pcie"  # PCIe and what joins the sockets of a host
    NVLINK2 = "nvlink2"  # V100
    NVLINK3 = "nvlink3"  # A100
    NVLINK4 = "nvlink4"  # H100, H200, H800, H20
    NVLINK5 = "nvlink5"  # B200, B300, GB200, GB300
    XGMI4 = "xgmi4"  # 4th generation Infinity Fabric: MI300X, MI325X, MI355X
    INFINIBAND = "infiniband"
    ROCE = "roce"  # RDMA over converged Ethernet, GCP's gIB among it
    EFA1 = "efa1"  # AWS Elastic Fabric Adapter of p3dn and p4d (SRD without RDMA writes), by aws-ofi-nccl
    EFA = "efa"  # of p5 and later
    TCPX = "tcpx"  # GCP GPUDirect-TCPX (A3 High)
    TCPXO = "tcpxo"  # GCP GPUDirect-TCPXO, also called FasTrak (A3 Mega)
    SLINGSHOT = "slingshot"  # HPE Slingshot 11, by aws-ofi-nccl over libfabric's cxi
    OMNIPATH = "omnipath"
    TCP = "tcp"  # plain sockets


TECHNOLOGIES: Final = tuple(LinkTechnology)
SCALE_UP_TECHNOLOGIES: Final = {
    item.value: item
    for item in (
        LinkTechnology.NVLINK2,
        LinkTechnology.NVLINK3,
        LinkTechnology.NVLINK4,
        LinkTechnology.NVLINK5,
        LinkTechnology.XGMI4,
    )
}
"""Of links that join the GPUs of an NVLink domain, by name."""
NETWORK_TECHNOLOGIES: Final = {
    element.value: element
    for element in (
        LinkTechnology.INFINIBAND,
        LinkTechnology.ROCE,
        LinkTechnology.EFA1,
        LinkTechnology.EFA,
        LinkTechnology.TCPX,
        LinkTechnology.TCPXO,
        LinkTechnology.SLINGSHOT,
        LinkTechnology.OMNIPATH,
        LinkTechnology.TCP,
    )
}
"""Of links that join nodes, by name; the first is meant where a file names none."""
