"""How do files name the make of links?

A domain's `generation` is one of NVLink or xGMI; where a file names none, it is the accelerator's own (`nvlink` in its
file), and where the accelerator has none either, that is an error. A `network` that is not named is InfiniBand.
"""

from clustersim.common.mapping_reader import MappingReader
from clustersim.hardware.link_technology import NETWORK_TECHNOLOGIES, SCALE_UP_TECHNOLOGIES, LinkTechnology


def read_generation(section: MappingReader, default: LinkTechnology | None, key: str = "generation") -> LinkTechnology:
    """The generation of links inside an NVLink domain; own: the accelerator's."""
    if not section.has_key(key):
        if default is not None:
            return default
        raise section.input_error(
            key, f"is missing, and the accelerator has none of its own; {', '.join(SCALE_UP_TECHNOLOGIES)} are known"
        )
    return SCALE_UP_TECHNOLOGIES[section.get_choice(key, *SCALE_UP_TECHNOLOGIES, required=True)]


def read_network_kind(section: MappingReader) -> LinkTechnology:
    """The kind of network that NICs lead to."""
    return NETWORK_TECHNOLOGIES[section.get_choice("network", *NETWORK_TECHNOLOGIES)]
