"""What does the software of a training run cost beside the kernels that it runs?

A framework's host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU where it
can: `launch` is what it needs for one kernel of forward, with the Python around it, `backward_launch` of backward, with
autograd and the hooks of parameters. Kernels are those that the simulator counts, of which some are several in reality.
`collective` is what it needs for one collective: the library's own launch, the events and waits by which streams follow
each other, and the object that the caller may wait for. `experts_launch` is what a kernel of a model with experts
needs, whichever pass it is of: such a model's kernels are short, and its host gets ahead of them less often, so that
what a launch costs is seen. With CUDA graphs the kernels and collectives of a pass are captured once and launched
together, which takes `graph`: of the whole of a pass (Megatron-Core's `full_iteration`, or a graph for each layer,
whose launches are few beside what is in them), or of what is not on the ranks of experts (its scopes `attn`,
`moe_router` and `moe_preprocess`), since nobody knows beforehand how many rows come there. Assumed: the GPU runs the
nodes of a graph as it runs kernels that are launched ahead of it. `cost.host_launch` says when launching shows. `message`
is what hosts add to each message between pipeline stages (`cost.p2p_overhead`). The caching allocator, the communicators and
the workspaces of matrix products take device memory beside tensors; what graphs keep in pools of their own is not
counted.

What was measured of the host that a record is of stands for such constants where the framework launches in the same way
(`recorded`; `cost.measured_host`). `compiled` says that layers are compiled (`torch.compile`), whose launches cost what
such a record says; without one a compiled layer is launched like any other, which is rather too slow.

Constants belong to a generation of software, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Final

from clustersim.common.data_files import find, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import Section
from clustersim.common.units import Bytes, Dimension, Seconds
from clustersim.model.overheads import NONE, Accumulation, Batches, Grouping, LossReport, Overheads

FLAGS: Final = tuple(dataclass_field.name for dataclass_field in fields(Overheads) if dataclass_field.type is bool)
"""Overheads that are either there or not."""
_MOST_KEYS: Final = 2**31


class Captured(Enum):
    """What of a pass is in CUDA graphs."""

    NOTHING = "nothing"
    OUTSIDE_EXPERTS = "outside_experts"  # all but what is done with rows on the ranks of experts, and sent there
    ALL = "all"


class Recorded(Enum):
    """Which of a record's rows of a host (`cost.record.HostState`) stand for a framework's own launches."""

    NOTHING = "nothing"  # its Python and autograd are others
    EAGER = "eager"  # modules on today's autograd, and CUDA graphs; it shards and splits models in its own way
    TORCH = "torch"  # also those of `fully_shard`, DTensor and `torch.compile`


@dataclass(frozen=True, slots=True)
class Runs:
    """What a framework runs, in the words of scenario files: strategies of data parallelism, and schedules."""

    data: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    data_beside_pipeline: tuple[str, ...] = ("ddp", "zero1", "fsdp")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers.

    workspace: bytes that libraries take from the allocator for good; grouped_workspace: and for grouped products, if
    there are some; release_outputs: whether pipeline stages free
    what they have sent, where a scenario does not say it; launch, backward_launch: host seconds for one kernel of
    forward (and the optimizer), and of backward; collective: for one collective, None: as for a kernel; call: for a
    tensor operation without autograd and modules around it; graph: for a CUDA graph, None: there are none; message: of
    hosts, for one message between pipeline stages; experts_launch: for one kernel of a model with experts, None: as
    for others; captured: what of passes is in graphs; compiled: whether layers are; recorded: what of a record's host
    stands for this one's; early_stop: its activation checkpoints stop once all is there that backward needs; overheads:
    what it does in a step beside the model; runs: which layouts it has, where somebody looks for the best.
    """

    fragmentation: float
    communicator: Bytes
    workspace: Bytes = 0.0
    grouped_workspace: Bytes = 0.0
    release_outputs: bool = True
    launch: Seconds = 0.0
    backward_launch: Seconds = 0.0
    message: Seconds = 0.0
    collective: Seconds | None = None
    call: Seconds = 0.0
    graph: Seconds | None = None
    experts_launch: Seconds | None = None
    captured: Captured = Captured.NOTHING
    compiled: bool = False
    recorded: Recorded = Recorded.NOTHING
    early_stop: bool = False
    name: str = "framework"
    overheads: Overheads = NONE
    runs: Runs = Runs()

    @property
    def cuda_graphs(self) -> bool:
        """Whether anything is captured."""
        return self.captured is not Captured.NOTHING

    def with_experts(self, pace: float = 1.0) -> "Framework":
        """The same, as it launches a model with experts on a host that takes `pace` times as long as an x86 server."""
        if self.experts_launch is None:
            return self
        launch = pace * self.experts_launch
        return replace(self, launch=launch, backward_launch=launch, experts_launch=None)

    def with_graphs(self, captured: Captured = Captured.ALL) -> "Framework":
        """The same, its passes captured in CUDA graphs; raise InputError where it has none."""
        if self.graph is None:
            raise InputError(f"cuda_graphs: {self.name} captures none; leave it out, or name a framework that does")
        return replace(self, captured=captured)

    def with_compiled(self) -> "Framework":
        """The same, its layers compiled; raise InputError where it compiles none."""
        if self.recorded is not Recorded.TORCH:
            raise InputError(
                f"compiled: {self.name} compiles no layers; leave it out, or name a framework that does: pytorch"
            )
        return replace(self, compiled=True)

    def launching(self, forward: Seconds | None, backward: Seconds | None) -> "Framework":
        """The same, with what somebody says of its launches, for which no record stands any more; None: nothing said.

        Backward's take as long as forward's unless that is said.
        """
        if forward is None and backward is None:
            return self
        launch = self.launch if forward is None else forward
        own = launch if backward is None else backward
        given = replace(self, launch=launch, backward_launch=own, recorded=Recorded.NOTHING)
        return replace(given, experts_launch=None)


def load_framework(name_or_path: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find("frameworks", name_or_path)
    section = Section(path, read_mapping(path))
    memory, host, checkpoint = (section.section(name) for name in ("memory", "host", "checkpoint"))
    framework = Framework(
        fragmentation=memory.number("fragmentation", low=1.0),
        communicator=memory.quantity("communicator", Dimension.SIZE, zero=True),
        workspace=memory.quantity("workspace", Dimension.SIZE, zero=True),
        grouped_workspace=_size(memory, "grouped_workspace"),
        release_outputs=memory.flag("release_outputs"),
        launch=host.quantity("launch", Dimension.TIME, zero=True),
        backward_launch=host.quantity("backward_launch", Dimension.TIME, zero=True),
        message=host.quantity("message", Dimension.TIME, zero=True),
        collective=_seconds(host, "collective"),
        call=host.quantity("call", Dimension.TIME, zero=True),
        graph=_seconds(host, "graph"),
        experts_launch=_seconds(host, "experts_launch"),
        recorded=Recorded(host.choice("recorded", *(recorded.value for recorded in Recorded))),
        early_stop=checkpoint.flag("early_stop"),
        name=path.stem,
        overheads=_overheads(section.section("overheads")) if section.has("overheads") else NONE,
        runs=_runs(section.section("runs")) if section.has("runs") else Runs(),
    )
    section.text("description")
    section.section("sources").texts()
    section.finish()
    return framework


def _runs(section: Section) -> Runs:
    return Runs(
        **{dataclass_field.name: tuple(section.words(dataclass_field.name)) for dataclass_field in fields(Runs)}
    )


def _overheads(section: Section) -> Overheads:
    """What a framework does; nothing of what the file does not name."""
    named = (
        section.choice("accumulation", *(accumulation.value for accumulation in Accumulation))
        if section.has("accumulation")
        else None
    )
    grouping = section.choice("grouping", *(item.value for item in Grouping)) if section.has("grouping") else None
    flags = {name: section.flag(name) for name in FLAGS}
    return Overheads(
        **flags,
        accumulation=None if named is None else Accumulation(named),
        grouping=None if grouping is None else Grouping(grouping),
        softmax_keys=section.count("softmax_keys", most=_MOST_KEYS) if section.has("softmax_keys") else None,
        loss=LossReport(section.choice("loss", *(loss_report.value for loss_report in LossReport))),
        batches=Batches(section.choice("batches", *(Batch.value for Batch in Batches))),
    )


def _size(section: Section, key: str) -> Bytes:
    """Bytes; none where the file does not name them."""
    return section.quantity(key, Dimension.SIZE, zero=True) if section.has(key) else 0.0


def _seconds(host: Section, key: str) -> Seconds | None:
    """What the host needs for something, if the file says so."""
    return host.quantity(key, Dimension.TIME, zero=True) if host.has(key) else None
