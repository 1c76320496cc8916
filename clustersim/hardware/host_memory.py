"""A node's host memory and its links to the GPUs.

Host memory is one pool per node, its bandwidth shared by all GPUs. Each GPU has its own link to it, PCIe or
NVLink-C2C.
Assumed: the GPUs of a node copy at the same time, as ranks of one step do, so each gets the minimum of its
link rate and its share of the memory's bandwidth; the two directions of a link do not contend, nor do copies
contend with NIC traffic over the same PCIe switch. The CPU optimizer is memory-bound (Ren et al. 2021,
"ZeRO-Offload", arXiv:2101.06840, section 5: CPU-Adam); it runs for all GPUs of a node at once, at a measured
fraction of the bandwidth.
"""

from dataclasses import dataclass
from typing import Self

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, Seconds


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a node's host, and how its GPUs reach it.

    capacity: bytes of the node; bandwidth: bytes/s of all its memory channels; device_to_host, host_to_device:
    bytes/s of one GPU's link, per direction; latency: seconds before a copy starts to transfer;
    optimizer_fraction: fraction of the bandwidth that a CPU optimizer reaches; core_bandwidth: bytes/s of it that one
    core reaches, reads and writes together, None: unknown.
    """

    capacity: Bytes
    bandwidth: BytesPerSecond
    device_to_host: BytesPerSecond
    host_to_device: BytesPerSecond
    latency: Seconds
    optimizer_fraction: float
    core_bandwidth: BytesPerSecond | None = None

    @classmethod
    def from_section(cls, section: MappingReader) -> Self:
        """Read a `host_memory` section of a cluster file."""
        return cls(
            capacity=section.get_quantity("capacity", Dimension.SIZE),
            bandwidth=section.get_quantity("bandwidth", Dimension.BANDWIDTH),
            device_to_host=section.get_quantity("device_to_host", Dimension.BANDWIDTH),
            host_to_device=section.get_quantity("host_to_device", Dimension.BANDWIDTH),
            latency=section.get_quantity("latency", Dimension.TIME, allow_zero=True),
            optimizer_fraction=section.get_fraction("optimizer_fraction"),
            core_bandwidth=(
                section.get_quantity("core_bandwidth", Dimension.BANDWIDTH)
                if section.has_key("core_bandwidth")
                else None
            ),
        )

    def to_section(self) -> dict[str, str | float]:
        """The section, as `from_section` reads it."""
        sizes = {"capacity": f"{self.capacity!r} B", "latency": f"{self.latency!r} s"}
        given_rates = (
            "bandwidth",
            "device_to_host",
            "host_to_device",
            *("core_bandwidth",) * (self.core_bandwidth is not None),
        )
        rates = {key: f"{getattr(self, key)!r} B/s" for key in given_rates}
        return {**sizes, **rates, "optimizer_fraction": self.optimizer_fraction}
