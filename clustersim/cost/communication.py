"""How long does a collective take alone?

The library's fastest algorithm on the routes of all groups of the role (see `collectives.choose`). What does not depend
on the payload is worked out once for each role and collective, so another payload costs microseconds.
"""

from collections.abc import Mapping

import numpy as np

from clustersim.collectives.choose import Choices, Surveyor, choose
from clustersim.collectives.library import Library
from clustersim.collectives.phase import IntArray
from clustersim.cost.timing import Bound, ExchangeTiming, Provenance
from clustersim.errors import InputError, nearest
from clustersim.hardware.topology import Fabric
from clustersim.program.program import Groups
from clustersim.program.task import Collective, Exchange
from clustersim.units import Bytes


class CommunicationCost:
    """Times exchanges on a fabric with a library (an `ExchangeCost`).

    groups: process groups by role; overrides: algorithms that the user named, by collective. Groups of one member
    take no time. Results are remembered inside the instance.
    """

    def __init__(
        self,
        fabric: Fabric,
        library: Library,
        groups: Mapping[str, Groups],
        overrides: Mapping[Collective, str] | None = None,
    ) -> None:
        self._surveyor = Surveyor(fabric, library)
        self._groups = groups
        self._overrides = dict(overrides or {})
        self._choices: dict[tuple[str, Collective], Choices] = {}
        self._tiers: dict[tuple[str, int], str] = {}
        self._timings: dict[tuple[str, Collective, Bytes], ExchangeTiming] = {}

    def exchange(self, exchange: Exchange) -> ExchangeTiming:
        """Seconds of one collective in each group of its role, all groups at once."""
        key = (exchange.group, exchange.collective, exchange.payload)
        if key not in self._timings:
            self._timings[key] = self._time(exchange)
        return self._timings[key]

    def _time(self, exchange: Exchange) -> ExchangeTiming:
        groups = self._members(exchange.group)
        if groups.shape[1] < 2 or not len(groups):
            return ExchangeTiming(np.zeros(len(groups)), Provenance.ROOFLINE, Bound.LATENCY, "none", "gpu")
        choice = choose(self._survey(exchange.group, exchange.collective), exchange.payload)
        seconds = float(choice.seconds[choice.slowest])
        return ExchangeTiming(
            seconds=choice.seconds,
            provenance=self._provenance,
            bound=Bound.LATENCY if choice.latency > seconds / 2 else Bound.BANDWIDTH,
            algorithm=choice.offer.name,
            tier=self._tier(exchange.group, choice.slowest),
        )

    def _tier(self, role: str, group: int) -> str:
        """The highest tier that traffic of one group of a role crosses."""
        if (role, group) not in self._tiers:
            self._tiers[role, group] = self._surveyor.fabric.tier(self._members(role)[group].tolist())
        return self._tiers[role, group]

    def _survey(self, role: str, kind: Collective) -> Choices:
        if (role, kind) not in self._choices:
            algorithm = self._overrides.get(kind)
            self._choices[role, kind] = self._surveyor.survey(kind, self._members(role), algorithm)
        return self._choices[role, kind]

    def _members(self, role: str) -> IntArray:
        if role not in self._groups:
            raise InputError(f"there are no process groups {role!r}; {nearest(role, self._groups)}")
        return self._groups[role].members

    @property
    def _provenance(self) -> Provenance:
        return Provenance.PUBLISHED if self._surveyor.library.published else Provenance.ROOFLINE
