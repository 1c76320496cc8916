"""What does the framework hold beside tensors? Constants of the allocator and of communicators, from a data file."""

from dataclasses import dataclass

from clustersim.section import Section
from clustersim.shipped import find, read_mapping
from clustersim.units import Bytes, Dimension


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers."""

    fragmentation: float
    communicator: Bytes


def load_framework(name: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name)
    section = Section(path, read_mapping(path))
    framework = Framework(
        fragmentation=section.number("fragmentation", low=1.0),
        communicator=section.quantity("communicator", Dimension.SIZE, zero=True),
    )
    section.finish()
    return framework
