"""How does data travel if one rank does everything?

The root sends the whole payload to each other member (broadcast) or receives it from each (reduce): its port carries
n-1 payloads. Scatter and gather move an n-th for each member. This is what `torch.nn.DataParallel` and naive parameter
servers do.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class Star:
    """All through the root; all-reduce is reduce, then broadcast."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase, or two for all-reduce."""
        nth = 1 / arrangement.size
        turns = {
            CollectiveType.BROADCAST: ((1.0, True),),
            CollectiveType.REDUCE: ((1.0, False),),
            CollectiveType.SCATTER: ((nth, True),),
            CollectiveType.GATHER: ((nth, False),),
            CollectiveType.ALL_REDUCE: ((1.0, False), (1.0, True)),
        }
        return tuple(_spokes(arrangement, share, outward=outward) for share, outward in turns.get(kind, ()))


def _spokes(arrangement: Arrangement, share: float, *, outward: bool) -> Phase:
    others = arrangement.members[:, 1:]
    root = np.broadcast_to(arrangement.members[:, :1], others.shape)
    ends = (root, others) if outward else (others, root)
    crosses = int(arrangement.spans > 1)
    return phase(
        Flows(*ends, share, message=True),
        rounds=Rounds(local=1 - crosses, network=crosses, posts=crosses * others.shape[1]),
    )
