"""How long does a rank need to copy to and from its host, and the host to compute for it?

    copy = latency + bytes / min(link, bandwidth of the host's memory / GPUs of the node)
    work = bytes / (bandwidth of the host's memory / GPUs of the node · share that such work reaches)

All GPUs of a node do the same at the same time (`hardware.host_memory`), so nothing depends on when they do it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.timing import Bound, Demand, DemandCost, ExchangeCost, ExchangeTiming, Provenance
from clustersim.hardware.host_memory import HostMemory
from clustersim.program.task import CommOp, HostOp, HostOpKind
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS


class Others(ExchangeCost, DemandCost, Protocol):
    """What times the exchanges between ranks."""


@dataclass(frozen=True, slots=True)
class HostedExchanges:
    """Times what ranks do with their hosts, and by `others` what they do with each other.

    An `ExchangeCost` and a `DemandCost`. sharers: [ranks] GPUs that use the memory of each rank's host at
    the same time.
    """

    others: Others
    host: HostMemory
    sharers: IntArray

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Seconds of one exchange in each group of its role."""
        if not isinstance(exchange, HostOp):
            return self.others.exchange(exchange)
        seconds = self._seconds(exchange)
        bound = Bound.HOST_MEMORY if exchange.kind is HostOpKind.ON_HOST else Bound.HOST_LINK
        return ExchangeTiming(seconds, Provenance.ROOFLINE, bound, "copy", "host")

    def demand(self, exchange: CommOp) -> Demand:
        """What one exchange asks of the network's links: of the host's, nothing that is shared."""
        if not isinstance(exchange, HostOp):
            return self.others.demand(exchange)
        nothing = np.zeros(len(self.sharers))
        return Demand(self.exchange(exchange).seconds, nothing, nothing, nothing, exchange.payload, NO_LINK_LOADS)

    def _seconds(self, exchange: HostOp) -> FloatArray:
        """Of each rank."""
        part = self.host.bandwidth / self.sharers
        match exchange.kind:
            case HostOpKind.D2H:
                return self.host.latency + exchange.payload / np.minimum(self.host.to_host, part)
            case HostOpKind.H2D:
                return self.host.latency + exchange.payload / np.minimum(self.host.from_host, part)
        return exchange.payload / (part * self.host.update)
