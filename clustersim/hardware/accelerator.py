"""What can one accelerator do?

Datasheet rates and sizes, and the efficiency constants of real kernels on it. Packaged accelerators are YAML
files in `topologies/accelerators`, with a source for every number; the path of any other such file works as
well, and so does a mapping of such a file's keys. `like` takes from another accelerator whatever a file or mapping
does not state (`hardware.similar_accelerator`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.dtypes import COMPUTE_DTYPES, LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, FlopPerSecond
from clustersim.hardware.alignment import KernelAlignment
from clustersim.hardware.efficiency import KernelEfficiency, TrainingDerating
from clustersim.hardware.efficiency_reader import MAX_COMPUTE_UNITS, read_efficiency
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.power import PowerSpec
from clustersim.hardware.prices import Price, parse_price
from clustersim.hardware.similar_accelerator import complete_from_base, scale_missing_peaks
from clustersim.hardware.technology_reader import read_generation

MAX_SUSTAINED_RATIO: Final = 1.25  # relative to the rate of the published standalone kernels
MAX_INTERFERENCE: Final = 10.0  # kernels slowed 11x; above it is a percentage by mistake
_UNKNOWABLE: Final = ("power", "price")  # keys of the section `unknown`
_CPU: Final = "cpu"  # of the names of CPUs
_EXAMPLE: Final = "like: h100-sxm-80gb"
UNBOUND_LAUNCH_RATIOS: Final = (1.0, 1.1)
"""Of x86 servers: PyTorch finds that binding ranks makes a step typically 1 to 10 % faster, others not at all or by
much more (docs.pytorch.org, elastic/numa); here of a step that waits for launches alone."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU (or CPU) as the simulator models it.

    peak: dense FLOP/s by number format, without sparsity; memory_bytes: what a process can allocate;
    memory_bandwidth: bytes/s of device memory; compute_units: SMs or CUs; context_bytes: driver context and
    library workspaces that a training process loses; interference: mean relative slowdown of a kernel while a
    collective runs concurrently on the same GPU, over a training step (0.2: 20 % longer; 0: none);
    collective_interference: likewise of what crosses its NVLink or xGMI ports while kernels run; sources: of
    each group of numbers; alignment: cost of misaligned sizes; nvlink: generation of its NVLink or xGMI ports,
    None without any; host_launch_ratio: time that its host takes to launch a kernel where ranks are bound to the NUMA
    node of their GPU, relative to an x86 server; unbound_launch_ratios: the same without binding, relative to that,
    least and most of what sources say;
    power: its power draw, None where unknown; unknown: why its power, or a list price, is not known; price: of a GPU
    hour, None: that of price lists; like: name of the accelerator whose constants it takes for want of measurements,
    None: it has its own; is_projection: whether its rates are announced or expected, and no such accelerator was
    measured; definition: the mapping that it was read from, None: a file; files: all files read, its own first.
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
    collective_interference: float = 0.0
    host_launch_ratio: float = 1.0
    unbound_launch_ratios: tuple[float, float] = UNBOUND_LAUNCH_RATIOS
    power: PowerSpec | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    price: Price | None = None
    like: str | None = None
    is_projection: bool = False
    definition: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False, repr=False)

    def peak_flops(self, dtype: DType) -> FlopPerSecond:
        """Dense peak in FLOP/s; raise InputError that lists the accelerator's formats."""
        if dtype not in self.formats:
            formats = ", ".join(dtype_name.value for dtype_name in self.formats)
            raise InputError(f"{self.name} has no {dtype.value} peak; it computes in {formats}")
        return self.peak[dtype.peak_dtype]

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, which runs its kernels itself: its packaged files are named so."""
        return self.name.startswith(_CPU)

    @property
    def formats(self) -> tuple[DType, ...]:
        """Compute formats of the accelerator; low-precision ones only if its matmul library has kernels for them."""
        fractions = self.efficiency.matmul.peak_fraction_by_format
        candidates = (dtype for dtype in COMPUTE_DTYPES if dtype not in LOW_PRECISION_DTYPES or dtype in fractions)
        return tuple(candidate for candidate in candidates if candidate.peak_dtype in self.peak)


def load_accelerator(source: str | Mapping[str, Any]) -> Accelerator:
    """Load a packaged accelerator by name (`h100-sxm-80gb`), an accelerator file by path, or a mapping of its keys.

    Raises InputError with all problems of the file or mapping.
    """
    if isinstance(source, str):
        path = data_files.find_file("accelerators", source)
        section = MappingReader(path, data_files.read_mapping(path))
        return _read_accelerator(section, path.stem, (path,))
    return _read_inline(MappingReader(Path("accelerator"), source))


def read_accelerator(section: MappingReader, key: str) -> Accelerator:
    """The accelerator that a file's key names, or describes as a mapping; raise InputError with all problems."""
    if isinstance(section.get_value(key), Mapping):
        return _read_inline(section.get_section(key))
    return load_accelerator(section.get_data_file(key, "accelerators"))


def _read_inline(section: MappingReader) -> Accelerator:
    """An accelerator that is described in place, under a name that is none of the packaged ones."""
    if not section.has_key("like") and not section.has_key("efficiency"):
        raise section.input_error("like", f"is missing; write the accelerator that is most similar: {_EXAMPLE}")
    has_default = section.has_key("like") and not section.has_key("name")
    name = f"like-{Path(str(section.content['like'])).stem}" if has_default else section.get_name("name")
    if name in data_files.list_names("accelerators"):
        raise section.input_error("name", f"{name} is packaged; choose a name of your own")
    return _read_accelerator(section, name, ())


def _read_accelerator(section: MappingReader, name: str, own_files: tuple[Path, ...]) -> Accelerator:
    """An accelerator from the keys of a file or mapping, and those of the accelerator that it is like."""
    section.reject_renamed_keys("accelerators")
    if not section.has_key("like"):
        return Accelerator(name=name, files=own_files, **_read_fields(section, None))
    complete = complete_from_base(section)
    base = load_accelerator(section.get_data_file("like", "accelerators"))
    definition = None if own_files else {**section.content, "like": data_files.portable_name(base.files[0])}
    files = (*own_files, *base.files)
    return Accelerator(name=name, like=base.name, definition=definition, files=files, **_read_fields(complete, base))


def _read_fields(section: MappingReader, base: Accelerator | None) -> dict[str, Any]:
    """All fields that a file's keys define. base: the accelerator that it is like, whose other peaks are scaled."""
    readers = {
        "description": lambda: section.get_text("description"),
        "peak": lambda: _read_peak(section.get_section("peak"), base),
        "memory_bytes": lambda: section.get_quantity("memory", Dimension.SIZE),
        "memory_bandwidth": lambda: section.get_quantity("memory_bandwidth", Dimension.BANDWIDTH),
        "compute_units": lambda: section.get_int("compute_units", max_value=MAX_COMPUTE_UNITS),
        "context_bytes": lambda: section.get_quantity("context", Dimension.SIZE, allow_zero=True),
        "interference": lambda: _read_interference(section, "interference"),
        "efficiency": lambda: read_efficiency(section.get_section("efficiency")),
        "sources": lambda: section.get_section("sources").get_text_mapping(),
        **_optional_readers(section),
    }
    fields = section.collect(fields=partial(section.collect, **readers), unknown_keys=section.reject_unknown_keys)[
        "fields"
    ]
    return {name: value for name, value in fields.items() if value is not None}


def _optional_readers(section: MappingReader) -> dict[str, Any]:
    """Readers of keys that may be left out; they return None then."""

    def optional(key: str, read: Any) -> Any:
        return lambda: read() if section.has_key(key) else None

    return {
        "derating": optional("training_derating", lambda: _read_derating(section.get_section("training_derating"))),
        "alignment": optional("alignment", lambda: _read_alignment(section.get_section("alignment"))),
        "nvlink": optional("nvlink", lambda: read_generation(section, None, key="nvlink")),
        "collective_interference": optional(
            "collective_interference", lambda: _read_interference(section, "collective_interference")
        ),
        "host_launch_ratio": optional("host_launch_ratio", lambda: section.get_float("host_launch_ratio")),
        "unbound_launch_ratios": optional("unbound_launch_ratios", lambda: _read_unbound_ratios(section)),
        "power": optional("power", lambda: PowerSpec.from_section(section.get_section("power"))),
        "unknown": optional("unknown", lambda: _read_unknown(section)),
        "price": optional("price_per_gpu_hour", lambda: _read_price(section)),
        "is_projection": lambda: section.get_bool("projection"),
    }


def _read_unbound_ratios(section: MappingReader) -> tuple[float, float]:
    key = "unbound_launch_ratios"
    items = section.get_items(key, count=2)
    least = items.get_float("[0]", min_value=1.0)
    return least, items.get_float("[1]", min_value=least)


def _read_price(section: MappingReader) -> Price:
    try:
        return parse_price(section.get_value("price_per_gpu_hour"))
    except InputError as error:
        raise section.input_error("price_per_gpu_hour", str(error)) from error


def _read_peak(section: MappingReader, base: Accelerator | None) -> Mapping[DType, FlopPerSecond]:
    formats = {dtype.value: dtype for dtype in COMPUTE_DTYPES}

    def read_format(key: str) -> FlopPerSecond | None:
        if key not in formats:
            raise section.input_error(key, f"unknown number format; {suggest_nearest(key, formats)}")
        return section.get_quantity(key, Dimension.COMPUTE) if section.has_key(key) else None

    rates = section.collect(**{key: partial(read_format, key) for key in section.key_names()})
    stated: dict[DType, FlopPerSecond | None] = {formats[key]: rate for key, rate in rates.items()}
    peaks: dict[DType, FlopPerSecond] = {dtype: rate for dtype, rate in stated.items() if rate is not None}
    if base is None:
        return peaks
    return scale_missing_peaks(peaks, {dtype: rate for dtype, rate in base.peak.items() if stated.get(dtype, rate)})


def _read_unknown(section: MappingReader) -> Mapping[str, str]:
    """Why the power, or a price in any list, is not known."""
    reasons = section.get_section("unknown")
    for key in reasons.key_names():
        if key not in _UNKNOWABLE:
            raise reasons.input_error(key, f"not one of {', '.join(_UNKNOWABLE)}; {suggest_nearest(key, _UNKNOWABLE)}")
    if reasons.has_key("power") and section.has_key("power"):
        raise reasons.input_error("power", "the file has a section power; leave one of them out")
    return reasons.get_text_mapping()


def _read_interference(section: MappingReader, key: str) -> float:
    value = section.get_float(key)
    if value > MAX_INTERFERENCE:
        raise section.input_error(key, f"{format_value(value)} is above {MAX_INTERFERENCE:g}; 0.2 means 20 % longer")
    return value


def _read_derating(section: MappingReader) -> TrainingDerating:
    return TrainingDerating(
        **section.collect(
            sustained_ratio=lambda: section.get_ratio("sustained_ratio", max_value=MAX_SUSTAINED_RATIO),
            gpu_spread=lambda: section.get_float("gpu_spread"),
            low_precision_ratio=lambda: (
                section.get_ratio("low_precision_ratio", max_value=MAX_SUSTAINED_RATIO)
                if section.has_key("low_precision_ratio")
                else None
            ),
            attention_ratio=lambda: (
                section.get_ratio("attention_ratio", max_value=MAX_SUSTAINED_RATIO)
                if section.has_key("attention_ratio")
                else None
            ),
        )
    )


def _read_alignment(section: MappingReader) -> KernelAlignment:
    alignment = KernelAlignment(
        **section.collect(
            unaligned_rate=lambda: section.get_fraction("unaligned"),
            batched_unaligned_rate=lambda: section.get_fraction("batched"),
            head_dims=lambda: _read_head_dims(section),
        )
    )
    unaligned, batched = alignment.unaligned_rate, alignment.batched_unaligned_rate
    if batched > unaligned:
        reason = f"{format_value(batched)} is above unaligned {format_value(unaligned)}"
        raise section.input_error("batched", reason)
    return alignment


def _read_head_dims(section: MappingReader) -> tuple[int, ...]:
    sizes = section.get_value("head_dims")
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise section.input_error("head_dims", f"{sizes!r} is not a list of positive whole numbers")
    if sizes != sorted(set(sizes)):
        raise section.input_error("head_dims", f"{sizes!r} does not ascend")
    return tuple(sizes)
