"""How do the constants of a communication library become a `Library`?

A file of `topologies/libraries` or `topologies/dispatchers`, or a user's own of the same format, is read strictly:
a key that nothing reads, a missing key, a value of the wrong type or out of its range, and an unknown name of an
algorithm, protocol, collective or link technology are errors that name the file, the key and the legal values.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from clustersim.collectives.chunking import ChunkSizeSteps
from clustersim.collectives.library import (
    ALGORITHMS,
    AlgorithmVariant,
    ChannelRamp,
    Library,
    Medium,
    NetworkConstants,
    NvlinkConstants,
    NvlsConstants,
    P2pChannelConstants,
    PipelineChunking,
    SmCopyCost,
)
from clustersim.common import data_files
from clustersim.common.errors import format_value, suggest_nearest
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.renamed_keys import COLLECTIVE_ALGORITHM, renamed_key_message
from clustersim.common.units import BytesPerSecond, Dimension, Seconds
from clustersim.hardware.link_technology import NETWORK_TECHNOLOGIES, SCALE_UP_TECHNOLOGIES, LinkTechnology
from clustersim.program.task import CollectiveType, TokenDispatcher

_ANY_TECHNOLOGY: Final = "any"  # key in files: constants of all technologies that are not listed
_CHUNK_STEP_KEYS: Final = ("one_domain", "up_to_three_domains", "more_domains")
_COLLECTIVES: Final = tuple(collective.value for collective in CollectiveType)
_MAX_COUNT: Final = 1_000_000  # of channels, SMs, ranks and tokens
_MAX_CORRECTION: Final = 10.0  # maximum correction factor of a bandwidth


def load_library(name: str) -> Library:
    """Read a packaged library (nccl, rccl, gloo) or a file that ends in .yaml, .yml or .json."""
    return _load_library_file(data_files.find_file("libraries", name))


def load_dispatcher(dispatcher: TokenDispatcher) -> Library:
    """Read the constants of a token dispatcher's kernels; raise InputError if there are none."""
    return _load_library_file(data_files.find_file("dispatchers", dispatcher.value))


def _load_library_file(path: Path) -> Library:
    return _parse_library_text(path, data_files.read_text(path))


@lru_cache(maxsize=16)
def _parse_library_text(path: Path, text: str) -> Library:
    """Parse a library file; cached by its text, since every simulation asks for the same few."""
    section = MappingReader(path, data_files.parse_mapping(path, text))
    section.reject_renamed_keys("libraries")
    library = _read_library(path.stem, section)
    section.reject_unknown_keys()
    return library


def _read_library(name: str, section: MappingReader) -> Library:
    variants = tuple(_read_variant(entry) for entry in section.get_entries("variants", "algorithm", "protocol"))
    links = section.get_section("links")
    has_channels = section.has_key("p2p_channels")
    return Library(
        name=name,
        nvlink_by_technology=_read_generations(section.get_section("generations")),
        network_by_technology=_read_networks(section.get_section("networks"), variants),
        pcie_efficiency=links.get_section("pcie").get_fraction("efficiency"),
        included_latency={medium: _get_time(links.get_section(medium.value), "included_latency") for medium in Medium},
        launch_seconds=_get_time(section, "launch"),
        pipeline=_read_pipeline_chunking(section.get_section("pipeline")),
        variants=variants,
        published=section.get_bool("published", required=True),
        p2p_channels=_read_p2p_channels(section.get_section("p2p_channels")) if has_channels else None,
        follows_nccl_env=section.get_bool("follows_nccl_env"),
        sm_count=_get_count(section, "num_sms", min_value=0) if section.has_key("num_sms") else 0,
        kernel_time_fraction=section.get_ratio("kernel_time_fraction", max_value=1.0),
    )


def _read_p2p_channels(section: MappingReader) -> P2pChannelConstants:
    return P2pChannelConstants(
        _get_count(section, "max_channels"),
        section.get_quantity("bytes_per_channel", Dimension.SIZE),
        section.get_quantity("max_bytes_per_channel", Dimension.SIZE),
    )


def _read_technologies(
    section: MappingReader, technologies: Mapping[str, LinkTechnology]
) -> dict[str, LinkTechnology | None]:
    """The technology that each entry's constants are for, by key; None: the default for those not listed."""
    choices = (*technologies, _ANY_TECHNOLOGY)
    for name in section.key_names():
        if name not in choices:
            raise section.input_error(name, f"there is no such link technology; {suggest_nearest(name, choices)}")
    return {name: technologies.get(name) for name in section.key_names()}


def _read_networks(
    section: MappingReader, variants: Iterable[AlgorithmVariant]
) -> dict[LinkTechnology | None, NetworkConstants]:
    names = {*ALGORITHMS, *(variant.protocol for variant in variants)}
    return {
        technology: _read_network(section.get_section(key), names)
        for key, technology in _read_technologies(section, NETWORK_TECHNOLOGIES).items()
    }


def _read_network(section: MappingReader, names: Iterable[str]) -> NetworkConstants:
    """names: the algorithms and protocols that may be unsupported."""
    latency = _get_time(section, "latency") if section.has_key("latency") else 0.0
    unsupported = section.get_items("unsupported") if section.has_key("unsupported") else None
    return NetworkConstants(
        section.get_fraction("efficiency"),
        latency,
        frozenset(_get_algorithm(unsupported, key, names) for key in unsupported.key_names())
        if unsupported
        else frozenset(),
        section.get_fraction("routed_efficiency") if section.has_key("routed_efficiency") else None,
        _get_time(section, "message_time") if section.has_key("message_time") else 0.0,
        _get_time(section, "peer_message_time") if section.has_key("peer_message_time") else 0.0,
    )


def _read_generations(section: MappingReader) -> dict[LinkTechnology | None, NvlinkConstants]:
    return {
        technology: _read_nvlink(section.get_section(key))
        for key, technology in _read_technologies(section, SCALE_UP_TECHNOLOGIES).items()
    }


def _read_nvlink(section: MappingReader) -> NvlinkConstants:
    has_rate, has_ramp = section.has_key("channel_bandwidth"), section.has_key("channel_ramp")
    return NvlinkConstants(
        efficiency=section.get_fraction("efficiency"),
        nvls=_read_nvls(section.get_section("nvls")) if section.has_key("nvls") else None,
        ll_rate_limits=_read_ll_limits(section) if section.has_key("ll_max_bandwidth") else None,
        launch_seconds=_get_time(section, "launch") if section.has_key("launch") else None,
        channel_rate=section.get_quantity("channel_bandwidth", Dimension.BANDWIDTH) if has_rate else None,
        bus_bandwidth_limits=_read_bus_limits(section.get_section("max_bus_bandwidth"))
        if section.has_key("max_bus_bandwidth")
        else {},
        channel_ramp=_read_channel_ramp(section.get_section("channel_ramp")) if has_ramp else None,
    )


def _read_ll_limits(section: MappingReader) -> tuple[BytesPerSecond, BytesPerSecond, BytesPerSecond]:
    one_domain, two_domains, more_domains = _read_rates(section, "ll_max_bandwidth", count=3)
    return one_domain, two_domains, more_domains


def _read_bus_limits(section: MappingReader) -> dict[str, tuple[BytesPerSecond, BytesPerSecond]]:
    limits = {}
    for name in section.key_names():
        _require_algorithm(section, name, name, ALGORITHMS)
        two_domains, more_domains = _read_rates(section, name, count=2)
        limits[name] = two_domains, more_domains
    return limits


def _read_rates(section: MappingReader, key: str, *, count: int) -> Iterator[BytesPerSecond]:
    rates = section.get_items(key, count=count)
    return (rates.get_quantity(index, Dimension.BANDWIDTH) for index in rates.key_names())


def _read_channel_ramp(section: MappingReader) -> ChannelRamp:
    return ChannelRamp(_get_count(section, "max_channels"), section.get_quantity("bytes_per_channel", Dimension.SIZE))


def _read_nvls(section: MappingReader) -> NvlsConstants:
    return NvlsConstants(
        section.get_fraction("bandwidth_fraction"),
        _read_count_pair(section, "channels"),
        section.get_quantity("chunk_overhead", Dimension.SIZE, allow_zero=True),
    )


def _read_variant(section: MappingReader) -> AlgorithmVariant:
    variant = AlgorithmVariant(
        algorithm=_get_algorithm(section, "algorithm", ALGORITHMS),
        protocol=section.get_text("protocol"),
        collectives=_read_collectives(section),
        startup_seconds=_get_time(section, "startup"),
        step_seconds=_read_step_times(section.get_section("step_latency")),
        network_only_step_seconds=_read_network_only_step(section.get_section("step_latency")),
        post_seconds=_get_time(section, "post"),
        efficiency=section.get_fraction("efficiency"),
        is_chunked=section.get_bool("chunked"),
        is_ll_limited=section.get_bool("ll_limited"),
        is_default=section.get_bool("default", default=True),
        adds_launch=section.get_bool("adds_launch", default=True),
        max_payload=_read_max_payload(section),
        uses_p2p_channels=section.get_bool("uses_p2p_channels"),
        pipeline=_read_pipeline_chunking(section.get_section("pipeline")) if section.has_key("pipeline") else None,
        correction_factors=_read_correction_factors(section) if section.has_key("correction_factors") else (),
        chunk_steps=_read_chunk_steps(section.get_section("chunk_steps")) if section.has_key("chunk_steps") else (),
        uses_channel_ramp=section.get_bool("uses_channel_ramp"),
        sm_copy_cost=_read_sm_copy_cost(section.get_section("sm_copy_cost"))
        if section.has_key("sm_copy_cost")
        else None,
        message_tokens=_read_tokens_by_ranks(section, "message_tokens"),
    )
    section.reject_unknown_keys()
    return variant


def _read_collectives(section: MappingReader) -> frozenset[CollectiveType]:
    names = section.get_items("collectives")
    return frozenset(CollectiveType(names.get_choice(key, *_COLLECTIVES, required=True)) for key in names.key_names())


def _read_step_times(section: MappingReader) -> dict[Medium, Seconds]:
    return {medium: _get_time(section, medium.value) for medium in Medium}


def _read_network_only_step(section: MappingReader) -> Seconds:
    """The time of a network step that nothing hides; as other network steps if the file has none."""
    return _get_time(section, "network_only" if section.has_key("network_only") else Medium.NETWORK.value)


def _read_max_payload(section: MappingReader) -> float:
    return section.get_quantity("max_payload", Dimension.SIZE) if section.has_key("max_payload") else math.inf


def _read_correction_factors(section: MappingReader) -> tuple[float, ...]:
    factors = section.get_items("correction_factors")
    return tuple(factors.get_ratio(key, max_value=_MAX_CORRECTION) for key in factors.key_names())


def _read_sm_copy_cost(section: MappingReader) -> SmCopyCost:
    return SmCopyCost(
        _get_time(section, "token_time"),
        section.get_quantity("bandwidth", Dimension.BANDWIDTH),
        _get_time(section, "chunk_time") if section.has_key("chunk_time") else 0.0,
        _read_tokens_by_ranks(section, "chunk_tokens"),
    )


def _read_tokens_by_ranks(section: MappingReader, name: str) -> tuple[tuple[int, int], ...]:
    """Pairs of a number of ranks and tokens; none where the file has no such key."""
    if not section.has_key(name):
        return ()
    pairs = section.get_items(name)
    return tuple(_read_count_pair(pairs, key) for key in pairs.key_names())


def _read_pipeline_chunking(section: MappingReader) -> PipelineChunking:
    return PipelineChunking(
        _get_chunk_fraction(section, "intra_domain_fraction"),
        _get_chunk_fraction(section, "inter_domain_fraction"),
        section.get_quantity("max_chunk", Dimension.SIZE),
    )


def _get_chunk_fraction(section: MappingReader, key: str) -> float:
    """A fraction of a payload, 0 to 1."""
    value = section.get_float(key)
    if value > 1.0:
        raise section.input_error(key, f"{format_value(value)} is not a fraction of a payload, 0 to 1")
    return value


def _read_chunk_steps(section: MappingReader) -> tuple[ChunkSizeSteps, ...]:
    return tuple(_read_chunk_sizes(section.get_items(key)) for key in _CHUNK_STEP_KEYS)


def _read_chunk_sizes(items: MappingReader) -> ChunkSizeSteps:
    """The largest chunk, and after it pairs of a smaller size and of when it is used."""
    largest_chunk = items.get_quantity("[0]", Dimension.SIZE)
    pairs = [items.get_items(key, count=2) for key in items.key_names()[1:]]
    return ChunkSizeSteps(
        largest_chunk, tuple((pair.get_quantity("[0]", Dimension.SIZE), pair.get_float("[1]")) for pair in pairs)
    )


def _get_algorithm(section: MappingReader, key: str, names: Iterable[str]) -> str:
    """A name among these, of which a renamed algorithm is refused with its new name."""
    name = section.get_text(key)
    _require_algorithm(section, key, name, names)
    return name


def _require_algorithm(section: MappingReader, key: str, name: str, names: Iterable[str]) -> None:
    if message := renamed_key_message(COLLECTIVE_ALGORITHM, [name]):
        raise section.input_error(key, f"{name} {message}")
    if name not in names:
        raise section.input_error(key, f"{format_value(name)} is unknown; {suggest_nearest(name, names)}")


def _read_count_pair(section: MappingReader, key: str) -> tuple[int, int]:
    pair = section.get_items(key, count=2)
    first, second = (_get_count(pair, index) for index in pair.key_names())
    return first, second


def _get_count(section: MappingReader, key: str, *, min_value: int = 1) -> int:
    return section.get_int(key, min_value=min_value, max_value=_MAX_COUNT)


def _get_time(section: MappingReader, key: str) -> Seconds:
    return section.get_quantity(key, Dimension.TIME, allow_zero=True)
