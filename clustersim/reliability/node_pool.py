"""Which nodes does a job have, which stand by, and which are in repair?"""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from clustersim.common.units import Seconds
from clustersim.reliability.failure_domains import Site
from clustersim.scenario.reliability import SparePool


class Pool:
    """Nodes of a job and its spares.

    missing: places of the job that have no node; comes_back: called when a node is repaired. Such a node is a spare of
    the rack that it was taken from, or of all.
    """

    def __init__(
        self,
        env: simpy.Environment,
        site: Site,
        spares: SparePool,
        crews: int | None,
        comes_back: Callable[[], None],
    ) -> None:
        self._env, self._site, self._comes_back = env, site, comes_back
        self.missing: set[int] = set()
        self._idle = spares.shared_nodes or 0
        racks = site.counts.racks
        self._in_rack = dict.fromkeys(range(racks), spares.nodes_per_rack) if spares.nodes_per_rack else {}
        self._all = site.nodes + self._idle + spares.nodes_per_rack * racks
        self._in_repair = 0
        self._crews = None if crews is None else simpy.Resource(env, crews)
        self._since, self._seconds = 0.0, {"job": 0.0, "idle": 0.0, "repair": 0.0}

    def lose(self, node: int, repair: Seconds) -> None:
        """A node of the job leaves for repair."""
        self._count()
        self.missing.add(node)
        self._in_repair += 1
        if self._crews is not None:
            self._env.process(self._repair(node, repair, self._crews))
        else:  # a callback takes a third of a process's time
            self._env.timeout(repair, node).callbacks.append(lambda timeout: self._repaired(timeout.value))

    def fill(self) -> bool:
        """Put spares into the places that lack a node; whether none is left that lacks one."""
        if self.missing:
            self._count()
        for node in sorted(self.missing):
            self._fill(node)
        return not self.missing

    def _fill(self, node: int) -> None:
        rack = self._site.rack(node)
        if self._in_rack.get(rack, 0) > 0:
            self._in_rack[rack] -= 1
            self.missing.discard(node)
        elif self._site.bound:
            self._replace_rack(rack)
        elif self._idle > 0:
            self._idle -= 1
            self.missing.discard(node)

    def _replace_rack(self, rack: int) -> None:
        """An NVLink domain is replaced as a whole; its good nodes stand by until it can be used again."""
        first = rack * self._site.per_rack
        places = range(first, min(first + self._site.per_rack, self._site.nodes))
        if self._idle < len(places):
            return
        good = len(places) - sum(place in self.missing for place in places)
        self._idle += good - len(places)
        self.missing.difference_update(places)

    def _repair(self, node: int, length: Seconds, crews: simpy.Resource) -> Generator[Any, Any, None]:
        with crews.request() as turn:
            yield turn
            yield self._env.timeout(length)
        self._repaired(node)

    def _repaired(self, node: int) -> None:
        self._count()
        self._in_repair -= 1
        rack = self._site.rack(node)
        if node in self.missing:  # nobody took its place
            self.missing.discard(node)
        elif rack in self._in_rack:
            self._in_rack[rack] += 1
        else:
            self._idle += 1
        self._comes_back()

    def _count(self) -> None:
        """Add up who was where until now."""
        took = self._env.now - self._since
        in_job = self._site.nodes - len(self.missing)
        self._seconds["job"] += took * in_job
        self._seconds["repair"] += took * self._in_repair
        self._seconds["idle"] += took * (self._all - in_job - self._in_repair)
        self._since = self._env.now

    def seconds(self) -> dict[str, float]:
        """Node-seconds until now in the job, idle, and in repair."""
        self._count()
        return dict(self._seconds)
