"""Reads link technologies from files.

A domain's `generation` is one of NVLink or xGMI; its default is the accelerator's own (`nvlink` in its file),
and without either it is an error. The default `network` is InfiniBand.
"""

from clustersim.common.mapping_reader import MappingReader
from clustersim.hardware.link_technology import NETWORK_TECHNOLOGIES, SCALE_UP_TECHNOLOGIES, LinkTechnology


def read_generation(section: MappingReader, default: LinkTechnology | None, key: str = "generation") -> LinkTechnology:
    """The generation of links inside an NVLink domain; default: the accelerator's."""
    if not section.has_key(key):
        if default is not None:
            return default
        raise section.input_error(
            key, f"is missing, and the accelerator has none of its own; {', '.join(SCALE_UP_TECHNOLOGIES)} are known"
        )
    return SCALE_UP_TECHNOLOGIES[section.get_choice(key, *SCALE_UP_TECHNOLOGIES, required=True)]


def read_network_kind(section: MappingReader) -> LinkTechnology:
    """The network technology of NICs."""
    return NETWORK_TECHNOLOGIES[section.get_choice("network", *NETWORK_TECHNOLOGIES)]
