"""What can one accelerator do?

Datasheet rates and sizes, and the constants with which real kernels reach them. Shipped accelerators are YAML files in
`topologies/accelerators`, with a source for every number; any path to such a file works as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim import shipped
from clustersim.dtypes import DType
from clustersim.errors import InputError, nearest
from clustersim.hardware.efficiency import AttentionEfficiency, Efficiency, MatmulEfficiency
from clustersim.units import Bytes, BytesPerSecond, Dimension, FlopPerSecond, parse_quantity

_PROVENANCE: Final = MappingProxyType({"published": True, "roofline": False})


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU (or CPU) as the simulator sees it.

    peak: dense FLOP/s by number format, without sparsity; memory_bytes: what a process can address; memory_bandwidth:
    bytes/s of device memory; compute_units: SMs or CUs; l2_bytes: last-level cache; context_bytes: driver context and
    library workspaces that a training process loses; host_link: bytes/s to host memory, per direction;
    sources: where each group of numbers comes from.
    """

    name: str
    description: str
    peak: Mapping[DType, FlopPerSecond]
    memory_bytes: Bytes
    memory_bandwidth: BytesPerSecond
    compute_units: int
    l2_bytes: Bytes
    context_bytes: Bytes
    host_link: BytesPerSecond
    efficiency: Efficiency
    sources: Mapping[str, str]

    def peak_of(self, dtype: DType) -> FlopPerSecond:
        """Dense peak in FLOP/s; raise InputError that lists the formats that this accelerator has."""
        try:
            return self.peak[dtype]
        except KeyError:
            formats = ", ".join(known.value for known in self.peak)
            raise InputError(f"{self.name} has no {dtype.value} peak; it computes in {formats}") from None


def load_accelerator(name_or_path: str) -> Accelerator:
    """Read a shipped accelerator by name (`h100-sxm-80gb`) or any accelerator file by path."""
    path = shipped.find("accelerators", name_or_path)
    section = _Section(path, "", shipped.read_mapping(path))
    accelerator = Accelerator(
        name=path.stem,
        description=section.text("description"),
        peak=_peak(section.section("peak")),
        memory_bytes=section.quantity("memory", Dimension.SIZE),
        memory_bandwidth=section.quantity("memory_bandwidth", Dimension.BANDWIDTH),
        compute_units=section.count("compute_units"),
        l2_bytes=section.quantity("l2", Dimension.SIZE),
        context_bytes=section.quantity("context", Dimension.SIZE, zero=True),
        host_link=section.quantity("host_link", Dimension.BANDWIDTH),
        efficiency=_efficiency(section.section("efficiency")),
        sources=section.section("sources").texts(),
    )
    section.finish()
    return accelerator


class _Section:
    """One mapping of an accelerator file; remembers what was asked, so that `finish` can refuse the rest."""

    def __init__(self, path: Path, prefix: str, content: dict[str, Any]) -> None:
        self._path, self._prefix, self._content = path, prefix, content
        self._asked: dict[str, None] = {}

    def refuse(self, key: str, reason: str) -> InputError:
        return InputError(f"{self._path}: {self._prefix}{key}: {reason}")

    def has(self, key: str) -> bool:
        return key in self._content

    def names(self) -> list[str]:
        return [str(key) for key in self._content]

    def value(self, key: str) -> Any:
        self._asked[key] = None
        if key not in self._content:
            raise self.refuse(key, "is missing")
        return self._content[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(key, f"{value!r} is not a text")
        return " ".join(value.split())

    def texts(self) -> Mapping[str, str]:
        return MappingProxyType({key: self.text(key) for key in self.names()})

    def number(self, key: str, *, low: float = 0.0, high: float = float("inf")) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.refuse(key, f"{value!r} is not a number from {low:g} to {high:g}")
        return float(value)

    def share(self, key: str) -> float:
        value = self.number(key, high=1.0)
        if value <= 0.0:
            raise self.refuse(key, f"{value!r} is not a share of a peak, above 0 and up to 1")
        return value

    def count(self, key: str) -> int:
        return self.whole(key, self.value(key))

    def whole(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refuse(key, f"{value!r} is not a positive whole number")
        return value

    def quantity(self, key: str, dimension: Dimension, *, zero: bool = False) -> float:
        try:
            value = parse_quantity(self.value(key), dimension)
        except InputError as error:
            if not self.has(key):
                raise
            raise self.refuse(key, str(error)) from error
        if value < 0 or (value == 0 and not zero):
            raise self.refuse(key, f"{self._content[key]!r} is not above zero")
        return value

    def section(self, key: str) -> "_Section":
        value = self.value(key)
        if not isinstance(value, dict) or not value:
            raise self.refuse(key, f"{value!r} is not a mapping of keys to values")
        return _Section(self._path, f"{self._prefix}{key}.", value)

    def finish(self) -> None:
        for key in self.names():
            if key not in self._asked:
                raise self.refuse(key, f"unknown key; {nearest(key, self._asked)}")


def _peak(section: _Section) -> Mapping[DType, FlopPerSecond]:
    formats = {dtype.value: dtype for dtype in DType}
    for key in section.names():
        if key not in formats:
            raise section.refuse(key, f"unknown number format; {nearest(key, formats)}")
    return MappingProxyType({formats[key]: section.quantity(key, Dimension.COMPUTE) for key in section.names()})


def _efficiency(section: _Section) -> Efficiency:
    provenance = section.text("provenance")
    if provenance not in _PROVENANCE:
        raise section.refuse("provenance", f"{provenance!r} is unknown; {nearest(provenance, _PROVENANCE)}")
    efficiency = Efficiency(
        published=_PROVENANCE[provenance],
        matmul=_matmul(section.section("matmul")),
        attention_forward=_attention(section.section("attention_forward")),
        attention_backward=_attention(section.section("attention_backward")),
        memory=section.share("memory"),
        kernel_latency=section.quantity("kernel_latency", Dimension.TIME, zero=True),
        launch_interval=section.quantity("launch_interval", Dimension.TIME, zero=True),
    )
    section.finish()
    return efficiency


def _matmul(section: _Section) -> MatmulEfficiency:
    matmul = MatmulEfficiency(
        share=section.share("share"),
        fp8_share=section.share("fp8_share"),
        prologue=section.number("prologue"),
        edge=section.number("edge"),
        tiles=_tiles(section),
    )
    section.finish()
    return matmul


def _tiles(section: _Section) -> tuple[tuple[int, int], ...]:
    tiles = section.value("tiles")
    if not isinstance(tiles, list) or not tiles:
        raise section.refuse("tiles", f"{tiles!r} is not a list of [m, n] pairs")
    for tile in tiles:
        if not isinstance(tile, list) or len(tile) != 2:
            raise section.refuse("tiles", f"{tile!r} is not a pair [m, n]")
    return tuple((section.whole("tiles", m), section.whole("tiles", n)) for m, n in tiles)


def _attention(section: _Section) -> AttentionEfficiency:
    attention = AttentionEfficiency(
        share=section.share("share"),
        causal=section.share("causal"),
        head_overhead=section.number("head_overhead"),
        key_overhead=section.number("key_overhead"),
        block=section.count("block"),
    )
    section.finish()
    return attention
