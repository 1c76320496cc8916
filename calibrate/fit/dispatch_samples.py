"""What do published tables of dispatchers ask of links, whatever the constants are?

A row's bytes on the busiest port of each kind follow from its routing alone, so constants are tried in microseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clustersim.collectives.library import AlgorithmVariant, Library, Medium, SmCopyCost
from clustersim.collectives.phase_cost import MEDIUM_OF_KIND, effective_bandwidth
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.topology import LINK_KINDS
from clustersim.program.task import CollectiveType, TokenDispatcher
from clustersim.validation.cases import Case
from clustersim.validation.collectives import SHIPPED, Place, place_of, read_collectives
from clustersim.validation.dispatch_benchmark import KINDS, Dispatched, dispatched, seconds_of

Constants = Mapping[str, float]
NVLINK, NETWORK, ROUND = "nvlink", "network", "round"
COMBINE, ROW, RATE, RATE_BACK, KERNELS = "combine", "row", "rate", "rate back", "kernels"
CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Load:
    """What the busiest ports of one kind carry, and their nominal rate; no bytes where none is crossed."""

    size: Bytes = 0.0
    rate: BytesPerSecond = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A published row, compared by identity.

    latency: seconds in which nothing moves; together: rows that are handed over at once, 0 where it does not matter;
    fitted: whether constants are fitted to it.
    """

    source: str
    place: Place
    sent: Dispatched
    measured: Seconds
    latency: Seconds
    loads: Mapping[Medium, Load]
    together: int
    fitted: bool

    @property
    def where(self) -> tuple[str, str, int]:
        """What is left out together: source, GPU, ranks."""
        return self.source, self.place.gpu, self.place.gpus

    @property
    def dispatcher(self) -> TokenDispatcher:
        """Whose kernels sent it."""
        return self.sent.routing.dispatcher

    def ratio(self, constants: Constants) -> float:
        """What constants predict, over what was measured."""
        return self.seconds(constants) / self.measured

    def seconds(self, constants: Constants) -> Seconds:
        """What constants say, in closed form: a test holds it to the model."""
        back = self.sent.collective is CollectiveType.COMBINE
        share = constants[COMBINE] if back else 1.0
        rate, chunk = (constants[RATE_BACK], constants[CHUNK]) if back else (constants[RATE], 0.0)
        handling = SmCopyCost(constants[ROW], rate, chunk / self.together if self.together else 0.0)
        ceiling = (self.sent.sms or self.sent.library.sm_count) * handling.sm_rate(
            self.sent.routing.token_bytes, self.place.gpus
        )
        nvlink, network = self.loads[Medium.NVLINK], self.loads[Medium.NETWORK]
        inside = nvlink.size / min(nvlink.rate * constants[NVLINK] * share, ceiling)
        moving = max(inside, network.size / (network.rate * constants[NETWORK] * share))
        between = constants[ROUND] if network.size else 0.0
        return (self.latency + between + moving) * (constants[KERNELS] if self.sent.kernels else 1.0)


def read_rows(path: Path = SHIPPED) -> list[Row]:
    """The published rows of dispatchers."""
    return [_row(case) for case in read_collectives(path) if case.text("collective") in KINDS]


def _row(case: Case) -> Row:
    place, sent = place_of(case), dispatched(case)
    fabric, members = place.fabric, np.arange(place.gpus)[None]
    surveyor = Tuner(fabric, sent.used(sent.library, place.gpus), sent.routing)
    found = select_variants(surveyor.evaluate_variants(sent.collective, members), sent.payload)
    crossings = surveyor.link_loads(sent.collective, members, found.slowest_variant).load_matrix
    spans = surveyor.group_topologies(members)[0].domain_count
    bandwidth = effective_bandwidth(fabric.links, surveyor.library, found.slowest_variant, spans)[crossings.link_index]
    size, nominal = sent.payload * crossings.seconds_per_byte * bandwidth, fabric.links.bandwidth[crossings.link_index]
    media = np.array([MEDIUM_OF_KIND[kind].value for kind in LINK_KINDS])[fabric.links.kind[crossings.link_index]]
    loads = {}
    for medium in Medium:
        own = np.flatnonzero(media == medium.value)
        busiest = own[(size[own] / nominal[own]).argmax()] if len(own) else None
        loads[medium] = Load() if busiest is None else Load(float(size[busiest]), float(nominal[busiest]))
    measured = seconds_of(case, sent.counted(fabric, place.gpus))
    rounds = found.slowest_variant.step_seconds[Medium.NETWORK] if spans > 1 else 0.0
    latency = float(found.latency.max()) - rounds
    handling = found.slowest_variant.sm_copy_cost
    together = handling.tokens_per_chunk(place.gpus) if handling and handling.chunk_tokens else 0
    return Row(case.text("source"), place, sent, measured, latency, loads, together, case.is_yes("in_fit"))


def constants_of(library: Library) -> dict[str, float]:
    """The fitted constants of a dispatcher."""
    (there, passed), (back, returned) = (
        _offer(library, kind) for kind in (CollectiveType.DISPATCH, CollectiveType.COMBINE)
    )
    return {
        NVLINK: library.nvlink_by_technology[None].efficiency,
        NETWORK: library.network_by_technology[None].efficiency,
        ROUND: there.step_seconds[Medium.NETWORK],
        COMBINE: back.efficiency,
        ROW: passed.token_seconds,
        RATE: passed.rate,
        RATE_BACK: returned.rate,
        CHUNK: returned.chunk_seconds,
        KERNELS: library.kernel_share,
    }


def _offer(library: Library, kind: CollectiveType) -> tuple[AlgorithmVariant, SmCopyCost]:
    """The one offer for a collective, and its handling of rows."""
    (offer,) = library.variants_for(kind)
    if offer.sm_copy_cost is None:
        raise ValueError(f"{library.name}: no handling of {kind.value}")
    return offer, offer.sm_copy_cost
