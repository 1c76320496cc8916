"""What can one accelerator do?

Datasheet rates and sizes, and the constants with which real kernels reach them. Shipped accelerators are YAML files in
`topologies/accelerators`, with a source for every number; any path to such a file works as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from clustersim.common import data_files
from clustersim.common.dtypes import COMPUTED, NARROW, DType
from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.mapping_reader import Section
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, FlopPerSecond, Seconds
from clustersim.hardware.alignment import Alignment
from clustersim.hardware.efficiency import (
    AttentionEfficiency,
    Efficiency,
    GroupedEfficiency,
    InTraining,
    MatmulEfficiency,
)
from clustersim.hardware.link_technology import Technology
from clustersim.hardware.power import Power
from clustersim.hardware.technology_reader import read_generation

MOST_UNITS: Final = 1_000_000  # compute units, or rows of an attention block: a typing error beyond
MOST_SUSTAINED: Final = 1.25  # of the published single kernels' rate
MOST_FASTER: Final = 4.0  # attention in a format with scales than in BF16
MOST_INTERFERENCE: Final = 10.0  # kernels that take eleven times as long: a percentage by mistake beyond
_PROVENANCE: Final = MappingProxyType({"published": True, "roofline": False})


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU (or CPU) as the simulator sees it.

    peak: dense FLOP/s by number format, without sparsity; memory_bytes: what a process can address; memory_bandwidth:
    bytes/s of device memory; compute_units: SMs or CUs; context_bytes: driver context and library workspaces that a
    training process loses; interference: the part by which a kernel takes longer while a collective runs beside it on
    the same GPU, on average over a training step (0.2: 20 % longer; 0: they do not disturb each other); sources: where
    each group of numbers comes from; alignment: what sizes that fit badly cost; nvlink: the generation of its NVLink or
    xGMI ports, None without any; host_pace: how many times as long as an x86 server its host takes to launch a kernel;
    power: what it draws, None where that is not known.
    """

    name: str
    description: str
    peak: Mapping[DType, FlopPerSecond]
    memory_bytes: Bytes
    memory_bandwidth: BytesPerSecond
    compute_units: int
    context_bytes: Bytes
    interference: float
    efficiency: Efficiency
    sources: Mapping[str, str]
    in_training: InTraining = field(default_factory=InTraining)
    alignment: Alignment = field(default_factory=Alignment)
    nvlink: Technology | None = None
    host_pace: float = 1.0
    power: Power | None = None

    def peak_of(self, dtype: DType) -> FlopPerSecond:
        """Dense peak in FLOP/s; raise InputError that lists the formats that this accelerator has."""
        if dtype not in self.formats:
            formats = ", ".join(known.value for known in self.formats)
            raise InputError(f"{self.name} has no {dtype.value} peak; it computes in {formats}")
        return self.peak[dtype.arithmetic]

    @property
    def formats(self) -> tuple[DType, ...]:
        """The formats that it computes in; of those with scales only what there are kernels for."""
        shares = self.efficiency.matmul.shares
        legal = (item for item in COMPUTED if item not in NARROW or item in shares)
        return tuple(element for element in legal if element.arithmetic in self.peak)


def load_accelerator(name_or_path: str) -> Accelerator:
    """Read a shipped accelerator by name (`h100-sxm-80gb`) or any accelerator file by path."""
    path = data_files.find("accelerators", name_or_path)
    section = Section(path, data_files.read_mapping(path))
    accelerator = Accelerator(
        name=path.stem,
        description=section.text("description"),
        peak=_peak(section.section("peak")),
        memory_bytes=section.quantity("memory", Dimension.SIZE),
        memory_bandwidth=section.quantity("memory_bandwidth", Dimension.BANDWIDTH),
        compute_units=section.count("compute_units", most=MOST_UNITS),
        context_bytes=section.quantity("context", Dimension.SIZE, zero=True),
        interference=_interference(section),
        efficiency=_efficiency(section.section("efficiency")),
        in_training=_in_training(section.section("in_training")) if section.has("in_training") else InTraining(),
        alignment=_alignment(section.section("alignment")) if section.has("alignment") else Alignment(),
        sources=section.section("sources").texts(),
        nvlink=read_generation(section, None, key="nvlink") if section.has("nvlink") else None,
        host_pace=section.number("host_pace") if section.has("host_pace") else 1.0,
        power=Power.read(section.section("power")) if section.has("power") else None,
    )
    section.finish()
    return accelerator


def _peak(section: Section) -> Mapping[DType, FlopPerSecond]:
    formats = {dtype.value: dtype for dtype in COMPUTED}
    for key in section.names():
        if key not in formats:
            raise section.refuse(key, f"unknown number format; {nearest(key, formats)}")
    return {formats[key]: section.quantity(key, Dimension.COMPUTE) for key in section.names()}


def _interference(section: Section) -> float:
    value = section.number("interference")
    if value > MOST_INTERFERENCE:
        raise section.refuse("interference", f"{shown(value)} is above {MOST_INTERFERENCE:g}; 0.2 means 20 % longer")
    return value


def _efficiency(section: Section) -> Efficiency:
    provenance = section.choice("provenance", *_PROVENANCE, required=True)
    return Efficiency(
        published=_PROVENANCE[provenance],
        matmul=_matmul(section.section("matmul")),
        attention_forward=_attention(section.section("attention_forward")),
        attention_backward=_attention(section.section("attention_backward")),
        memory=section.share("memory"),
        kernel_latency=section.quantity("kernel_latency", Dimension.TIME, zero=True),
        launch_interval=section.quantity("launch_interval", Dimension.TIME, zero=True),
        grouped=_grouped(section.section("grouped")) if section.has("grouped") else None,
        casts=section.share("casts") if section.has("casts") else 1.0,
    )


def _in_training(section: Section) -> InTraining:
    return InTraining(
        sustained=section.ratio("sustained", most=MOST_SUSTAINED),
        spread=section.number("spread"),
        flash2=section.number("flash2", low=1.0),
        narrow=section.ratio("narrow", most=MOST_SUSTAINED) if section.has("narrow") else None,
    )


def _alignment(section: Section) -> Alignment:
    unaligned, batched = section.share("unaligned"), section.share("batched")
    if batched > unaligned:
        raise section.refuse("batched", f"{shown(batched)} is above unaligned {shown(unaligned)}")
    return Alignment(unaligned, batched, _head_dims(section))


def _head_dims(section: Section) -> tuple[int, ...]:
    sizes = section.value("head_dims")
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise section.refuse("head_dims", f"{sizes!r} is not a list of positive whole numbers")
    if sizes != sorted(set(sizes)):
        raise section.refuse("head_dims", f"{sizes!r} does not ascend")
    return tuple(sizes)


def _matmul(section: Section) -> MatmulEfficiency:
    return MatmulEfficiency(
        share=section.share("share"),
        prologue=section.number("prologue"),
        edge=section.number("edge"),
        tiles=_tiles(section),
        shares=_of_formats(section, "shares", Section.share),
        by_rows=section.flag("by_rows"),
        prologues=_of_formats(section, "prologues", Section.number),
        starts=_of_formats(section, "starts", _start),
    )


def _of_formats(section: Section, key: str, read: Callable[[Section, str], float]) -> Mapping[DType, float]:
    """A constant of each format with scales that has one of its own."""
    if not section.has(key):
        return {}
    own, formats = section.section(key), {dtype.value: dtype for dtype in NARROW}
    for name in own.names():
        if name not in formats:
            raise own.refuse(name, f"no format with scales; {nearest(name, formats)}")
    return {formats[name]: read(own, name) for name in own.names()}


def _start(section: Section, key: str) -> Seconds:
    return section.quantity(key, Dimension.TIME, zero=True)


def _grouped(section: Section) -> GroupedEfficiency:
    return GroupedEfficiency(
        share=section.share("share"),
        kernel_share=section.share("kernel_share"),
        prologue=section.number("prologue"),
        edge=section.number("edge"),
        call=section.quantity("call", Dimension.TIME, zero=True),
        kernel_shares=_of_formats(section, "kernel_shares", Section.share),
    )


def _tiles(section: Section) -> tuple[tuple[int, int], ...]:
    tiles = section.value("tiles")
    if not isinstance(tiles, list) or not tiles:
        raise section.refuse("tiles", f"{tiles!r} is not a list of [m, n] pairs")
    for tile in tiles:
        if not isinstance(tile, list) or len(tile) != 2 or not all(type(side) is int and side > 0 for side in tile):
            raise section.refuse("tiles", f"{tile!r} is not a pair [m, n] of positive whole numbers")
    return tuple((m, n) for m, n in tiles)


def _attention(section: Section) -> AttentionEfficiency:
    return AttentionEfficiency(
        share=section.share("share"),
        causal=section.share("causal"),
        head_overhead=section.number("head_overhead"),
        key_overhead=section.number("key_overhead"),
        block=section.count("block", most=MOST_UNITS),
        formats=_of_formats(section, "formats", lambda own, name: own.ratio(name, most=MOST_FASTER)),
    )
