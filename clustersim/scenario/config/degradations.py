"""What may a scenario file say about degradations of the cluster?

Config models of `degradations`, and of `cluster.mixed`, which selects nodes with the same keys.
"""

from math import inf
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.common.errors import format_value
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.cost.jitter import Distribution, Jitter
from clustersim.hardware.degradation import SHARED_LINK_KINDS, DeadLinkEffect, LinkDegradation, SlowLinkEffect
from clustersim.hardware.topology import LinkKind
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.co_scheduled import CoScheduledJobConfig
from clustersim.scenario.config_reader import (
    AcceleratorSource,
    ConfigModel,
    Duration,
    NonEmptyText,
    SizeBytes,
    config_error,
    enum_parser,
    fraction_parser,
    parse_duration,
    value_parser,
)
from clustersim.scenario.id_ranges import MAX_SEED, IdRanges

MIN_FRACTION = 0.001  # of speed or bandwidth: below it, mark the component dead
MAX_SPEED = 10.0
MAX_BANDWIDTH = 1.0
MAX_LOAD = 0.99
MAX_JITTER = 10.0
MAX_DEAD_LINKS = 2**20
_TRAFFIC_COLLECTIVES = tuple(
    collective_type for collective_type in CollectiveType if not collective_type.is_token_routing
)
_ENDPOINTS_EXAMPLE = "[leaf0.0, spine0.0]"


LinkLoadFraction = Annotated[float, fraction_parser(0.0, MAX_LOAD)]


def as_list(value: object) -> list[Any]:
    """The value, as a list of one entry if it is not a list."""
    return value if isinstance(value, list) else [value]


class MixedNodesConfig(ConfigModel):
    """An entry of `cluster.mixed`: nodes with another accelerator."""

    example: ClassVar[str] = "{nodes: 0-7, accelerator: h200-sxm-141gb}"
    node: IdRanges = ()
    """a node or several; left out: none"""
    nodes: IdRanges = ()
    """alias of node; left out: none"""
    accelerator: AcceleratorSource = Field(examples=["h200-sxm-141gb"])
    """their accelerator"""

    @model_validator(mode="after")
    def _require_nodes(self) -> Self:
        if not self.node and not self.nodes:
            raise config_error("names no node; write node: 3, or nodes: 0-7")
        return self


class GpuSelectionConfig(ConfigModel):
    """Selects GPUs by their ids or by their nodes."""

    gpu: IdRanges = ()
    """GPU ids; left out: none"""
    gpus: IdRanges = ()
    """alias of gpu; left out: none"""
    node: IdRanges = ()
    """all GPUs of these nodes; left out: none"""
    nodes: IdRanges = ()
    """alias of node; left out: none"""

    @model_validator(mode="after")
    def _require_gpus(self) -> Self:
        if not (self.gpu or self.gpus or self.node or self.nodes):
            raise config_error("names no GPU; write gpu: 17, gpus: 8-15, node: 3 or nodes: [3, 4]")
        return self


class SlowGpuConfig(GpuSelectionConfig):
    """An entry of `degradations.slow`."""

    example: ClassVar[str] = "{gpu: 17, speed: 0.9}"
    speed: Annotated[float, fraction_parser(MIN_FRACTION, MAX_SPEED)] = Field(examples=[0.9])
    """fraction of full speed at which their kernels run"""


RemainingBandwidth = Annotated[
    float | None, fraction_parser(MIN_FRACTION, MAX_BANDWIDTH, "; write dead: true for one that is gone")
]


def _parse_dead_count(value: object) -> object:
    """Number of dead links: 1 for `true`; `false` is refused."""
    if value is False:
        raise config_error("false is what links are anyway; leave the entry out")
    return 1 if value is True else value


def _parse_dead_flag(value: object) -> object:
    """True for `true` or 1; a NIC is a single device, so no other count is accepted."""
    if _parse_dead_count(value) != 1:
        raise config_error(f"{format_value(value)} is not true; write dead: true")
    return True


class NicFaultConfig(GpuSelectionConfig):
    """An entry of `degradations.nics`."""

    example: ClassVar[str] = "{gpu: 12, bandwidth: 50 %}"
    bandwidth: RemainingBandwidth = None
    """remaining fraction, both directions; left out: all"""
    dead: Annotated[bool, value_parser(_parse_dead_flag, "true")] = False
    """the NIC is dead, and its GPUs send through another GPU's NIC"""

    @model_validator(mode="after")
    def _require_one_fault(self) -> Self:
        if (self.bandwidth is None) != self.dead:
            raise config_error("needs bandwidth (the part that is left) or dead: true, and not both")
        return self

    @property
    def bandwidth_fraction(self) -> float:
        """Remaining fraction of the bandwidth, 0 for a dead NIC."""
        return self.bandwidth or 0.0


def _parse_endpoints(value: object) -> object:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(end, str) and end.strip() for end in value)):
        raise config_error(f"{format_value(value)} is not a pair of ends such as {_ENDPOINTS_EXAMPLE}")
    return value


def _parse_interval(value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise config_error(f"{format_value(value)} is not a pair of times such as [10 ms, 40 ms]")
    first, last = map(parse_duration, value)
    if first >= last:
        raise config_error(f"{format_value(value)} ends before it begins; write the earlier time first")
    return first, last


class LinkFaultConfig(ConfigModel):
    """An entry of `degradations.links`."""

    example: ClassVar[str] = f"{{between: {_ENDPOINTS_EXAMPLE}, bandwidth: 50 %}}"
    between: Annotated[list[str] | None, value_parser(_parse_endpoints, "a pair of names", _ENDPOINTS_EXAMPLE)] = None
    """the endpoints of a link, both directions; left out: from and to"""
    source: NonEmptyText | None = Field(None, alias="from")
    """the sending endpoint, for one direction; left out: none"""
    target: NonEmptyText | None = Field(None, alias="to")
    """the receiving endpoint; left out: none"""
    bandwidth: RemainingBandwidth = None
    """remaining fraction; left out: all"""
    dead: (
        Annotated[
            int, Field(ge=1, le=MAX_DEAD_LINKS), value_parser(_parse_dead_count, f"true, or 1 to {MAX_DEAD_LINKS:,}")
        ]
        | None
    ) = None
    """true, or how many parallel links are dead; left out: none"""
    during: Annotated[
        tuple[float, float] | None, value_parser(_parse_interval, "a pair of times", "[10 ms, 40 ms]")
    ] = None
    """start and end of the fault, in time of the run; left out: the whole run"""

    @model_validator(mode="after")
    def _require_link_and_fault(self) -> Self:
        if self.between is None and (self.source is None or self.target is None):
            raise config_error(f"names no link; write between: {_ENDPOINTS_EXAMPLE}, or from and to for one direction")
        if self.between is not None and (self.source, self.target) != (None, None):
            raise config_error("has both between and from or to; keep one")
        if (self.bandwidth is None) == (self.dead is None):
            raise config_error("needs bandwidth (the part that is left) or dead: true, and not both")
        if self.during is not None and self.dead is not None:
            raise config_error(
                "has dead and during, but routes do not change while a step runs; write bandwidth: 0.1 %"
            )
        return self

    def link_change(self) -> LinkDegradation:
        """The link fault as the simulator represents it."""
        fault = SlowLinkEffect(self.bandwidth) if self.bandwidth is not None else DeadLinkEffect(self.dead or 1)
        source, target = self.between or (str(self.source), str(self.target))
        return LinkDegradation(
            source, target, fault, both_directions=self.between is not None, active_period=self.during
        )


class JitterConfig(ConfigModel):
    """`degradations.jitter`: random variation of kernel times."""

    shorthand_key: ClassVar[str | None] = "std"
    std: Annotated[float, fraction_parser(0.0, MAX_JITTER)] = Field(examples=["1 %"])
    """standard deviation of every kernel's time over its mean"""
    distribution: Annotated[Distribution, enum_parser(Distribution)] = Distribution.NORMAL
    """of kernel times; exponential only adds time"""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """of the random draws"""

    def jitter_model(self) -> Jitter | None:
        """The jitter model; None if kernel times do not vary."""
        return Jitter(self.std, self.distribution, self.seed) if self.std else None


class BackgroundLoadConfig(ConfigModel):
    """`degradations.background`: constant background load, as a fraction of each link of a tier."""

    nic: LinkLoadFraction = 0.0
    """of links between NICs and leaves"""
    leaf: LinkLoadFraction = 0.0
    """of links between leaf and spine"""
    spine: LinkLoadFraction = 0.0
    """of links between spine and core"""
    wan: LinkLoadFraction = 0.0
    """of links between sites"""

    def load_by_kind(self) -> dict[LinkKind, float]:
        """Nonzero load fraction by link kind."""
        loads = {kind: getattr(self, kind.value) for kind in SHARED_LINK_KINDS}
        return {kind: load for kind, load in loads.items() if load}


class BackgroundTrafficConfig(ConfigModel):
    """`degradations.traffic`: background traffic on the network, see [Traffic](scenario.md#traffic)."""

    example: ClassVar[str] = "{gpus: [8, 16], bytes: 64 MB, every: 5 ms}"
    gpus: IdRanges = Field(examples=["[8, 16]"])
    """GPU ids of the cluster, the root or sender first"""
    collective: Annotated[CollectiveType, enum_parser(CollectiveType, *_TRAFFIC_COLLECTIVES)] = CollectiveType.SEND_RECV
    """the collective; send_recv needs exactly two GPUs"""
    payload: SizeBytes = Field(alias="bytes", examples=["64 MB"])
    """its payload, by nccl-tests' convention"""
    start: Duration = 0.0
    """time of its first start"""
    every: Duration | None = None
    """period of repetition, or its duration if that is longer; left out: not repeated"""
    until: Duration | None = None
    """time after which it does not repeat; left out: the end of the run"""

    @model_validator(mode="after")
    def _require_valid_flow(self) -> Self:
        count = sum(map(len, self.gpus))
        if count < 2 or (self.collective is CollectiveType.SEND_RECV and count != 2):
            raise config_error(
                f"names {count:,} GPU{'s' * (count != 1)}; a message needs two, a collective two or more"
            )
        if self.every == 0.0:
            raise config_error("every: 0 would never end; leave it out for once")
        return self

    def background_flow(self, gpus: tuple[int, ...]) -> TrafficPattern:
        """The background flow as the simulator represents it."""
        every, until = (inf if seconds is None else seconds for seconds in (self.every, self.until))
        return TrafficPattern(gpus, self.collective, self.payload, self.start, every, until)


class DegradationsConfig(ConfigModel):
    """`degradations`: degradations of the cluster."""

    slow: Annotated[
        list[SlowGpuConfig], value_parser(as_list, "one or a list", schema_type=list[SlowGpuConfig] | SlowGpuConfig)
    ] = Field([])
    """GPUs whose kernels run at a fraction of full speed; left out: none"""
    jitter: JitterConfig | None = None
    """random variation of all kernel times on all ranks; left out: none"""
    nics: Annotated[
        list[NicFaultConfig], value_parser(as_list, "one or a list", schema_type=list[NicFaultConfig] | NicFaultConfig)
    ] = Field([])
    """degraded or dead NICs of some GPUs; left out: none"""
    links: Annotated[
        list[LinkFaultConfig],
        value_parser(as_list, "one or a list", schema_type=list[LinkFaultConfig] | LinkFaultConfig),
    ] = Field([])
    """degraded or dead links by their endpoints, see [Degradations](scenario.md#degradations); left out: none"""
    traffic: Annotated[
        list[BackgroundTrafficConfig],
        value_parser(as_list, "one or a list", schema_type=list[BackgroundTrafficConfig] | BackgroundTrafficConfig),
    ] = Field([])
    """background traffic; left out: none"""
    jobs: Annotated[
        list[CoScheduledJobConfig],
        value_parser(as_list, "one or a list", schema_type=list[CoScheduledJobConfig] | CoScheduledJobConfig),
    ] = Field([])
    """co-scheduled jobs that train on other GPUs; left out: none"""
    background: BackgroundLoadConfig = BackgroundLoadConfig()
    """constant background load of each tier's links"""
