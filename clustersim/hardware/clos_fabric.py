"""What becomes of a regular cluster whose links are slow or dead?"""

from dataclasses import dataclass

from clustersim.common.arrays import FloatArray
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.degraded_clos import DegradedClos
from clustersim.hardware.topology import Fabric


@dataclass(frozen=True)
class ClosFabric(ClosTopology):
    """A regular cluster whose links can change."""

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> Fabric:
        """The same machine with the left part of every link's bandwidth, [links]; no route uses a link with 0 left."""
        return DegradedClos(self, bandwidth_fraction)
