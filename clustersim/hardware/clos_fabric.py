"""A regular cluster as a fabric whose links can be degraded."""

from dataclasses import dataclass

from clustersim.common.arrays import FloatArray
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.topology import Fabric


@dataclass(frozen=True)
class ClosFabric(ClosTopology):
    """A regular cluster whose links can be degraded."""

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> Fabric:
        """The same machine with every link's bandwidth scaled by bandwidth_fraction, [links].

        Links at 0 are not routed over.
        """
        from clustersim.hardware.degraded_clos import DegradedClos

        return DegradedClos(self, bandwidth_fraction)
