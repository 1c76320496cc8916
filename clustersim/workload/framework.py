"""What does the software of a training run cost beside the kernels that it runs?

A framework's host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU where it
can: `launch` is what it needs for one kernel or collective of forward, with the Python around it, `backward_launch` of
backward, with autograd and the hooks of parameters. Kernels are those that the simulator counts, of which some are
several in reality. `cost.launching` says when launching shows. `message`
is what hosts add to each message between pipeline stages (`cost.handing`). The caching allocator and the communicators
take device memory beside tensors.

Constants belong to a generation of software, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass

from clustersim.section import Section
from clustersim.shipped import find, read_mapping
from clustersim.units import Bytes, Dimension, Seconds


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers.

    launch, backward_launch: host seconds for one kernel or collective of forward (and the optimizer), and of backward;
    message: of hosts, for one message between pipeline stages.
    """

    fragmentation: float
    communicator: Bytes
    launch: Seconds = 0.0
    backward_launch: Seconds = 0.0
    message: Seconds = 0.0
    name: str = "framework"


def load_framework(name_or_path: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name_or_path)
    section = Section(path, read_mapping(path))
    memory, host = section.section("memory"), section.section("host")
    framework = Framework(
        fragmentation=memory.number("fragmentation", low=1.0),
        communicator=memory.quantity("communicator", Dimension.SIZE, zero=True),
        launch=host.quantity("launch", Dimension.TIME, zero=True),
        backward_launch=host.quantity("backward_launch", Dimension.TIME, zero=True),
        message=host.quantity("message", Dimension.TIME, zero=True),
        name=path.stem,
    )
    section.text("description")
    section.section("sources").texts()
    section.finish()
    return framework
