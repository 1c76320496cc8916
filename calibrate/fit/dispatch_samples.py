"""Published measurements of MoE dispatch and combine, with their link loads.

The bytes on the busiest port of each medium follow from the token routing alone, so a candidate set of
constants is evaluated in microseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clustersim.collectives.library import AlgorithmVariant, Library, LinkTechnologies, Medium, SmCopyCost
from clustersim.collectives.phase_cost import MEDIUM_OF_KIND, effective_bandwidth
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.topology import LINK_KINDS
from clustersim.program.task import CollectiveType, TokenDispatcher
from clustersim.validation.cases import ValidationCase
from clustersim.validation.collectives import PUBLISHED_TABLE, CollectiveBenchmark, parse_benchmark, read_collectives
from clustersim.validation.dispatch_benchmark import (
    COLLECTIVE_BY_NAME,
    DispatchBenchmark,
    measured_dispatch_seconds,
    parse_dispatch_benchmark,
)

DispatchConstants = Mapping[str, float]
NVLINK_SHARE, NETWORK_SHARE, STEP_LATENCY = "nvlink", "network", "round"
COMBINE_SHARE, TOKEN_SECONDS, SM_RATE, COMBINE_SM_RATE, KERNEL_SHARE = "combine", "row", "rate", "rate back", "kernels"
CHUNK_SECONDS = "chunk"


@dataclass(frozen=True, slots=True)
class PortLoad:
    """Bytes on the busiest port of one medium, and its nominal rate in bytes/s; 0 bytes if the medium is not used."""

    transferred_bytes: Bytes = 0.0
    rate: BytesPerSecond = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class DispatchSample:
    """A published measurement of a dispatch or combine, compared by identity.

    latency_seconds: time in which nothing moves, without the step latency; tokens_per_chunk: tokens that are
    copied per chunk of a combine, 0 where it does not matter; fitted: whether constants are fitted to it.
    """

    source: str
    benchmark: CollectiveBenchmark
    dispatch: DispatchBenchmark
    measured_seconds: Seconds
    latency_seconds: Seconds
    port_loads: Mapping[Medium, PortLoad]
    tokens_per_chunk: int
    fitted: bool

    @property
    def fold_key(self) -> tuple[str, str, int]:
        """Cross-validation fold: source, GPU, ranks."""
        return self.source, self.benchmark.gpu, self.benchmark.gpu_count

    @property
    def dispatcher(self) -> TokenDispatcher:
        """The dispatcher library that was measured."""
        return self.dispatch.routing.dispatcher

    def ratio(self, constants: DispatchConstants) -> float:
        """Predicted over measured time."""
        return self.predicted_seconds(constants) / self.measured_seconds

    def predicted_seconds(self, constants: DispatchConstants) -> Seconds:
        """Predicted seconds in closed form; a test checks it against the full model."""
        is_combine = self.dispatch.collective is CollectiveType.COMBINE
        share = constants[COMBINE_SHARE] if is_combine else 1.0
        rate, chunk = (
            (constants[COMBINE_SM_RATE], constants[CHUNK_SECONDS]) if is_combine else (constants[SM_RATE], 0.0)
        )
        copy_cost = SmCopyCost(
            constants[TOKEN_SECONDS], rate, chunk / self.tokens_per_chunk if self.tokens_per_chunk else 0.0
        )
        ceiling = (self.dispatch.sm_count or self.dispatch.library.sm_count) * copy_cost.sm_rate(
            self.dispatch.routing.token_bytes, self.benchmark.gpu_count
        )
        nvlink, network = self.port_loads[Medium.NVLINK], self.port_loads[Medium.NETWORK]
        nvlink_seconds = nvlink.transferred_bytes / min(nvlink.rate * constants[NVLINK_SHARE] * share, ceiling)
        transfer_seconds = max(
            nvlink_seconds, network.transferred_bytes / (network.rate * constants[NETWORK_SHARE] * share)
        )
        step_latency = constants[STEP_LATENCY] if network.transferred_bytes else 0.0
        return (self.latency_seconds + step_latency + transfer_seconds) * (
            constants[KERNEL_SHARE] if self.dispatch.is_kernel_only else 1.0
        )


def read_dispatch_samples() -> list[DispatchSample]:
    """All published measurements of dispatchers over links that have no constants of their own."""
    cases = (case for case in read_collectives(PUBLISHED_TABLE) if case.text("collective") in COLLECTIVE_BY_NAME)
    return [_dispatch_sample(case) for case in cases if _has_default_links(case)]


def _has_default_links(case: ValidationCase) -> bool:
    """Whether the dispatcher's default constants are those of the row's links; those of EFA and xGMI are not fitted."""
    library = parse_dispatch_benchmark(case).library
    technologies = LinkTechnologies.from_links(parse_benchmark(case).fabric.links)
    return not any(technology in library.network_by_technology for technology in technologies.networks) and not any(
        technology in library.nvlink_by_technology for technology in technologies.nvlink_generations
    )


def _dispatch_sample(case: ValidationCase) -> DispatchSample:
    benchmark, dispatch = parse_benchmark(case), parse_dispatch_benchmark(case)
    fabric, members = benchmark.fabric, np.arange(benchmark.gpu_count)[None]
    tuner = Tuner(fabric, dispatch.configured_library(dispatch.library, benchmark.gpu_count), dispatch.routing)
    selection = select_variants(tuner.evaluate_variants(dispatch.collective, members), dispatch.payload)
    link_loads = tuner.link_loads(dispatch.collective, members, selection.slowest_variant).load_matrix
    domain_count = tuner.group_topologies(members)[0].domain_count
    bandwidth = effective_bandwidth(fabric.links, tuner.library, selection.slowest_variant, domain_count)[
        link_loads.link_index
    ]
    size, nominal = (
        dispatch.payload * link_loads.seconds_per_byte * bandwidth,
        fabric.links.bandwidth[link_loads.link_index],
    )
    media = np.array([MEDIUM_OF_KIND[kind].value for kind in LINK_KINDS])[fabric.links.kind[link_loads.link_index]]
    loads = {}
    for medium in Medium:
        medium_entries = np.flatnonzero(media == medium.value)
        busiest = (
            medium_entries[(size[medium_entries] / nominal[medium_entries]).argmax()] if len(medium_entries) else None
        )
        loads[medium] = PortLoad() if busiest is None else PortLoad(float(size[busiest]), float(nominal[busiest]))
    measured = measured_dispatch_seconds(case, dispatch.counted_bytes(fabric, benchmark.gpu_count))
    step_latency = selection.slowest_variant.step_seconds[Medium.NETWORK] if domain_count > 1 else 0.0
    latency = float(selection.latency.max()) - step_latency
    copy_cost = selection.slowest_variant.sm_copy_cost
    tokens_per_chunk = copy_cost.tokens_per_chunk(benchmark.gpu_count) if copy_cost and copy_cost.chunk_tokens else 0
    return DispatchSample(
        case.text("source"), benchmark, dispatch, measured, latency, loads, tokens_per_chunk, case.boolean("in_fit")
    )


def dispatcher_constants(library: Library) -> dict[str, float]:
    """The fitted constants of a dispatcher library."""
    (dispatch, dispatch_copy), (combine, combine_copy) = (
        _algorithm_variant(library, kind) for kind in (CollectiveType.DISPATCH, CollectiveType.COMBINE)
    )
    return {
        NVLINK_SHARE: library.nvlink_by_technology[None].efficiency,
        NETWORK_SHARE: library.network_by_technology[None].efficiency,
        STEP_LATENCY: dispatch.step_seconds[Medium.NETWORK],
        COMBINE_SHARE: combine.efficiency,
        TOKEN_SECONDS: dispatch_copy.token_seconds,
        SM_RATE: dispatch_copy.rate,
        COMBINE_SM_RATE: combine_copy.rate,
        CHUNK_SECONDS: combine_copy.chunk_seconds,
        KERNEL_SHARE: library.kernel_time_fraction,
    }


def _algorithm_variant(library: Library, kind: CollectiveType) -> tuple[AlgorithmVariant, SmCopyCost]:
    """The only algorithm variant for a collective, and its SM copy cost."""
    (variant,) = library.variants_for(kind)
    if variant.sm_copy_cost is None:
        raise ValueError(f"{library.name}: no handling of {kind.value}")
    return variant, variant.sm_copy_cost
