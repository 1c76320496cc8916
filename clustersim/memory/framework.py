"""What does the framework hold beside tensors? Constants of the allocator and of communicators, from a data file."""

from dataclasses import dataclass

from clustersim.errors import InputError
from clustersim.shipped import find, read_mapping
from clustersim.units import Bytes, Dimension, parse_quantity


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers."""

    fragmentation: float
    communicator: Bytes


def load_framework(name: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name)
    content = read_mapping(path)
    missing = {"fragmentation", "communicator"} ^ content.keys()
    if missing:
        raise InputError(f"{path}: needs exactly the keys fragmentation and communicator; check {sorted(missing)}")
    fragmentation = float(content["fragmentation"])
    if fragmentation < 1:
        raise InputError(f"{path}: fragmentation is {fragmentation}, but reserved memory is never below allocated")
    return Framework(fragmentation, parse_quantity(content["communicator"], Dimension.SIZE))
