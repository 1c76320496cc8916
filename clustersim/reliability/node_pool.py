"""Which nodes does a job have, which are idle spares, and which are in repair?

When a repair will end is known when it begins, so the pool needs no events: it catches up with the time that it is
told.
"""

from heapq import heappop, heappush, heapreplace
from math import inf

from clustersim.common.units import Seconds
from clustersim.reliability.failure_domains import FailureDomains
from clustersim.scenario.reliability import SparePool


class NodePool:
    """The nodes of a job and its spares. missing: node slots of the job without a node.

    A repaired node becomes a spare of the rack it came from, or a shared one. repair_slots: nodes repaired at a time,
    None: all; who comes first is served first. next_repair: when the next repair ends.
    """

    def __init__(self, domains: FailureDomains, spares: SparePool, repair_slots: int | None) -> None:
        self._domains = domains
        self.missing: set[int] = set()
        self.next_repair = inf
        self._idle_spares = spares.shared_nodes or 0
        racks = domains.counts.racks
        self._rack_spares = dict.fromkeys(range(racks), spares.nodes_per_rack) if spares.nodes_per_rack else {}
        self._spare_count = self._idle_spares + spares.nodes_per_rack * racks
        self._repairs: list[tuple[Seconds, int, int]] = []  # heap of (end, serial number, node)
        self._removed_count = 0
        self._slots_free_at = [0.0] * (repair_slots or 0)  # heap
        self._missing_since, self._missing_seconds, self._repair_seconds = 0.0, 0.0, 0.0

    def remove_node(self, node: int, now: Seconds, repair_seconds: Seconds) -> None:
        """A node of the job leaves for repair."""
        self._count_missing(now)
        self.missing.add(node)
        end = now + repair_seconds
        if self._slots_free_at:
            end = max(now, self._slots_free_at[0]) + repair_seconds
            heapreplace(self._slots_free_at, end)
        self._removed_count += 1
        heappush(self._repairs, (end, self._removed_count, node))
        self.next_repair = self._repairs[0][0]
        self._repair_seconds += end - now

    def fill_missing(self, now: Seconds) -> bool:
        """Fill missing node slots with spares; return whether none is missing."""
        if self.missing:
            self._count_missing(now)
            for node in sorted(self.missing):
                self._replace_node(node)
        return not self.missing

    def _replace_node(self, node: int) -> None:
        if self._rack_spares and self._rack_spares[self._domains.rack_of(node)] > 0:
            self._rack_spares[self._domains.rack_of(node)] -= 1
            self.missing.discard(node)
        elif self._domains.is_nvlink_rack:
            self._replace_rack(self._domains.rack_of(node))
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

    def finish_repairs(self, now: Seconds) -> None:
        """Nodes that are repaired by now are spares, or back in the job if they were not replaced."""
        while self._repairs and self._repairs[0][0] <= now:
            end, _, node = heappop(self._repairs)
            self._return_node(node, end)
        self.next_repair = self._repairs[0][0] if self._repairs else inf

    def _return_node(self, node: int, now: Seconds) -> None:
        if node in self.missing:  # it was not replaced
            self._count_missing(now)
            self.missing.discard(node)
        elif self._rack_spares:
            self._rack_spares[self._domains.rack_of(node)] += 1
        else:
            self._idle_spares += 1

    def _count_missing(self, now: Seconds) -> None:
        """Accumulate node-seconds of missing nodes until now."""
        if self.missing:
            self._missing_seconds += (now - self._missing_since) * len(self.missing)
        self._missing_since = now

    def node_seconds(self, now: Seconds) -> dict[str, float]:
        """Node-seconds until now in the job, idle, and in repair."""
        self._count_missing(now)
        in_repair = self._repair_seconds - sum(end - now for end, _, _ in self._repairs)
        idle = now * self._spare_count + self._missing_seconds - in_repair
        return {
            "job": now * self._domains.nodes - self._missing_seconds,
            "idle": max(0.0, idle),  # without rounding
            "repair": in_repair,
        }
