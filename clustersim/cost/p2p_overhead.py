"""What does the host add to a message between pipeline stages?

Megatron-LM sends and receives in one batch (`batch_isend_irecv`) and then waits for the device
(`torch.cuda.synchronize`), so that a message costs what its bytes take and, whatever its size, what two hosts need to
launch it and to see that it is there. `Framework.message` is that time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.host_transfers import Others
from clustersim.cost.timing import Demand, ExchangeTiming
from clustersim.parallel.process_groups import P2P_DIRECTIONS
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CommOp

_ROLES = frozenset(role.name for role in P2P_DIRECTIONS)


@dataclass(frozen=True, slots=True)
class HandedMessages:
    """Times exchanges by `others`, and messages between stages as longer by `host`.

    An `ExchangeCost` and a `DemandCost`. groups: process groups by role.
    """

    others: Others
    host: Seconds
    groups: Mapping[str, ProcessGroups]

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Seconds of one exchange in each group of its role."""
        timing = self.others.exchange(exchange)
        return replace(timing, seconds=self._longer(exchange, timing.seconds))

    def demand(self, exchange: CommOp) -> Demand:
        """What one exchange asks of shared links: the host's time is latency."""
        demand = self.others.demand(exchange)
        return replace(demand, latency=self._longer(exchange, demand.latency))

    def _longer(self, exchange: CommOp, seconds: FloatArray) -> FloatArray:
        if exchange.comm_group not in _ROLES or self.groups[exchange.comm_group].members.shape[1] < 2:
            return seconds
        return np.asarray(seconds + self.host)
