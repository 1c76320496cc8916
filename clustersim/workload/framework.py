"""What does the software of a training run cost beside the kernels that it runs?

A framework's host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU where it
can: `launch` is what it needs for one kernel or collective of forward, with the Python around it, `backward_launch` of
backward, with autograd and the hooks of parameters. Kernels are those that the simulator counts, of which some are
several in reality. `cost.launching` says when launching shows. `message` is what hosts add to each message between
pipeline stages (`cost.handing`). The caching allocator, the communicators and the workspaces of matrix products take
device memory beside tensors.

Constants belong to a generation of software, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass, fields
from typing import Final

from clustersim.section import Section
from clustersim.shipped import find, read_mapping
from clustersim.units import Bytes, Dimension, Seconds
from clustersim.workload.overheads import NONE, Accumulation, Batches, LossReport, Overheads

FLAGS: Final = tuple(each.name for each in fields(Overheads) if each.type is bool)
"""Overheads that are either there or not."""
_MOST_KEYS: Final = 2**31


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers.

    workspace: bytes that libraries take from the allocator for good; release_outputs: whether pipeline stages free
    what they have sent, where a scenario does not say it; launch, backward_launch: host seconds for one kernel or
    collective of forward (and the optimizer), and of backward; message: of hosts, for one message between pipeline
    stages; overheads: what it does in a step beside the model.
    """

    fragmentation: float
    communicator: Bytes
    workspace: Bytes = 0.0
    release_outputs: bool = True
    launch: Seconds = 0.0
    backward_launch: Seconds = 0.0
    message: Seconds = 0.0
    name: str = "framework"
    overheads: Overheads = NONE


def load_framework(name_or_path: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name_or_path)
    section = Section(path, read_mapping(path))
    memory, host = section.section("memory"), section.section("host")
    framework = Framework(
        fragmentation=memory.number("fragmentation", low=1.0),
        communicator=memory.quantity("communicator", Dimension.SIZE, zero=True),
        workspace=memory.quantity("workspace", Dimension.SIZE, zero=True),
        release_outputs=memory.flag("release_outputs"),
        launch=host.quantity("launch", Dimension.TIME, zero=True),
        backward_launch=host.quantity("backward_launch", Dimension.TIME, zero=True),
        message=host.quantity("message", Dimension.TIME, zero=True),
        name=path.stem,
        overheads=_overheads(section.section("overheads")) if section.has("overheads") else NONE,
    )
    section.text("description")
    section.section("sources").texts()
    section.finish()
    return framework


def _overheads(section: Section) -> Overheads:
    """What a framework does; nothing of what the file does not name."""
    named = (
        section.choice("accumulation", *(each.value for each in Accumulation)) if section.has("accumulation") else None
    )
    flags = {name: section.flag(name) for name in FLAGS}
    return Overheads(
        **flags,
        accumulation=None if named is None else Accumulation(named),
        softmax_keys=section.count("softmax_keys", most=_MOST_KEYS) if section.has("softmax_keys") else None,
        loss=LossReport(section.choice("loss", *(each.value for each in LossReport))),
        batches=Batches(section.choice("batches", *(each.value for each in Batches))),
    )
