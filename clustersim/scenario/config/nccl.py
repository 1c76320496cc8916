"""What may a scenario file say to NCCL, in NCCL's own variables?

Lists of algorithms and protocols have NCCL's grammar: `Ring,Tree` names what may be taken, `^NVLS` what may not, and
`allreduce:tree,ring;allgather:ring` says it for one collective at a time (as NCCL does since 2.24). Case does not
matter. RCCL reads the same variables.
Reference: NVIDIA/nccl, parseList in src/tuning/cost_model.cc; the user guide's page of environment variables.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.nccl_overrides import TUNED_COLLECTIVES, ChannelLimits, NcclOverrides
from clustersim.common.errors import nearest, shown
from clustersim.program.task import CollectiveType
from clustersim.scenario.config_reader import Section, mistake, reads

MOST_CHANNELS: Final = 64  # MAXCHANNELS of src/include/device.h
_FUNCTIONS: Final = {kind.value.replace("_", ""): kind for kind in TUNED_COLLECTIVES}
_ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "tree": ("tree",),
    "ring": ("ring",),
    "collnetdirect": ("collnet_direct",),
    "collnetchain": ("collnet_chain",),
    "nvls": ("in_network", "collnet_nvls"),
    "nvlstree": ("in_network",),
    "pat": ("aggregated_trees",),
}
"""NCCL's names and the model's."""
_PROTOCOLS: Final = {name.lower(): (name,) for name in ("LL", "LL128", "Simple")}
_NETWORK: Final = "the network is the cluster's (cluster.fabric)"
_NODE: Final = "routes inside a node are the cluster's (cluster.node)"
_FITTED: Final = "chunks and thresholds are fitted to measurements (topologies/libraries)"
_TIMELESS: Final = "no time depends on it"
_SHARP: Final = "how SHARP works is the library's own"
_BEGINNINGS: Final = {"NCCL_IB_": _NETWORK, "NCCL_SOCKET_": _NETWORK, "NCCL_NET": _NETWORK, "NCCL_COLLNET_": _SHARP}
_UNMODELLED: Final = {
    **dict.fromkeys(("NCCL_CROSS_NIC", "NCCL_NSOCKS_PERTHREAD", "NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL"), _NETWORK),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE"), _NODE),
    **dict.fromkeys(("NCCL_NVB_DISABLE", "NCCL_TOPO_FILE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"), _NODE),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE"), _FITTED),
    **dict.fromkeys(("NCCL_P2P_LL_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD"), _FITTED),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_COMM_BLOCKING"), _TIMELESS),
    **dict.fromkeys(("NCCL_LAUNCH_MODE", "NCCL_CHECK_POINTERS", "NCCL_IGNORE_CPU_AFFINITY"), _TIMELESS),
}
"""Variables of NCCL that the model has nothing for, and why."""

Allowed = dict[CollectiveType, frozenset[str]]


def _allowed(text: str, names: Mapping[str, tuple[str, ...]]) -> Allowed:
    """What NCCL's grammar allows, by collective; collectives that it does not speak of are not there."""
    allowed: Allowed = {}
    for place, entry in enumerate(text.split(";")):
        function, colon, elements = entry.rpartition(":")
        if place and not colon:
            raise mistake(f"{shown(entry)} names no collective; only the first entry is for all, as in NCCL")
        kinds = (_function(function),) if colon else TUNED_COLLECTIVES
        allowed |= dict.fromkeys(kinds, _elements(elements, names))
    return allowed


def _function(name: str) -> CollectiveType:
    if name.strip().lower() not in _FUNCTIONS:
        raise mistake(f"{shown(name)} is no collective that has a choice; {nearest(name.strip(), _FUNCTIONS)}")
    return _FUNCTIONS[name.strip().lower()]


def _elements(text: str, names: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """What a list allows, in the model's names."""
    excludes = text.strip().startswith("^")
    named = [element.strip().lower() for element in text.strip().removeprefix("^").split(",")]
    for element in named:
        if element not in names:
            raise mistake(f"{shown(element)} is none of NCCL's; {nearest(element, names)}")
    left = [name for name in names if (name in named) is not excludes]
    return frozenset(item for name in left for item in names[name])


def _list_of(names: Mapping[str, tuple[str, ...]]) -> BeforeValidator:
    """Check a list in NCCL's grammar, which stays as it is written."""

    def check(value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            raise mistake(f"{shown(value)} is no list; write e.g. {', '.join(names)}, or ^{next(iter(names))}")
        _allowed(value, names)
        return value

    legal = f"a list in NCCL's grammar of {', '.join(names)}"
    first, second, *_ = names
    return reads(check, legal, f"{first},{second}", f"^{first}", of=str)


Channels = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]


class NcclSection(Section):
    """`cost.nccl`: variables of NCCL's environment."""

    example: ClassVar[str] = "NCCL_ALGO: Ring"
    algorithms: Annotated[str | None, _list_of(_ALGORITHMS)] = Field(None, alias="NCCL_ALGO")
    """algorithms that may be chosen; left out: all"""
    protocols: Annotated[str | None, _list_of(_PROTOCOLS)] = Field(None, alias="NCCL_PROTO")
    """protocols that may be chosen; left out: all"""
    nvls: Annotated[int, Field(ge=0, le=2)] | None = Field(None, alias="NCCL_NVLS_ENABLE")
    """NVLink SHARP: 0 is off; left out: 2, if possible"""
    collnet: Annotated[int, Field(ge=0, le=1)] | None = Field(None, alias="NCCL_COLLNET_ENABLE")
    """SHARP of InfiniBand: 1 is on; left out: 0"""
    least: Channels | None = Field(None, alias="NCCL_MIN_NCHANNELS")
    """least channels, inside an NVLink domain; left out: the library's"""
    most: Channels | None = Field(None, alias="NCCL_MAX_NCHANNELS")
    """most channels, inside an NVLink domain; left out: the library's"""
    messages_least: Channels | None = Field(None, alias="NCCL_MIN_P2P_NCHANNELS")
    """least channels of a message, inside an NVLink domain; left out: the library's"""
    messages_most: Channels | None = Field(None, alias="NCCL_MAX_P2P_NCHANNELS")
    """most channels of a message, inside an NVLink domain; left out: the library's"""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        known = {model_field.alias for model_field in cls.model_fields.values()}
        for name in (item for item in value if item not in known) if isinstance(value, dict) else ():
            why = _unmodelled(str(name))
            if why:
                raise mistake(f"{name} is NCCL's, but not modelled: {why}; leave it out")
        return value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        pairs = ((self.least, self.most, "NCHANNELS"), (self.messages_least, self.messages_most, "P2P_NCHANNELS"))
        for least, most, name in pairs:
            if least is not None and most is not None and least > most:
                raise mistake(f"NCCL_MIN_{name} {least} is above NCCL_MAX_{name} {most}; {most} or less fits")
        return self

    def switches(self) -> NcclOverrides:
        """The switches as the inside knows them."""
        algorithms = {} if self.algorithms is None else _allowed(self.algorithms, _ALGORITHMS)
        if self.nvls == 0:
            every = frozenset(ALGORITHMS)
            algorithms = {
                kind: algorithms.get(kind, every) - {"in_network", "collnet_nvls"} for kind in TUNED_COLLECTIVES
            }
        return NcclOverrides(
            algorithms=algorithms,
            protocols={} if self.protocols is None else _allowed(self.protocols, _PROTOCOLS),
            channel_limits=ChannelLimits(self.least, self.most, self.messages_least, self.messages_most),
            collnet_enabled=self.collnet == 1,
            description=" and ".join(self.names()),
        )

    def names(self) -> list[str]:
        """The variables that are set."""
        return [
            str(model_field.alias)
            for name, model_field in type(self).model_fields.items()
            if name in self.model_fields_set
        ]


def _unmodelled(name: str) -> str:
    """Why a variable of NCCL has no part in the model; empty for others."""
    beginning = next((why for start, why in _BEGINNINGS.items() if name.startswith(start)), "")
    return _UNMODELLED.get(name, beginning)
