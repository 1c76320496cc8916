"""How are the efficiency constants of an accelerator's file read?

Section `efficiency`: fractions of peak rates and bandwidths that kernels reach, with the overheads of each. All
problems of the section are reported at once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import suggest_nearest
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension, Seconds
from clustersim.hardware.efficiency import (
    ATTENTION_LIBRARIES,
    FLASH_ATTENTION2,
    MEASURED_ATTENTION,
    AttentionEfficiency,
    AttentionLibrary,
    GroupedGemmEfficiency,
    KernelEfficiency,
    MatmulEfficiency,
    ScanShare,
)

MAX_COMPUTE_UNITS: Final = 1_000_000  # compute units, or rows of an attention block; above it is a typing error
MAX_FORMAT_SPEEDUP: Final = 4.0  # speedup of attention in a low-precision format over BF16
_PROVENANCE: Final = MappingProxyType({"published": True, "roofline": False})


def read_efficiency(section: MappingReader) -> KernelEfficiency:
    """Read section `efficiency`; raise InputError with all of its problems."""
    return KernelEfficiency(
        **section.collect(
            published=lambda: _PROVENANCE[section.get_choice("provenance", *_PROVENANCE, required=True)],
            matmul=lambda: _read_matmul(section.get_section("matmul")),
            attention_forward=lambda: _read_attention(section.get_section("attention_forward")),
            attention_backward=lambda: _read_attention(section.get_section("attention_backward")),
            attention_library=lambda: section.get_choice("attention_library", *ATTENTION_LIBRARIES),
            attention_libraries=lambda: _read_attention_libraries(section),
            sdpa_library=lambda: (
                section.get_choice("sdpa_library", *ATTENTION_LIBRARIES)
                if section.has_key("sdpa_library")
                else FLASH_ATTENTION2
            ),
            memory_bandwidth_fraction=lambda: section.get_fraction("memory_bandwidth_fraction"),
            kernel_latency=lambda: _read_time(section, "kernel_latency"),
            launch_interval=lambda: _read_time(section, "launch_interval"),
            grouped_gemm=lambda: (
                _read_grouped(section.get_section("grouped_gemm")) if section.has_key("grouped_gemm") else None
            ),
            quantization_bandwidth_ratio=lambda: _read_ratio(section, "quantization_bandwidth_ratio"),
            operator_bandwidth_ratio=lambda: _read_ratio(section, "operator_bandwidth_ratio"),
            scan_shares=lambda: (
                read_scan_shares(section.get_section("scan_shares")) if section.has_key("scan_shares") else {}
            ),
        )
    )


def read_scan_shares(section: MappingReader) -> Mapping[str, ScanShare]:
    """Shares of the roofline by routine: `ssd: {forward: 0.6, backward: 0.6}`."""

    def read(routine: str) -> ScanShare:
        share = section.get_section(routine)
        return ScanShare(
            **share.collect(
                forward=lambda: share.get_fraction("forward"), backward=lambda: share.get_fraction("backward")
            )
        )

    return section.collect(**{routine: partial(read, routine) for routine in section.key_names()})


def _read_ratio(section: MappingReader, key: str) -> float:
    """A rate relative to another, equal to it where the file does not say."""
    return section.get_fraction(key) if section.has_key(key) else 1.0


def _read_matmul(section: MappingReader) -> MatmulEfficiency:
    return MatmulEfficiency(
        **section.collect(
            peak_fraction=lambda: section.get_fraction("peak_fraction"),
            prologue=lambda: section.get_float("prologue"),
            edge=lambda: section.get_float("edge"),
            tiles=lambda: _read_tiles(section),
            peak_fraction_by_format=lambda: _read_by_format(
                section, "peak_fraction_by_format", MappingReader.get_fraction
            ),
            tn_only=lambda: section.get_bool("tn_only"),
            prologue_by_format=lambda: _read_by_format(section, "prologue_by_format", MappingReader.get_float),
            kernel_latency_by_format=lambda: _read_by_format(section, "kernel_latency_by_format", _read_time),
        )
    )


def _read_by_format(
    section: MappingReader, key: str, read: Callable[[MappingReader, str], float]
) -> Mapping[DType, float]:
    """A constant by low-precision format, for those formats that have their own."""
    if not section.has_key(key):
        return {}
    by_format, formats = section.get_section(key), {dtype.value: dtype for dtype in LOW_PRECISION_DTYPES}

    def read_format(name: str) -> float:
        if name not in formats:
            raise by_format.input_error(name, f"no format with scales; {suggest_nearest(name, formats)}")
        return read(by_format, name)

    values = by_format.collect(**{name: partial(read_format, name) for name in by_format.key_names()})
    return {formats[name]: value for name, value in values.items()}


def _read_time(section: MappingReader, key: str) -> Seconds:
    return section.get_quantity(key, Dimension.TIME, allow_zero=True)


def _read_grouped(section: MappingReader) -> GroupedGemmEfficiency:
    return GroupedGemmEfficiency(
        **section.collect(
            multi_stream_peak_fraction=lambda: section.get_fraction("multi_stream_peak_fraction"),
            kernel_peak_fraction=lambda: section.get_fraction("kernel_peak_fraction"),
            prologue=lambda: section.get_float("prologue"),
            edge=lambda: section.get_float("edge"),
            host_launch=lambda: _read_time(section, "host_launch"),
            kernel_peak_fraction_by_format=lambda: _read_by_format(
                section, "kernel_peak_fraction_by_format", MappingReader.get_fraction
            ),
        )
    )


def _read_tiles(section: MappingReader) -> tuple[tuple[int, int], ...]:
    tiles = section.get_value("tiles")
    if not isinstance(tiles, list) or not tiles:
        raise section.input_error("tiles", f"{tiles!r} is not a list of [m, n] pairs")
    for tile in tiles:
        if not isinstance(tile, list) or len(tile) != 2 or not all(type(side) is int and side > 0 for side in tile):
            raise section.input_error("tiles", f"{tile!r} is not a pair [m, n] of positive whole numbers")
    return tuple((m, n) for m, n in tiles)


def _read_attention_libraries(section: MappingReader) -> Mapping[str, AttentionLibrary]:
    """Flash attention of libraries that are not the fastest one, by name."""
    if not section.has_key("attention_libraries"):
        return {}
    libraries = section.get_section("attention_libraries")
    fastest = section.content.get("attention_library", ATTENTION_LIBRARIES[0])

    def read_library(name: str) -> AttentionLibrary:
        if name not in MEASURED_ATTENTION:
            raise libraries.input_error(name, f"no library; {suggest_nearest(name, MEASURED_ATTENTION)}")
        if name == fastest:
            raise libraries.input_error(
                name, "is attention_library, whose constants are attention_forward and attention_backward"
            )
        library = libraries.get_section(name)
        return AttentionLibrary(
            **library.collect(
                forward=lambda: _read_attention(library.get_section("forward")),
                backward=lambda: _read_attention(library.get_section("backward")),
            )
        )

    return libraries.collect(**{name: partial(read_library, name) for name in libraries.key_names()})


def _read_attention(section: MappingReader) -> AttentionEfficiency:
    return AttentionEfficiency(
        **section.collect(
            peak_fraction=lambda: section.get_fraction("peak_fraction"),
            causal_ratio=lambda: section.get_fraction("causal_ratio"),
            head_overhead=lambda: section.get_float("head_overhead"),
            key_overhead=lambda: section.get_float("key_overhead"),
            query_block=lambda: section.get_int("query_block", max_value=MAX_COMPUTE_UNITS),
            unequal_head_ratio=lambda: _read_ratio(section, "unequal_head_ratio"),
            speedup_by_format=lambda: _read_by_format(
                section,
                "speedup_by_format",
                lambda by_format, name: by_format.get_ratio(name, max_value=MAX_FORMAT_SPEEDUP),
            ),
        )
    )
