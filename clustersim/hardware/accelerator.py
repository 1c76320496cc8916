"""What can one accelerator do?

Datasheet rates and sizes, and the efficiency constants of real kernels on it. Packaged accelerators are YAML
files in `topologies/accelerators`, with a source for every number; the path of any other such file works as
well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from clustersim.common import data_files
from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, FlopPerSecond, Seconds
from clustersim.hardware.alignment import KernelAlignment
from clustersim.hardware.efficiency import (
    AttentionEfficiency,
    GroupedGemmEfficiency,
    KernelEfficiency,
    MatmulEfficiency,
    TrainingDerating,
)
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.power import PowerSpec
from clustersim.hardware.technology_reader import read_generation

MAX_COMPUTE_UNITS: Final = 1_000_000  # compute units, or rows of an attention block; above it is a typing error
MAX_SUSTAINED_RATIO: Final = 1.25  # relative to the rate of the published standalone kernels
MAX_FORMAT_SPEEDUP: Final = 4.0  # speedup of attention in a low-precision format over BF16
MAX_INTERFERENCE: Final = 10.0  # kernels slowed 11x; above it is a percentage by mistake
_UNKNOWABLE: Final = ("power", "price")  # keys of the section `unknown`
_PROVENANCE: Final = MappingProxyType({"published": True, "roofline": False})


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU (or CPU) as the simulator models it.

    peak: dense FLOP/s by number format, without sparsity; memory_bytes: what a process can allocate;
    memory_bandwidth: bytes/s of device memory; compute_units: SMs or CUs; context_bytes: driver context and
    library workspaces that a training process loses; interference: mean relative slowdown of a kernel while a
    collective runs concurrently on the same GPU, over a training step (0.2: 20 % longer; 0: none); sources: of
    each group of numbers; alignment: cost of misaligned sizes; nvlink: generation of its NVLink or xGMI ports,
    None without any; host_launch_ratio: time that its host takes to launch a kernel, relative to an x86 server;
    power: its power draw, None where unknown; unknown: why its power, or a list price, is not known.
    """

    name: str
    description: str
    peak: Mapping[DType, FlopPerSecond]
    memory_bytes: Bytes
    memory_bandwidth: BytesPerSecond
    compute_units: int
    context_bytes: Bytes
    interference: float
    efficiency: KernelEfficiency
    sources: Mapping[str, str]
    derating: TrainingDerating = field(default_factory=TrainingDerating)
    alignment: KernelAlignment = field(default_factory=KernelAlignment)
    nvlink: LinkTechnology | None = None
    host_launch_ratio: float = 1.0
    power: PowerSpec | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    def peak_flops(self, dtype: DType) -> FlopPerSecond:
        """Dense peak in FLOP/s; raise InputError that lists the accelerator's formats."""
        if dtype not in self.formats:
            formats = ", ".join(dtype_name.value for dtype_name in self.formats)
            raise InputError(f"{self.name} has no {dtype.value} peak; it computes in {formats}")
        return self.peak[dtype.peak_dtype]

    @property
    def formats(self) -> tuple[DType, ...]:
        """Compute formats of the accelerator; low-precision ones only if its matmul library has kernels for them."""
        fractions = self.efficiency.matmul.peak_fraction_by_format
        candidates = (dtype for dtype in COMPUTE_DTYPES if dtype not in LOW_PRECISION_DTYPES or dtype in fractions)
        return tuple(candidate for candidate in candidates if candidate.peak_dtype in self.peak)


def load_accelerator(name_or_path: str) -> Accelerator:
    """Load a packaged accelerator by name (`h100-sxm-80gb`) or any accelerator file by path."""
    path = data_files.find_file("accelerators", name_or_path)
    section = MappingReader(path, data_files.read_mapping(path))
    section.reject_renamed_keys("accelerators")
    accelerator = Accelerator(
        name=path.stem,
        description=section.get_text("description"),
        peak=_read_peak(section.get_section("peak")),
        memory_bytes=section.get_quantity("memory", Dimension.SIZE),
        memory_bandwidth=section.get_quantity("memory_bandwidth", Dimension.BANDWIDTH),
        compute_units=section.get_int("compute_units", max_value=MAX_COMPUTE_UNITS),
        context_bytes=section.get_quantity("context", Dimension.SIZE, allow_zero=True),
        interference=_read_interference(section),
        efficiency=_read_efficiency(section.get_section("efficiency")),
        derating=_read_derating(section.get_section("training_derating"))
        if section.has_key("training_derating")
        else TrainingDerating(),
        alignment=_read_alignment(section.get_section("alignment"))
        if section.has_key("alignment")
        else KernelAlignment(),
        sources=section.get_section("sources").get_text_mapping(),
        nvlink=read_generation(section, None, key="nvlink") if section.has_key("nvlink") else None,
        host_launch_ratio=section.get_float("host_launch_ratio") if section.has_key("host_launch_ratio") else 1.0,
        power=PowerSpec.from_section(section.get_section("power")) if section.has_key("power") else None,
        unknown=_read_unknown(section) if section.has_key("unknown") else {},
    )
    section.reject_unknown_keys()
    return accelerator


def _read_peak(section: MappingReader) -> Mapping[DType, FlopPerSecond]:
    formats = {dtype.value: dtype for dtype in COMPUTE_DTYPES}
    for key in section.key_names():
        if key not in formats:
            raise section.input_error(key, f"unknown number format; {suggest_nearest(key, formats)}")
    return {formats[key]: section.get_quantity(key, Dimension.COMPUTE) for key in section.key_names()}


def _read_unknown(section: MappingReader) -> Mapping[str, str]:
    """Why the power, or a price in any list, is not known."""
    reasons = section.get_section("unknown")
    for key in reasons.key_names():
        if key not in _UNKNOWABLE:
            raise reasons.input_error(key, f"not one of {', '.join(_UNKNOWABLE)}; {suggest_nearest(key, _UNKNOWABLE)}")
    if reasons.has_key("power") and section.has_key("power"):
        raise reasons.input_error("power", "the file has a section power; leave one of them out")
    return reasons.get_text_mapping()


def _read_interference(section: MappingReader) -> float:
    value = section.get_float("interference")
    if value > MAX_INTERFERENCE:
        raise section.input_error(
            "interference", f"{format_value(value)} is above {MAX_INTERFERENCE:g}; 0.2 means 20 % longer"
        )
    return value


def _read_efficiency(section: MappingReader) -> KernelEfficiency:
    provenance = section.get_choice("provenance", *_PROVENANCE, required=True)
    return KernelEfficiency(
        published=_PROVENANCE[provenance],
        matmul=_read_matmul(section.get_section("matmul")),
        attention_forward=_read_attention(section.get_section("attention_forward")),
        attention_backward=_read_attention(section.get_section("attention_backward")),
        memory_bandwidth_fraction=section.get_fraction("memory_bandwidth_fraction"),
        kernel_latency=section.get_quantity("kernel_latency", Dimension.TIME, allow_zero=True),
        launch_interval=section.get_quantity("launch_interval", Dimension.TIME, allow_zero=True),
        grouped_gemm=_read_grouped(section.get_section("grouped_gemm")) if section.has_key("grouped_gemm") else None,
        quantization_bandwidth_ratio=section.get_fraction("quantization_bandwidth_ratio")
        if section.has_key("quantization_bandwidth_ratio")
        else 1.0,
    )


def _read_derating(section: MappingReader) -> TrainingDerating:
    return TrainingDerating(
        sustained_ratio=section.get_ratio("sustained_ratio", max_value=MAX_SUSTAINED_RATIO),
        gpu_spread=section.get_float("gpu_spread"),
        flash2_slowdown=section.get_float("flash2_slowdown", min_value=1.0),
        low_precision_ratio=section.get_ratio("low_precision_ratio", max_value=MAX_SUSTAINED_RATIO)
        if section.has_key("low_precision_ratio")
        else None,
    )


def _read_alignment(section: MappingReader) -> KernelAlignment:
    unaligned, batched = section.get_fraction("unaligned"), section.get_fraction("batched")
    if batched > unaligned:
        raise section.input_error("batched", f"{format_value(batched)} is above unaligned {format_value(unaligned)}")
    return KernelAlignment(unaligned, batched, _read_head_dims(section))


def _read_head_dims(section: MappingReader) -> tuple[int, ...]:
    sizes = section.get_value("head_dims")
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise section.input_error("head_dims", f"{sizes!r} is not a list of positive whole numbers")
    if sizes != sorted(set(sizes)):
        raise section.input_error("head_dims", f"{sizes!r} does not ascend")
    return tuple(sizes)


def _read_matmul(section: MappingReader) -> MatmulEfficiency:
    return MatmulEfficiency(
        peak_fraction=section.get_fraction("peak_fraction"),
        prologue=section.get_float("prologue"),
        edge=section.get_float("edge"),
        tiles=_read_tiles(section),
        peak_fraction_by_format=_read_by_format(section, "peak_fraction_by_format", MappingReader.get_fraction),
        tn_only=section.get_bool("tn_only"),
        prologue_by_format=_read_by_format(section, "prologue_by_format", MappingReader.get_float),
        kernel_latency_by_format=_read_by_format(section, "kernel_latency_by_format", _read_kernel_latency),
    )


def _read_by_format(
    section: MappingReader, key: str, read: Callable[[MappingReader, str], float]
) -> Mapping[DType, float]:
    """A constant by low-precision format, for those formats that have their own."""
    if not section.has_key(key):
        return {}
    by_format, formats = section.get_section(key), {dtype.value: dtype for dtype in LOW_PRECISION_DTYPES}
    for name in by_format.key_names():
        if name not in formats:
            raise by_format.input_error(name, f"no format with scales; {suggest_nearest(name, formats)}")
    return {formats[name]: read(by_format, name) for name in by_format.key_names()}


def _read_kernel_latency(section: MappingReader, key: str) -> Seconds:
    return section.get_quantity(key, Dimension.TIME, allow_zero=True)


def _read_grouped(section: MappingReader) -> GroupedGemmEfficiency:
    return GroupedGemmEfficiency(
        multi_stream_peak_fraction=section.get_fraction("multi_stream_peak_fraction"),
        kernel_peak_fraction=section.get_fraction("kernel_peak_fraction"),
        prologue=section.get_float("prologue"),
        edge=section.get_float("edge"),
        host_launch=section.get_quantity("host_launch", Dimension.TIME, allow_zero=True),
        kernel_peak_fraction_by_format=_read_by_format(
            section, "kernel_peak_fraction_by_format", MappingReader.get_fraction
        ),
    )


def _read_tiles(section: MappingReader) -> tuple[tuple[int, int], ...]:
    tiles = section.get_value("tiles")
    if not isinstance(tiles, list) or not tiles:
        raise section.input_error("tiles", f"{tiles!r} is not a list of [m, n] pairs")
    for tile in tiles:
        if not isinstance(tile, list) or len(tile) != 2 or not all(type(side) is int and side > 0 for side in tile):
            raise section.input_error("tiles", f"{tile!r} is not a pair [m, n] of positive whole numbers")
    return tuple((m, n) for m, n in tiles)


def _read_attention(section: MappingReader) -> AttentionEfficiency:
    return AttentionEfficiency(
        peak_fraction=section.get_fraction("peak_fraction"),
        causal_ratio=section.get_fraction("causal_ratio"),
        head_overhead=section.get_float("head_overhead"),
        key_overhead=section.get_float("key_overhead"),
        query_block=section.get_int("query_block", max_value=MAX_COMPUTE_UNITS),
        speedup_by_format=_read_by_format(
            section,
            "speedup_by_format",
            lambda by_format, name: by_format.get_ratio(name, max_value=MAX_FORMAT_SPEEDUP),
        ),
    )
