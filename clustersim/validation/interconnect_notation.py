"""What does the interconnect notation of the tables mean?

Tables state the scale-up links inside a node, then the network (`nvlink4 + 8x400G-ib-ndr`), in a small
language:

    interconnect = [scale-up] [" + " network] [" (" comment ")"]
    scale-up     = generation ["-" rate "GB/s"]   nvlink4, nvlink4-400GB/s (sum of both directions)
                 | "nvlink" | "xgmi"              the accelerator's own generation
                 | "nvl" GPUs                     nvl72: an NVLink domain of that many GPUs
                 | "PCIe" generation              PCIe5
    network      = [count "x"] rate "G" ["-" kind] [" per GPU"]   ports of a node, Gbit/s of one (or all)
                 | kind
    kind         = "ib" ["-" "edr" | "-hdr" | ...], roce, efa, tcpx, tcpxo, slingshot, opa, tcp, unknown,
                   unknown-roce

A port's rate is its nominal bandwidth; what collectives achieve is modelled by `collectives.library`.
`unknown` states nothing.
"""

import re
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import BytesPerSecond
from clustersim.hardware.link_technology import SCALE_UP_TECHNOLOGIES, LinkTechnology

_NETWORKS: Final = {
    "ib": LinkTechnology.INFINIBAND,
    **{f"ib-{speed}": LinkTechnology.INFINIBAND for speed in ("fdr", "edr", "hdr", "ndr", "xdr")},
    "roce": LinkTechnology.ROCE,
    "efa": LinkTechnology.EFA,
    "efa1": LinkTechnology.EFA1,
    "efa2": LinkTechnology.EFA2,
    "tcpx": LinkTechnology.TCPX,
    "tcpxo": LinkTechnology.TCPXO,
    "slingshot": LinkTechnology.SLINGSHOT,
    "opa": LinkTechnology.OMNIPATH,
    "tcp": LinkTechnology.TCP,
    "unknown": None,
    "unknown-roce": LinkTechnology.ROCE,
}
_DEFAULT_LINKS: Final = ("nvlink", "xgmi")
_SCALE_UP_TERMS: Final = (
    *SCALE_UP_TECHNOLOGIES,
    *_DEFAULT_LINKS,
    "nvl72",
    "PCIe3",
    "PCIe4",
    "PCIe5",
    "PCIe6",
    "unknown",
)
_PORTS_PATTERN: Final = re.compile(r"(?:(\d+)x)?(\d+)G(?:-([a-z][a-z0-9-]*))?( per GPU)?")
_COMMENT_PATTERN: Final = re.compile(r" \(.*\)$")
_RATE_PATTERN: Final = re.compile(r"(\w+)-(\d+)GB/s")
_DOMAIN_PATTERN: Final = re.compile(r"nvl(\d+)")
_PCIE_PATTERN: Final = re.compile(r"PCIe[3-6]")
_GIGABIT: Final = 1e9 / 8.0
_MAX_COUNT: Final = (
    10**6
)  # limit of ports per node, Gbit/s per port and GPUs per domain: larger values are typing errors


@dataclass(frozen=True, slots=True)
class NetworkPorts:
    """Network ports. count: per node, None: not stated; then rate is the node's sum (a GPU's if per_gpu).

    rate: bytes/s per direction, None: not stated; technology: of the network, None: not stated.
    """

    count: int | None = None
    rate: BytesPerSecond | None = None
    technology: LinkTechnology | None = None
    per_gpu: bool = False


@dataclass(frozen=True, slots=True)
class InterconnectSpec:
    """The stated interconnect; None: not stated.

    technology: scale-up technology; nvlink_bandwidth: bytes/s of a GPU per direction; nvlink_domain_size: GPUs.
    """

    technology: LinkTechnology | None = None
    nvlink_bandwidth: BytesPerSecond | None = None
    nvlink_domain_size: int | None = None
    ports: NetworkPorts | None = None


def parse_interconnect(text: str) -> InterconnectSpec:
    """Parse the interconnect notation; raises InputError that names the unknown word and the nearest valid one.

    >>> parse_interconnect("nvlink4-400GB/s + 8x400G-ib-ndr").nvlink_bandwidth
    200000000000.0
    """
    scale_up, _, network = _COMMENT_PATTERN.sub("", text.strip()).partition(" + ")
    if (
        not network
        and scale_up not in _SCALE_UP_TERMS
        and (_PORTS_PATTERN.fullmatch(scale_up) or scale_up in _NETWORKS)
    ):
        scale_up, network = "", scale_up
    ports = _parse_ports(network) if network else None
    if not scale_up or scale_up in ("unknown", *_DEFAULT_LINKS):
        return InterconnectSpec(ports=ports)
    return _parse_scale_up(scale_up, ports)


def _parse_scale_up(text: str, ports: NetworkPorts | None) -> InterconnectSpec:
    if text in SCALE_UP_TECHNOLOGIES:
        return InterconnectSpec(SCALE_UP_TECHNOLOGIES[text], ports=ports)
    rated, domain = (pattern.fullmatch(text) for pattern in (_RATE_PATTERN, _DOMAIN_PATTERN))
    if rated and rated[1] in SCALE_UP_TECHNOLOGIES:
        return InterconnectSpec(SCALE_UP_TECHNOLOGIES[rated[1]], _parse_count(rated[2], text) * 1e9 / 2.0, ports=ports)
    if domain:
        return InterconnectSpec(nvlink_domain_size=_parse_count(domain[1], text), ports=ports)
    if _PCIE_PATTERN.fullmatch(text):
        return InterconnectSpec(ports=ports)
    raise _unknown_word(text, _SCALE_UP_TERMS)


def _parse_ports(text: str) -> NetworkPorts:
    if text in _NETWORKS:
        return NetworkPorts(technology=_NETWORKS[text])
    match = _PORTS_PATTERN.fullmatch(text)
    if match is None:
        raise _unknown_word(text, (*_NETWORKS, "8x400G-ib-ndr"))
    count, rate, network, per_gpu = match.groups()
    if network and network not in _NETWORKS:
        raise _unknown_word(network, tuple(_NETWORKS))
    port_count = _parse_count(count, text) if count else None
    return NetworkPorts(
        port_count, _parse_count(rate, text) * _GIGABIT, _NETWORKS[network] if network else None, per_gpu is not None
    )


def _parse_count(digits: str, text: str) -> int:
    value = int(digits[:8])
    if not 1 <= value <= _MAX_COUNT:
        raise InputError(f"interconnect: {text!r}: {digits} is not from 1 to {_MAX_COUNT:,}")
    return value


def _unknown_word(text: str, candidates: tuple[str, ...]) -> InputError:
    return InputError(f"interconnect: unknown word {text!r}; {suggest_nearest(text, candidates)}")
