"""How much do the links between sites carry, and what does it cost?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clustersim.common.units import Bytes, BytesPerSecond

if TYPE_CHECKING:
    from clustersim.results.step_metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class SiteLinkTraffic:
    """One direction of a link between sites. sent_bytes: in a step or a round; busy: fraction of it that it is loaded.

    cost: egress of it in USD.
    """

    source: str
    target: str
    sent_bytes: Bytes
    bandwidth: BytesPerSecond
    busy: float
    cost: float


def site_traffic(result: "StepMetrics") -> tuple[SiteLinkTraffic, ...]:
    """Traffic of a step on each link between sites; empty on a single site."""
    machine = result.scenario.cluster.sites
    if machine is None:
        return ()
    names = [site.name for site in machine.sites]
    ends = [(names[link.source], names[link.target]) for link in machine.site_links]
    steps = len(result.step_times)
    loads = result.link_loads(*ends, bins=1).total_bytes / steps
    return tuple(
        SiteLinkTraffic(
            *names_of_ends,
            sent_bytes,
            link.bandwidth,
            sent_bytes / link.bandwidth / result.step_time,
            sent_bytes * link.price_per_byte,
        )
        for link, names_of_ends, sent_bytes in zip(machine.site_links, ends, loads.tolist(), strict=True)
    )
