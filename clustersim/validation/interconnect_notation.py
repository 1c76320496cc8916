"""What do the words of an interconnect mean?

Tables say how GPUs are joined inside a node, then how nodes are (`nvlink4 + 8x400G-ib-ndr`), in a small language:

    interconnect = [inside] [" + " network] [" (" comment ")"]
    inside       = generation ["-" rate "GB/s"]     nvlink4, nvlink4-400GB/s (both directions, as datasheets print it)
                 | "nvlink" | "xgmi"                the accelerator's own generation
                 | "nvl" GPUs                       nvl72: an NVLink domain of so many GPUs
                 | "PCIe" generation                PCIe5
    network      = [count "x"] rate "G" ["-" kind] [" per GPU"]     ports of a node, Gbit/s of one (or all)
                 | kind
    kind         = "ib" ["-" "edr" | "-hdr" | ...], roce, efa, tcpx, tcpxo, slingshot, opa, tcp, unknown, unknown-roce

The rate of a port is its label; what a collective reaches of it is the library's matter. `unknown` states nothing.
"""

import re
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import BytesPerSecond
from clustersim.hardware.link_technology import SCALE_UP_TECHNOLOGIES, LinkTechnology

_KINDS: Final = {
    "ib": LinkTechnology.INFINIBAND,
    **{f"ib-{speed}": LinkTechnology.INFINIBAND for speed in ("fdr", "edr", "hdr", "ndr", "xdr")},
    "roce": LinkTechnology.ROCE,
    "efa": LinkTechnology.EFA,
    "efa1": LinkTechnology.EFA1,
    "tcpx": LinkTechnology.TCPX,
    "tcpxo": LinkTechnology.TCPXO,
    "slingshot": LinkTechnology.SLINGSHOT,
    "opa": LinkTechnology.OMNIPATH,
    "tcp": LinkTechnology.TCP,
    "unknown": None,
    "unknown-roce": LinkTechnology.ROCE,
}
_OWN: Final = ("nvlink", "xgmi")
_INSIDE: Final = (*SCALE_UP_TECHNOLOGIES, *_OWN, "nvl72", "PCIe3", "PCIe4", "PCIe5", "PCIe6", "unknown")
_PORTS: Final = re.compile(r"(?:(\d+)x)?(\d+)G(?:-([a-z-]+))?( per GPU)?")
_COMMENT: Final = re.compile(r" \(.*\)$")
_RATED: Final = re.compile(r"(\w+)-(\d+)GB/s")
_DOMAIN: Final = re.compile(r"nvl(\d+)")
_PCIE: Final = re.compile(r"PCIe([3-6])")
_GIGABIT: Final = 1e9 / 8.0
_MOST: Final = 10**6  # ports of a node, Gbit/s of one, GPUs of a domain: a typing error beyond


@dataclass(frozen=True, slots=True)
class Ports:
    """Network ports. count: of a node, None: not stated, and rate is that of all (or of a GPU, where `per_gpu`).

    rate: bytes/s per direction, None: not stated; kind: of the network, None: not stated.
    """

    count: int | None = None
    rate: BytesPerSecond | None = None
    kind: LinkTechnology | None = None
    per_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What is stated; None: not. rate: of a GPU's NVLink, per direction; domain: GPUs of one; pcie: its generation."""

    generation: LinkTechnology | None = None
    rate: BytesPerSecond | None = None
    domain: int | None = None
    pcie: int | None = None
    ports: Ports | None = None


def read_interconnect(text: str) -> Interconnect:
    """What an interconnect says; raise InputError that names the word that is unknown, and the nearest legal one.

    >>> read_interconnect("nvlink4-400GB/s + 8x400G-ib-ndr").rate
    200000000000.0
    """
    inside, _, network = _COMMENT.sub("", text.strip()).partition(" + ")
    if not network and inside not in _INSIDE and (_PORTS.fullmatch(inside) or inside in _KINDS):
        inside, network = "", inside
    ports = _ports(network) if network else None
    if not inside or inside in ("unknown", *_OWN):
        return Interconnect(ports=ports)
    return _inside(inside, ports)


def _inside(word: str, ports: Ports | None) -> Interconnect:
    if word in SCALE_UP_TECHNOLOGIES:
        return Interconnect(SCALE_UP_TECHNOLOGIES[word], ports=ports)
    rated, domain, pcie = (item.fullmatch(word) for item in (_RATED, _DOMAIN, _PCIE))
    if rated and rated[1] in SCALE_UP_TECHNOLOGIES:
        return Interconnect(SCALE_UP_TECHNOLOGIES[rated[1]], _whole(rated[2], word) * 1e9 / 2.0, ports=ports)
    if domain:
        return Interconnect(domain=_whole(domain[1], word), ports=ports)
    if pcie:
        return Interconnect(pcie=int(pcie[1]), ports=ports)
    raise _unknown(word, _INSIDE)


def _ports(text: str) -> Ports:
    if text in _KINDS:
        return Ports(kind=_KINDS[text])
    stated = _PORTS.fullmatch(text)
    if stated is None:
        raise _unknown(text, (*_KINDS, "8x400G-ib-ndr"))
    count, rate, kind, per_gpu = stated.groups()
    if kind and kind not in _KINDS:
        raise _unknown(kind, tuple(_KINDS))
    number = _whole(count, text) if count else None
    return Ports(number, _whole(rate, text) * _GIGABIT, _KINDS[kind] if kind else None, per_gpu is not None)


def _whole(digits: str, word: str) -> int:
    number = int(digits[:8])
    if not 1 <= number <= _MOST:
        raise InputError(f"interconnect: {word!r}: {digits} is not from 1 to {_MOST:,}")
    return number


def _unknown(word: str, known: tuple[str, ...]) -> InputError:
    return InputError(f"interconnect: unknown word {word!r}; {suggest_nearest(word, known)}")
