"""Which nodes does a job have, which are idle spares, and which are in repair?"""

from collections import deque
from collections.abc import Callable
from functools import partial

from clustersim.common.units import Seconds
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.reliability.job_clock import JobClock
from clustersim.scenario.reliability import SparePool


class NodePool:
    """The nodes of a job and its spares.

    missing: node slots of the job without a node; on_repaired: called when a node is repaired. It becomes a
    spare of the rack it came from, or a shared one.
    """

    def __init__(
        self,
        clock: JobClock,
        domains: FailureDomains,
        spares: SparePool,
        repair_slots: int | None,
        on_repaired: Callable[[], None],
    ) -> None:
        self._clock, self._domains, self._on_repaired = clock, domains, on_repaired
        self.missing: set[int] = set()
        self._idle_spares = spares.shared_nodes or 0
        racks = domains.counts.racks
        self._rack_spares = dict.fromkeys(range(racks), spares.nodes_per_rack) if spares.nodes_per_rack else {}
        self._total_nodes = domains.nodes + self._idle_spares + spares.nodes_per_rack * racks
        self._repairing_count = 0
        self._free_slots, self._queued_repairs = repair_slots, deque[tuple[int, Seconds]]()
        self._last_update = self._job_seconds = self._idle_seconds = self._repair_seconds = 0.0

    def remove_node(self, node: int, repair_seconds: Seconds) -> None:
        """A node of the job leaves for repair."""
        self._update_totals()
        self.missing.add(node)
        self._repairing_count += 1
        if self._free_slots is None:
            self._clock.call_after(repair_seconds, partial(self._finish_repair, node))
        else:
            self._queued_repairs.append((node, repair_seconds))
            self._begin_repairs(self._free_slots)

    def _begin_repairs(self, free_slots: int) -> None:
        """Begin the repairs that have waited longest in the free slots."""
        while free_slots and self._queued_repairs:
            node, repair_seconds = self._queued_repairs.popleft()
            self._clock.call_after(repair_seconds, partial(self._leave_slot, node))
            free_slots -= 1
        self._free_slots = free_slots

    def _leave_slot(self, node: int) -> None:
        if self._free_slots is not None:
            self._begin_repairs(self._free_slots + 1)
        self._finish_repair(node)

    def fill_missing(self) -> bool:
        """Fill missing node slots with spares; return whether none is missing."""
        if not self.missing:
            return True
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
        elapsed = self._clock.now - self._last_update
        if elapsed == 0.0:
            return
        in_job = self._domains.nodes - len(self.missing)
        self._job_seconds += elapsed * in_job
        self._repair_seconds += elapsed * self._repairing_count
        self._idle_seconds += elapsed * (self._total_nodes - in_job - self._repairing_count)
        self._last_update = self._clock.now

    def node_seconds(self) -> dict[str, float]:
        """Node-seconds until now in the job, idle, and in repair."""
        self._update_totals()
        return {"job": self._job_seconds, "idle": self._idle_seconds, "repair": self._repair_seconds}
