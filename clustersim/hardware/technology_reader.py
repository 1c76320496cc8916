"""How do files name the make of links?

A domain's `generation` is one of NVLink or xGMI; where a file names none, it is the accelerator's own (`nvlink` in its
file), and where the accelerator has none either, that is an error. A `network` that is not named is InfiniBand.
"""

from clustersim.common.mapping_reader import Section
from clustersim.hardware.link_technology import GENERATIONS, NETWORKS, Technology


def read_generation(section: Section, own: Technology | None, key: str = "generation") -> Technology:
    """The generation of links inside an NVLink domain; own: the accelerator's."""
    if not section.has(key):
        if own is not None:
            return own
        raise section.refuse(
            key, f"is missing, and the accelerator has none of its own; {', '.join(GENERATIONS)} are known"
        )
    return GENERATIONS[section.choice(key, *GENERATIONS, required=True)]


def read_network_kind(section: Section) -> Technology:
    """The kind of network that NICs lead to."""
    return NETWORKS[section.choice("network", *NETWORKS)]
