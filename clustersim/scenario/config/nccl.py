"""Which NCCL environment variables may a scenario file set?

Lists of algorithms and protocols have NCCL's grammar: `Ring,Tree` is an allow list, `^NVLS` an exclusion, and
`allreduce:tree,ring;allgather:ring` applies per collective (NCCL 2.24 and later). Case is ignored. RCCL reads
the same variables.
Reference: NVIDIA/nccl, parseList in src/tuning/cost_model.cc; the user guide's page of environment variables.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.nccl_overrides import TUNED_COLLECTIVES, ChannelLimits, NcclOverrides
from clustersim.common.errors import format_value, suggest_nearest
from clustersim.program.task import CollectiveType
from clustersim.scenario.config_reader import ConfigModel, config_error, value_parser

MOST_CHANNELS: Final = 64  # MAXCHANNELS of src/include/device.h
_FUNCTIONS: Final = {kind.value.replace("_", ""): kind for kind in TUNED_COLLECTIVES}
_ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "tree": ("tree",),
    "ring": ("ring",),
    "collnetdirect": ("collnet_direct",),
    "collnetchain": ("collnet_chain",),
    "nvls": ("nvls", "collnet_nvls"),
    "nvlstree": ("nvls",),
    "pat": ("pat",),
}
"""Model names of NCCL's algorithms."""
_PROTOCOLS: Final = {name.lower(): (name,) for name in ("LL", "LL128", "Simple")}
_NETWORK: Final = "the network is the cluster's (cluster.fabric)"
_NODE: Final = "routes inside a node are the cluster's (cluster.node)"
_CALIBRATED: Final = "chunks and thresholds are fitted to measurements (topologies/libraries)"
_NO_TIMING_EFFECT: Final = "no time depends on it"
_SHARP: Final = "how SHARP works is the library's own"
_UNMODELLED_PREFIXES: Final = {
    "NCCL_IB_": _NETWORK,
    "NCCL_SOCKET_": _NETWORK,
    "NCCL_NET": _NETWORK,
    "NCCL_COLLNET_": _SHARP,
}
_UNMODELLED: Final = {
    **dict.fromkeys(("NCCL_CROSS_NIC", "NCCL_NSOCKS_PERTHREAD", "NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL"), _NETWORK),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE"), _NODE),
    **dict.fromkeys(("NCCL_NVB_DISABLE", "NCCL_TOPO_FILE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"), _NODE),
    **dict.fromkeys(
        ("NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE"), _CALIBRATED
    ),
    **dict.fromkeys(("NCCL_P2P_LL_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD"), _CALIBRATED),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_COMM_BLOCKING"), _NO_TIMING_EFFECT),
    **dict.fromkeys(("NCCL_LAUNCH_MODE", "NCCL_CHECK_POINTERS", "NCCL_IGNORE_CPU_AFFINITY"), _NO_TIMING_EFFECT),
}
"""NCCL variables that are not modelled, with the reason."""

AllowedNames = dict[CollectiveType, frozenset[str]]


def _parse_allowed(text: str, model_names: Mapping[str, tuple[str, ...]]) -> AllowedNames:
    """Names that a list in NCCL's grammar allows, by collective; collectives without an entry are unrestricted."""
    allowed: AllowedNames = {}
    for position, entry in enumerate(text.split(";")):
        function, colon, elements = entry.rpartition(":")
        if position and not colon:
            raise config_error(
                f"{format_value(entry)} names no collective; only the first entry is for all, as in NCCL"
            )
        collectives = (_parse_collective(function),) if colon else TUNED_COLLECTIVES
        allowed |= dict.fromkeys(collectives, _parse_elements(elements, model_names))
    return allowed


def _parse_collective(name: str) -> CollectiveType:
    if name.strip().lower() not in _FUNCTIONS:
        raise config_error(
            f"{format_value(name)} is no collective that has a choice; {suggest_nearest(name.strip(), _FUNCTIONS)}"
        )
    return _FUNCTIONS[name.strip().lower()]


def _parse_elements(text: str, model_names: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Model names that a list allows."""
    is_exclusion = text.strip().startswith("^")
    listed_names = [element.strip().lower() for element in text.strip().removeprefix("^").split(",")]
    for element in listed_names:
        if element not in model_names:
            raise config_error(f"{format_value(element)} is none of NCCL's; {suggest_nearest(element, model_names)}")
    allowed_names = [name for name in model_names if (name in listed_names) is not is_exclusion]
    return frozenset(model_name for name in allowed_names for model_name in model_names[name])


def _list_parser(model_names: Mapping[str, tuple[str, ...]]) -> BeforeValidator:
    """A validator that checks a list in NCCL's grammar and keeps it as text."""

    def check(value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            raise config_error(
                f"{format_value(value)} is no list; write e.g. {', '.join(model_names)}, or ^{next(iter(model_names))}"
            )
        _parse_allowed(value, model_names)
        return value

    description = f"a list in NCCL's grammar of {', '.join(model_names)}"
    first, second, *_ = model_names
    return value_parser(check, description, f"{first},{second}", f"^{first}", schema_type=str)


ChannelCount = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]


class NcclConfig(ConfigModel):
    """`cost.nccl`: variables of NCCL's environment."""

    example: ClassVar[str] = "NCCL_ALGO: Ring"
    algorithms: Annotated[str | None, _list_parser(_ALGORITHMS)] = Field(None, alias="NCCL_ALGO")
    """algorithms that may be chosen; left out: all"""
    protocols: Annotated[str | None, _list_parser(_PROTOCOLS)] = Field(None, alias="NCCL_PROTO")
    """protocols that may be chosen; left out: all"""
    nvls: Annotated[int, Field(ge=0, le=2)] | None = Field(None, alias="NCCL_NVLS_ENABLE")
    """NVLink SHARP (NVLS): 0 is off; left out: 2, if supported"""
    collnet: Annotated[int, Field(ge=0, le=1)] | None = Field(None, alias="NCCL_COLLNET_ENABLE")
    """SHARP of InfiniBand (CollNet): 1 is on; left out: 0"""
    least: ChannelCount | None = Field(None, alias="NCCL_MIN_NCHANNELS")
    """minimum number of channels, inside an NVLink domain; left out: the library's"""
    most: ChannelCount | None = Field(None, alias="NCCL_MAX_NCHANNELS")
    """maximum number of channels, inside an NVLink domain; left out: the library's"""
    messages_least: ChannelCount | None = Field(None, alias="NCCL_MIN_P2P_NCHANNELS")
    """minimum number of channels of a p2p message, inside an NVLink domain; left out: the library's"""
    messages_most: ChannelCount | None = Field(None, alias="NCCL_MAX_P2P_NCHANNELS")
    """maximum number of channels of a p2p message, inside an NVLink domain; left out: the library's"""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unmodelled(cls, value: object) -> object:
        modelled_names = {model_field.alias for model_field in cls.model_fields.values()}
        for name in (key for key in value if key not in modelled_names) if isinstance(value, dict) else ():
            reason = _unmodelled_reason(str(name))
            if reason:
                raise config_error(f"{name} is NCCL's, but not modelled: {reason}; leave it out")
        return value

    @model_validator(mode="after")
    def _check_channel_limits(self) -> Self:
        pairs = ((self.least, self.most, "NCHANNELS"), (self.messages_least, self.messages_most, "P2P_NCHANNELS"))
        for minimum, maximum, name in pairs:
            if minimum is not None and maximum is not None and minimum > maximum:
                raise config_error(
                    f"NCCL_MIN_{name} {minimum} is above NCCL_MAX_{name} {maximum}; {maximum} or less fits"
                )
        return self

    def nccl_overrides(self) -> NcclOverrides:
        """The NCCL overrides as the simulator represents them."""
        algorithms = {} if self.algorithms is None else _parse_allowed(self.algorithms, _ALGORITHMS)
        if self.nvls == 0:
            all_algorithms = frozenset(ALGORITHMS)
            algorithms = {
                kind: algorithms.get(kind, all_algorithms) - {"nvls", "collnet_nvls"} for kind in TUNED_COLLECTIVES
            }
        return NcclOverrides(
            algorithms=algorithms,
            protocols={} if self.protocols is None else _parse_allowed(self.protocols, _PROTOCOLS),
            channel_limits=ChannelLimits(self.least, self.most, self.messages_least, self.messages_most),
            collnet_enabled=self.collnet == 1,
            description=" and ".join(self.set_variables()),
        )

    def set_variables(self) -> list[str]:
        """Names of the variables that are set."""
        return [
            str(model_field.alias)
            for name, model_field in type(self).model_fields.items()
            if name in self.model_fields_set
        ]


def _unmodelled_reason(name: str) -> str:
    """Why an NCCL variable is not modelled; empty for other names."""
    prefix_reason = next((reason for start, reason in _UNMODELLED_PREFIXES.items() if name.startswith(start)), "")
    return _UNMODELLED.get(name, prefix_reason)
