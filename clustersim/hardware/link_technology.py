"""Link technologies: NVLink and xGMI generations, PCIe, and network kinds.

Achievable bandwidth fractions and per-message costs are constants of the technology: the generation of NVLink
or Infinity Fabric (xGMI) that joins GPUs, and the network that joins nodes. So files name it; it is never
inferred from the bandwidth, which only scales.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from clustersim.common.units import BytesPerSecond


class LinkTechnology(Enum):
    """The technology of a link, as named in files."""

    PCIE = "pcie"  # PCIe and what joins the sockets of a host
    NVLINK2 = "nvlink2"  # V100
    NVLINK3 = "nvlink3"  # A100
    NVLINK4 = "nvlink4"  # H100, H200, H800, H20
    NVLINK5 = "nvlink5"  # B200, B300, GB200, GB300
    NVLINK6 = "nvlink6"  # Rubin
    XGMI3 = "xgmi3"  # 3rd generation Infinity Fabric: MI250X
    XGMI4 = "xgmi4"  # 4th generation Infinity Fabric: MI300X, MI325X, MI355X
    UALINK = "ualink"  # UALink over Ethernet: MI455X
    INFINIBAND = "infiniband"
    ROCE = "roce"  # RDMA over converged Ethernet, GCP's gIB among it
    EFA1 = "efa1"  # AWS Elastic Fabric Adapter of p3dn and p4d (SRD without RDMA writes), by aws-ofi-nccl
    EFA2 = "efa2"  # AWS Elastic Fabric Adapter of p5 and p5e, with ports of 100 Gbit/s
    EFA = "efa"  # AWS Elastic Fabric Adapter of p5en and later
    TCPX = "tcpx"  # GCP GPUDirect-TCPX (A3 High)
    TCPXO = "tcpxo"  # GCP GPUDirect-TCPXO, also called FasTrak (A3 Mega)
    SLINGSHOT = "slingshot"  # HPE Slingshot 11, by aws-ofi-nccl over libfabric's cxi
    OMNIPATH = "omnipath"
    TCP = "tcp"  # plain sockets


TECHNOLOGIES: Final = tuple(LinkTechnology)
SCALE_UP_TECHNOLOGIES: Final = {
    technology.value: technology
    for technology in (
        LinkTechnology.NVLINK2,
        LinkTechnology.NVLINK3,
        LinkTechnology.NVLINK4,
        LinkTechnology.NVLINK5,
        LinkTechnology.NVLINK6,
        LinkTechnology.XGMI3,
        LinkTechnology.XGMI4,
        LinkTechnology.UALINK,
    )
}
"""Technologies of links inside an NVLink domain, by name."""
AMD_TECHNOLOGIES: Final = (LinkTechnology.XGMI3, LinkTechnology.XGMI4, LinkTechnology.UALINK)
"""Those that join AMD's GPUs."""
SCALE_UP_BANDWIDTH: Final[Mapping[LinkTechnology, BytesPerSecond]] = {
    LinkTechnology.NVLINK2: 150e9,  # 6 links of 25 GB/s
    LinkTechnology.NVLINK3: 300e9,  # 12 of 25
    LinkTechnology.NVLINK4: 450e9,  # 18 of 25
    LinkTechnology.NVLINK5: 900e9,  # 18 of 50
    LinkTechnology.NVLINK6: 1800e9,  # announced
    LinkTechnology.XGMI3: 350e9,  # 7 of 50
    LinkTechnology.XGMI4: 535.5e9,  # 7 of 76.5 (MI355X; MI300X: of 64)
    LinkTechnology.UALINK: 1800e9,  # announced
}
"""The most that a GPU sends over all of its links of a generation, per direction.

stas00/ml-engineering, network README. Datasheets print twice as much, both directions together.
"""
NETWORK_TECHNOLOGIES: Final = {
    technology.value: technology
    for technology in (
        LinkTechnology.INFINIBAND,
        LinkTechnology.ROCE,
        LinkTechnology.EFA1,
        LinkTechnology.EFA2,
        LinkTechnology.EFA,
        LinkTechnology.TCPX,
        LinkTechnology.TCPXO,
        LinkTechnology.SLINGSHOT,
        LinkTechnology.OMNIPATH,
        LinkTechnology.TCP,
    )
}
"""Technologies of links between nodes, by name; the first one is the default."""
