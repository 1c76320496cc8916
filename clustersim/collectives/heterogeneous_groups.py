"""How do groups of one communicator kind load links together, where they differ in shape?

All groups of a communicator kind communicate at the same time. Where they differ in shape (a dead NVLink
port, a layout that crosses nodes in some places), the library chooses separately for each set of groups of
one shape, and the load of the other sets must be assumed: that they use the same algorithm, where their shape
allows it, else the first that the library lists for them, with its load averaged over the phases of the
first. So sets that share no link are independent, bit for bit, and nothing is assumed where all groups have
one shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clustersim.collectives.flow_routes import FlowRoutes
from clustersim.collectives.phase import Phase
from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_method


class HeterogeneousGroups:
    """Routes sets of concurrent groups of different shapes; each algorithm once, on demand.

    phases_by_set: for each set, the phases of the algorithms that it can use, in the library's order.
    """

    def __init__(
        self, phases_by_set: Sequence[Mapping[str, tuple[Phase, ...]]], route: Callable[[Phase], FlowRoutes]
    ) -> None:
        self._phases_by_set = phases_by_set
        self._route = route

    def routes_of(self, set_index: int, algorithm: str) -> tuple[FlowRoutes, ...]:
        """Routed phases of an algorithm in one set; their link loads are those of all sets."""
        set_routes = self._set_routes(set_index, algorithm)
        if len(self._phases_by_set) == 1:
            return set_routes
        total_loads = self._total_loads(algorithm, len(set_routes))
        return tuple(
            replace(phase_routes, link_load=load) for phase_routes, load in zip(set_routes, total_loads, strict=True)
        )

    @cached_method
    def _set_routes(self, set_index: int, algorithm: str) -> tuple[FlowRoutes, ...]:
        """Routed phases of one set by itself."""
        return tuple(self._route(phase) for phase in self._phases_by_set[set_index][algorithm])

    @cached_method
    def _total_loads(self, algorithm: str, phase_count: int) -> list[FloatArray]:
        """Link loads of all sets in each phase of an algorithm that one of them uses."""
        loads = [self._concurrent_loads(index, algorithm, phase_count) for index in range(len(self._phases_by_set))]
        return [sum(phase_loads[1:], phase_loads[0]) for phase_loads in zip(*loads, strict=True)]

    def _concurrent_loads(self, set_index: int, algorithm: str, phase_count: int) -> list[FloatArray]:
        """Link loads of one set in each of the `phase_count` phases of an algorithm that another set uses."""
        phases_by_algorithm = self._phases_by_set[set_index]
        if algorithm in phases_by_algorithm:
            return [phase_routes.link_load for phase_routes in self._set_routes(set_index, algorithm)]
        first_load, *remaining_loads = (
            phase_routes.link_load for phase_routes in self._set_routes(set_index, next(iter(phases_by_algorithm)))
        )
        return [sum(remaining_loads, first_load) / phase_count] * phase_count
