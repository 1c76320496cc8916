"""How does data travel if one rank does everything?

The root sends the whole payload to each other member, or receives it from each: its port carries n-1 payloads. This
is what `torch.nn.DataParallel` and naive parameter servers do.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Arrangement, Phase, Rounds, flows, phase
from clustersim.program.task import Collective


@dataclass(frozen=True, slots=True)
class Star:
    """All through the root; all-reduce is reduce, then broadcast."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase, or two for all-reduce."""
        match kind:
            case Collective.BROADCAST:
                return (_spokes(arrangement, outward=True),)
            case Collective.REDUCE:
                return (_spokes(arrangement, outward=False),)
            case Collective.ALL_REDUCE:
                return (_spokes(arrangement, outward=False), _spokes(arrangement, outward=True))
        return ()


def _spokes(arrangement: Arrangement, *, outward: bool) -> Phase:
    others = arrangement.flat[:, 1:]
    root = np.broadcast_to(arrangement.flat[:, :1], others.shape)
    ends = (root, others) if outward else (others, root)
    crosses = (arrangement.spans > 1).astype(np.int64)
    return phase(flows(*ends, 1.0), rounds=Rounds(local=1 - crosses, network=crosses, posts=crosses * others.shape[1]))
