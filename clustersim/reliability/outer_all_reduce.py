"""How long do outer gradients take between replicas, and what do they load?

An all-reduce of every shard among the GPUs that hold it, one in each replica, on the routes between the sites and with
the limits of their transports. Outer gradients are sharded over all GPUs of a replica (of the smallest, if they
differ), whatever the inner strategy.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from clustersim.build import resolved_library
from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.tuner import Selection, Tuner, select_variants
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.model.transformer import parameter_count
from clustersim.program.task import CollectiveType
from clustersim.reliability.inner_steps import ExchangeLoad
from clustersim.reliability.replica_places import ReplicaPlace
from clustersim.results.site_traffic import SiteLinkTraffic
from clustersim.scenario.diloco import OuterFormat
from clustersim.scenario.resolved import ResolvedScenario

MIN_LOAD = 1e-3
"""Fraction of a link's bandwidth below which an overlapped exchange does not slow inner steps."""
MAX_LOAD = 0.9


class OuterAllReduce:
    """The exchange of all outer gradients among some replicas: groups of one GPU in each, with its shard.

    payload: bytes of all shards. Not slotted: cached properties.
    """

    def __init__(
        self, scenario: ResolvedScenario, fabric: Fabric, slots: Sequence[ReplicaPlace], outer_format: OuterFormat
    ) -> None:
        self.fabric, self.shards = fabric, min(len(slot.gpus) for slot in slots)
        self.payload: Bytes = parameter_count(scenario.model) * outer_format.bytes
        self._members: IntArray = np.stack([slot.gpus[: self.shards] for slot in slots], axis=1)
        self._tuner = Tuner(fabric, resolved_library(scenario))
        costs = self._tuner.evaluate_variants(CollectiveType.ALL_REDUCE, self._members)
        self._selection: Selection = select_variants(costs, self.payload / self.shards)
        slowest = self._selection.slowest_group
        self.latency: Seconds = float(self._selection.latency[slowest])
        self.transfer_seconds: Seconds = float(self._selection.seconds[slowest]) - self.latency

    @property
    def algorithm(self) -> str:
        """Name of the algorithm and protocol."""
        return self._selection.slowest_variant.name

    @cached_property
    def site_link_bytes(self) -> FloatArray:
        """Bytes on each link between sites, in their order; empty on a single site."""
        if not isinstance(self.fabric, SitesFabric):
            return np.zeros(0)
        variant, loads = self._selection.slowest_variant, np.zeros(len(self.fabric.links.kind))
        for topology in self._tuner.group_topologies(self._members):
            for phase in self._tuner.library.algorithm(variant.algorithm).phases(CollectiveType.ALL_REDUCE, topology):
                loads += route_phase(phase, self.fabric).link_load[:-1]
        sent: FloatArray = loads[list(self.fabric.site_link_ids)] * self.payload / self.shards
        return sent

    def load(self, fragments: int, seconds: Seconds) -> ExchangeLoad:
        """Fractions of links that the exchange of a fragment takes if it lasts `seconds`."""
        return ExchangeLoad(self._nic_load(fragments, seconds), self._site_link_load(fragments, seconds))

    def _nic_load(self, fragments: int, seconds: Seconds) -> float:
        links, replicas = self.fabric.links, self._members.shape[1]
        nics = links.kind == LINK_KINDS.index(LinkKind.NIC)
        sent: float = 2.0 * (replicas - 1) / replicas * self.payload / self.shards / fragments
        return min(MAX_LOAD, sent / seconds / float(links.bandwidth[nics].min()))

    def _site_link_load(self, fragments: int, seconds: Seconds) -> float:
        if not isinstance(self.fabric, SitesFabric):
            return 0.0
        bandwidths = np.array([link.bandwidth for link in self.fabric.site_links])
        return min(MAX_LOAD, float((self.site_link_bytes / bandwidths).max()) / fragments / seconds)


def site_link_traffic(
    exchange: OuterAllReduce, inner_bytes: FloatArray, round_seconds: Seconds
) -> Iterator[SiteLinkTraffic]:
    """Traffic of each link between sites in a round; at most what it carries meanwhile.

    inner_bytes: of inner steps, on each link. A replica behind a slow link, which nobody waits for, takes part when its
    gradients have arrived.
    """
    fabric = exchange.fabric
    if not isinstance(fabric, SitesFabric):
        return
    round_bytes = (exchange.site_link_bytes + inner_bytes).tolist()
    for link, link_bytes in zip(fabric.site_links, round_bytes, strict=True):
        sent = min(link_bytes, link.bandwidth * round_seconds)
        yield SiteLinkTraffic(
            fabric.sites[link.source].name,
            fabric.sites[link.target].name,
            sent,
            link.bandwidth,
            sent / link.bandwidth / round_seconds,
            sent * link.price_per_byte,
        )
