"""Which nodes does a job have, which are idle spares, and which are in repair?"""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from clustersim.common.units import Seconds
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.scenario.reliability import SparePool


class NodePool:
    """The nodes of a job and its spares.

    missing: node slots of the job without a node; on_repaired: called when a node is repaired. It becomes a
    spare of the rack it came from, or a shared one.
    """

    def __init__(
        self,
        env: simpy.Environment,
        domains: FailureDomains,
        spares: SparePool,
        repair_slots: int | None,
        on_repaired: Callable[[], None],
    ) -> None:
        self._env, self._domains, self._on_repaired = env, domains, on_repaired
        self.missing: set[int] = set()
        self._idle_spares = spares.shared_nodes or 0
        racks = domains.counts.racks
        self._rack_spares = dict.fromkeys(range(racks), spares.nodes_per_rack) if spares.nodes_per_rack else {}
        self._total_nodes = domains.nodes + self._idle_spares + spares.nodes_per_rack * racks
        self._repairing_count = 0
        self._repair_slots = None if repair_slots is None else simpy.Resource(env, repair_slots)
        self._last_update, self._node_seconds = 0.0, {"job": 0.0, "idle": 0.0, "repair": 0.0}

    def remove_node(self, node: int, repair_seconds: Seconds) -> None:
        """A node of the job leaves for repair."""
        self._update_totals()
        self.missing.add(node)
        self._repairing_count += 1
        if self._repair_slots is not None:
            self._env.process(self._repair_in_slot(node, repair_seconds, self._repair_slots))
        else:  # a callback costs a third of a simpy process
            self._env.timeout(repair_seconds, node).callbacks.append(lambda timeout: self._finish_repair(timeout.value))

    def fill_missing(self) -> bool:
        """Fill missing node slots with spares; return whether none is missing."""
        if self.missing:
            self._update_totals()
        for node in sorted(self.missing):
            self._replace_node(node)
        return not self.missing

    def _replace_node(self, node: int) -> None:
        rack = self._domains.rack_of(node)
        if self._rack_spares.get(rack, 0) > 0:
            self._rack_spares[rack] -= 1
            self.missing.discard(node)
        elif self._domains.is_nvlink_rack:
            self._replace_rack(rack)
        elif self._idle_spares > 0:
            self._idle_spares -= 1
            self.missing.discard(node)

    def _replace_rack(self, rack: int) -> None:
        """An NVLink domain is replaced as a unit; its healthy nodes are idle until it can be used again."""
        first_node = rack * self._domains.nodes_per_rack
        rack_nodes = range(first_node, min(first_node + self._domains.nodes_per_rack, self._domains.nodes))
        if self._idle_spares < len(rack_nodes):
            return
        healthy_count = len(rack_nodes) - sum(node in self.missing for node in rack_nodes)
        self._idle_spares += healthy_count - len(rack_nodes)
        self.missing.difference_update(rack_nodes)

    def _repair_in_slot(
        self, node: int, repair_seconds: Seconds, repair_slots: simpy.Resource
    ) -> Generator[Any, Any, None]:
        with repair_slots.request() as request:
            yield request
            yield self._env.timeout(repair_seconds)
        self._finish_repair(node)

    def _finish_repair(self, node: int) -> None:
        self._update_totals()
        self._repairing_count -= 1
        rack = self._domains.rack_of(node)
        if node in self.missing:  # it was not replaced
            self.missing.discard(node)
        elif rack in self._rack_spares:
            self._rack_spares[rack] += 1
        else:
            self._idle_spares += 1
        self._on_repaired()

    def _update_totals(self) -> None:
        """Accumulate node-seconds until now."""
        elapsed = self._env.now - self._last_update
        in_job = self._domains.nodes - len(self.missing)
        self._node_seconds["job"] += elapsed * in_job
        self._node_seconds["repair"] += elapsed * self._repairing_count
        self._node_seconds["idle"] += elapsed * (self._total_nodes - in_job - self._repairing_count)
        self._last_update = self._env.now

    def node_seconds(self) -> dict[str, float]:
        """Node-seconds until now in the job, idle, and in repair."""
        self._update_totals()
        return dict(self._node_seconds)
