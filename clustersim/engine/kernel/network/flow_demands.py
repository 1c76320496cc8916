"""What does one collective of a class of groups ask of the links that are simulated?

One link of every colour is simulated (`symmetry.link_load_matrix`), and one group of every colour. All groups of a colour
communicate at the same times, so the activity that stands for them keeps a link busy for as long as all those of them
together that cross this one real link. While its pipelines fill, it is counted as loading links as much as once they
are full: so that groups of one role that are in step take as long as their costs say, which share the filling too.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.timing import Demand, DemandCost
from clustersim.engine.kernel.network.fluid_network import Load
from clustersim.program.program import Program
from clustersim.program.task import Exchange
from clustersim.symmetry.link_load_matrix import Crossings
from clustersim.symmetry.refinement import Classes


@dataclass(frozen=True, slots=True)
class _Folded:
    """Crossings of classes, sorted by the groups' colour. first: [colours + 1] where each colour's entries start."""

    first: IntArray
    link: IntArray
    seconds: FloatArray


class Loads:
    """Asks a source of demands for single groups, and folds the answers."""

    def __init__(self, program: Program, classes: Classes, source: DemandCost) -> None:
        self._classes, self._source = classes, source
        self._rows = program.rows
        self._stands = np.zeros(len(classes.links), dtype=np.bool_)
        self._stands[np.unique(classes.links, return_index=True)[1]] = True
        self._folded: dict[tuple[str, Crossings], _Folded] = {}
        self._loads: dict[tuple[Exchange, int], tuple[Seconds, Load | None]] = {}
        self._asked: dict[tuple[int, int], tuple[Seconds, Load | None]] = {}

    def of(self, rank: int, exchange: Exchange) -> tuple[Seconds, Load | None]:
        """Seconds before anything moves, and the load of all groups of the class of the rank's group."""
        place = rank, id(exchange)  # the program keeps its exchanges, which take longer to hash
        known = self._asked.get(place)
        if known is None:
            known = self._asked[place] = self._of(rank, exchange)
        return known

    def _of(self, rank: int, exchange: Exchange) -> tuple[Seconds, Load | None]:
        row = int(self._rows[exchange.group][rank])
        key = exchange, int(self._classes.groups[exchange.group][row])
        if key not in self._loads:
            demand = self._source.demand(exchange)
            moves = demand.transfer[row] > 0.0
            load = self._load(demand, row, self._fold(exchange.group, demand.crossings), key[1]) if moves else None
            self._loads[key] = float(demand.latency[row]), load
        return self._loads[key]

    def _load(self, demand: Demand, row: int, folded: _Folded, colour: int) -> Load:
        seconds = float(demand.transfer[row])
        mine = slice(folded.first[colour], folded.first[colour + 1])
        busy = folded.seconds[mine] / demand.per_byte[row]
        return Load(seconds, seconds / float(demand.flow[row]), folded.link[mine], busy)

    def _fold(self, role: str, crossings: Crossings) -> _Folded:
        """Add up what groups of one colour ask of one link of each colour."""
        key = role, crossings
        if key not in self._folded:
            group, link = self._classes.groups[role], self._classes.links
            kept = self._stands[crossings.link]
            colours, links = group[crossings.group[kept]], link[crossings.link[kept]]
            count = len(self._stands) + 1
            pairs, place = np.unique(colours * count + links, return_inverse=True)
            seconds = np.bincount(place.reshape(-1), crossings.seconds[kept], minlength=len(pairs)).astype(np.float64)
            first = np.searchsorted(pairs // count, np.arange(int(group.max()) + 2))
            self._folded[key] = _Folded(first, pairs % count, seconds)
        return self._folded[key]
