"""What does the software of a training run cost beside the kernels that it runs?

A framework's host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU where it
can: `launch` is what it needs for one kernel or collective, with the Python and the autograd around it. Kernels are
those that the simulator counts, of which some are several in reality. `cost.block` says when launching shows. The
caching allocator and the communicators take device memory beside tensors.

Constants belong to a generation of software, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass

from clustersim.section import Section
from clustersim.shipped import find, read_mapping
from clustersim.units import Bytes, Dimension, Seconds


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers.

    launch: host seconds for one kernel or collective; early_stop: its activation checkpoints stop once all is there
    that backward needs.
    """

    fragmentation: float
    communicator: Bytes
    launch: Seconds = 0.0
    early_stop: bool = False
    name: str = "framework"


def load_framework(name_or_path: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name_or_path)
    section = Section(path, read_mapping(path))
    memory, host, checkpoint = (section.section(name) for name in ("memory", "host", "checkpoint"))
    framework = Framework(
        fragmentation=memory.number("fragmentation", low=1.0),
        communicator=memory.quantity("communicator", Dimension.SIZE, zero=True),
        launch=host.quantity("launch", Dimension.TIME, zero=True),
        early_stop=checkpoint.flag("early_stop"),
        name=path.stem,
    )
    section.text("description")
    section.section("sources").texts()
    section.finish()
    return framework
