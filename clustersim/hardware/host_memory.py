"""What can a node's host hold and move for its GPUs?

Host memory is one pool of a node; its bandwidth is all GPUs' together. Each GPU has a link of its own to it, PCIe or
NVLink-C2C. Assumed: the GPUs of a node copy at the same time, as ranks of one step do, so each has the rate of its link
or its part of the memory's bandwidth, whichever is less; the two directions of a link do not disturb each other, nor do
copies disturb what NICs send over the same PCIe switch. The optimizer on the CPU is bound by memory (Ren et al. 2021,
"ZeRO-Offload", arXiv:2101.06840, section 5: CPU-Adam); it runs for all GPUs of a node at once, at a share of the
bandwidth that is measured.
"""

from dataclasses import dataclass
from typing import Self

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, Seconds


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a node's host, and how its GPUs reach it.

    capacity: bytes of the node; bandwidth: bytes/s of all its memory channels; to_host, from_host: bytes/s of one GPU's
    link, in either direction; latency: seconds before a copy moves anything; update: the share of the bandwidth that an
    optimizer on the CPU reaches.
    """

    capacity: Bytes
    bandwidth: BytesPerSecond
    to_host: BytesPerSecond
    from_host: BytesPerSecond
    latency: Seconds
    optimizer_fraction: float

    @classmethod
    def from_section(cls, section: MappingReader) -> Self:
        """From a `host_memory` section of a cluster file."""
        return cls(
            capacity=section.get_quantity("capacity", Dimension.SIZE),
            bandwidth=section.get_quantity("bandwidth", Dimension.BANDWIDTH),
            to_host=section.get_quantity("to_host", Dimension.BANDWIDTH),
            from_host=section.get_quantity("from_host", Dimension.BANDWIDTH),
            latency=section.get_quantity("latency", Dimension.TIME, allow_zero=True),
            optimizer_fraction=section.get_fraction("update"),
        )

    def to_section(self) -> dict[str, str | float]:
        """The section as `read` reads it."""
        sizes = {"capacity": f"{self.capacity!r} B", "latency": f"{self.latency!r} s"}
        rates = {key: f"{getattr(self, key)!r} B/s" for key in ("bandwidth", "to_host", "from_host")}
        return {**sizes, **rates, "update": self.optimizer_fraction}
